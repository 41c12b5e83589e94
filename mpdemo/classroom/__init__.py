"""The trainer's view of a class: ``python -m mpdemo class`` reads the learners' folders. Loads no PyTorch."""
