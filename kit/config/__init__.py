"""The recipe schema and the command line, and their validation. Imports plain Python, pydantic and PyYAML only."""
