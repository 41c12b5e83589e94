"""Every rung is the same training as the single GPU: in float32 without TF32, in bf16 to its rounding.

With one GPU: worlds of one on NCCL, cut models whose stages share the GPU, two ranks that share it over gloo. With two:
the cases of the tests on CPUs.
"""

import pytest
from test_rungs import FOUR, THREE, TWO, case, check
from worlds import compared

ROUNDING = {"bf16": 0.05}  # another order of the sums, in numbers of 8 bits


def rungs(model, **more):
    """Every rung that one process can run; cut models in two stages."""
    yield case("ddp", model, **more)
    yield case("fsdp", model, **more)
    yield case("data_parallel", model, form="one-process", devices=1, **more)
    yield case("model_parallel", model, form="one-process", devices=2, **more)
    yield case("pipeline", model, form="one-process", devices=2, microbatches=4, **more)


ONE = [
    *rungs("transformer"),
    *rungs("convnet"),
    case("tensor", "transformer"),
    case("tensor", "transformer", sequence_parallel=True),
    case("ddp", "transformer", microbatches=2, activation_checkpointing=True),
    case("pipeline", "resnet18", form="one-process", microbatches=4, batch_size=16),
    *rungs("transformer", precision="bf16"),
    *rungs("convnet", precision="bf16"),
]
SHARED = [case("ddp", "transformer"), case("ddp", "convnet"), case("ddp", "convnet", "batch")]  # gloo: all-reduce only
ONE_PROCESS = [c for c in TWO if c.get("form") == "one-process" and c.get("devices", 2) == 2]
PER_DEVICE = {
    2: [c for c in TWO if c.get("form") != "one-process"],
    3: THREE,
    4: [c for c in FOUR if c.get("form") != "one-process"],
}


@pytest.fixture(scope="session")
def on_one(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("one"), {1: ONE}, "one-gpu")[1]


@pytest.fixture(scope="session")
def by_two_ranks(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("shared"), {2: SHARED}, "one-gpu")[2]


@pytest.fixture(scope="session")
def in_one_process(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("one-process"), {1: ONE_PROCESS})[1]


def check_rounded(result, case):
    """Equal to the single device of the same precision and microbatches, but for batch norm's own statistics."""
    own = {"buffers", "validation"} if case["norm"] == "batch" else set()
    result = {which: {k: v for k, v in values.items() if k not in own} for which, values in result.items()}
    if case.get("precision") in ROUNDING:
        assert max(result["same"].values()) < ROUNDING[case["precision"]], result["same"]
    else:
        check(result, case)


@pytest.mark.parametrize("number", range(len(ONE)))
def test_one_gpu(on_one, number):
    check_rounded(on_one[number], ONE[number])


@pytest.mark.parametrize("number", range(len(SHARED)))
def test_two_ranks_share_a_gpu_over_gloo(by_two_ranks, number):
    check_rounded(by_two_ranks[number], SHARED[number])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("number", range(len(ONE_PROCESS)))
def test_one_process_drives_two_gpus(in_one_process, number):
    check_rounded(in_one_process[number], ONE_PROCESS[number])


@pytest.mark.parametrize("processes", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in PER_DEVICE])
def test_a_process_per_gpu(tmp_path, processes):
    results = compared(tmp_path, {processes: PER_DEVICE[processes]})[processes]
    for result, one in zip(results, PER_DEVICE[processes], strict=True):
        check_rounded(result, one)
