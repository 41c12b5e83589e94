"""The one training: its loop, its checkpoints, what it measures and what it leaves behind."""
