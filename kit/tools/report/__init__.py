"""HTML pages: the report of a run, and samples as the model learns from them."""
