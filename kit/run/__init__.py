"""The output folder of a run: whose it is, its record, its metrics."""
