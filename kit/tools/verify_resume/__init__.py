"""kit verify-resume: kill a run, resume it, and compare it bit for bit with an uninterrupted run."""
