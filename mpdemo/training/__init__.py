"""The parts of a training run that no rung spells out: between two batches, its log, its checkpoints."""
