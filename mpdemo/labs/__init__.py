"""What the notebooks' jobs run: measurements in a world of several processes."""
