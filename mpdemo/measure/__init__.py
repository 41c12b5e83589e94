"""Measure a strategy: driven step by step (trial.py), timed beside others (compare.py), and what each rank did when."""
