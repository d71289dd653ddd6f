"""The output folder of a run: which run it belongs to, its record, its metrics."""
