"""What each rank did when: recorded from outside (observe.py), read and compared with a simulation (read.py)."""
