"""What a trainer runs: each command is a loop over the jobs of the course."""
