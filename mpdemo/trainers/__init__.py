"""What a trainer does before a class: look at the course's batch scripts (render.py), try every job (rehearse.py)."""
