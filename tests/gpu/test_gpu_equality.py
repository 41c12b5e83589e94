"""Every rung is the same training as the single GPU, in float32 without TF32.

With one GPU: worlds of one on NCCL, cut models whose stages share the GPU, two ranks that share it over gloo. With two:
the cases of the tests on CPUs.
"""

import pytest
from test_rungs import CASES, case, check
from worlds import compared


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
    case("ddp", "transformer", microbatches=2),
    case("pipeline", "resnet18", form="one-process", microbatches=4, batch_size=16),
]
# gloo: all-reduce only
SHARED = [case("ddp", "transformer"), case("ddp", "convnet"), case("ddp", "convnet", "batch")]
ALL = {n: [one for worlds in CASES.values() for one in worlds.get(n, [])] for n in (2, 3, 4)}
ONE_PROCESS = [c for c in ALL[2] if c.get("form") == "one-process" and c.get("devices", 2) == 2]
PER_DEVICE = {n: [c for c in cases if c.get("form") != "one-process"] for n, cases in ALL.items()}
WORLDS = [  # processes, cases, options of the program, GPUs
    pytest.param(1, ONE, ["one-gpu"], id="one GPU"),
    pytest.param(2, SHARED, ["one-gpu"], id="two ranks that share a GPU over gloo"),
    pytest.param(1, ONE_PROCESS, [], id="one process that drives two GPUs", marks=pytest.mark.gpus(2)),
    *(
        pytest.param(n, cases, [], id=f"{n} GPUs", marks=pytest.mark.gpus(n))
        for n, cases in PER_DEVICE.items()
    ),
]


@pytest.mark.parametrize(("processes", "cases", "options"), WORLDS)
def test_equal_to_the_single_gpu_with_the_same_microbatches(tmp_path, processes, cases, options):
    results = compared(tmp_path, {processes: cases}, *options)[processes]
    for result, one in zip(results, cases, strict=True):
        own = {"buffers", "validation"} if one["norm"] == "batch" else set()  # batch norm's own statistics
        result = {
            which: {k: v for k, v in values.items() if k not in own} for which, values in result.items()
        }
        check(result, one)
