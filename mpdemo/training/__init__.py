"""The parts of a training that no rung spells out: what a run does between two batches, its log, its checkpoints."""
