"""Single answers with a label."""
