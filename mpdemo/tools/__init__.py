"""The tools that outlive the course. They may import the course, never the reverse; each has a README."""
