"""The dataset types: a module for each."""
