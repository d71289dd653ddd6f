"""All checks before any weight is read."""
