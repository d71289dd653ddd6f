"""The ``kit`` command: one module for each of its commands."""
