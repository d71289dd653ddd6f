"""From one command to the processes of a run."""
