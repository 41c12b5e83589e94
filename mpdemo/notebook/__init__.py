"""What a cell displays: source, differences, a live job, pictures, the step player."""
