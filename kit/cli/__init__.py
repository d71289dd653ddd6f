"""The ``kit`` command, a module for each of its commands."""
