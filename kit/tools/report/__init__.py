"""HTML pages: the report of a run, and samples with their loss masks."""
