"""Tool calls in rollouts."""
