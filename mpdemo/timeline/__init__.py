"""What each rank did when: recorded (record.py), read and compared with a simulation (read.py)."""
