"""What a cell shows: source, differences, a live job, pictures, the explorer."""
