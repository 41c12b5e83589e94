"""The parts of a training run that no rung spells out: what it is built from, its log, its recorded steps."""
