"""The output folder of a run: its identity, record, metrics and log."""
