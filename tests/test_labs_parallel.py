"""Context and expert parallelism by hand: outputs and gradients are those of one device."""

import pytest

from mpdemo.ranks import run_program

CLOSE = 2e-6


@pytest.mark.parametrize(("lab", "keys"), [
    ("context_parallel", {"gathered", "ring"}),
    ("expert_parallel", {"output", "tokens", "router", "expert"}),
])  # fmt: skip
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_the_ranks_compute_what_one_device_computes(lab, keys, processes):
    program = f"from mpdemo.labs.{lab} import compare\nprint(compare())"
    results = run_program(program, "compare()", processes, timeout=60.0)
    assert [error for _, _, error in results] == [None] * processes
    for _, found, _ in results:
        assert found.keys() == keys and max(found.values()) < CLOSE
