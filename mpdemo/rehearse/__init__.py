"""The day before a course: ``python -m mpdemo rehearse`` runs each of its jobs on the real cluster, as small as can be.

Loads no PyTorch itself; what each process does stands in `mpdemo.rehearse.task`.
"""
