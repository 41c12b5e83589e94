"""The parts of a training run that no rung spells out: where it is, its log, its checkpoints."""
