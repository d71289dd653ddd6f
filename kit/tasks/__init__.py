"""What a model is trained for: a folder for each task, with its losses."""
