"""The recipe schema, the command line, and what is wrong with them. Plain Python, pydantic and PyYAML."""
