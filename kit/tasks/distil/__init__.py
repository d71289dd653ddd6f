"""Another model to imitate."""
