"""Test of the program in notebook 31: the last stage of a pipeline."""
# ruff: noqa: F821 - what the reader's program defines

from checks.helpers import MICROBATCHES, require_stages


def test_31_1(rank, n):
    require_stages(rank, lambda stage, labels: last_stage(stage, labels, MICROBATCHES))
