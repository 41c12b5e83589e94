"""Every rung is the same training as the single device: loss, gradients, weights after three steps, validation.

One world of two and one of three processes run all their cases (starting a world costs seconds, a case little).
"""

import json

import pytest
from worlds import compared

CLOSE = 2e-5  # float32, summed in another order


def case(rung, model, norm="group", **more):
    """Settings of one comparison; the batch is 24 images unless said. The transformer learns by AdamW."""
    optimizer, lr = ("adamw", 1e-3) if model == "transformer" else ("sgd", 0.01)
    common = {"norm": norm, "batch_size": 24, "optimizer": optimizer, "lr": lr}
    return {"rung": rung, "model": model, **common, **more}


def both_norms(rung, **more):
    return [case(rung, "convnet", norm, **more) for norm in ("batch", "group")]


TWO = [
    *both_norms("data_parallel", form="one-process"),
    case("data_parallel", "transformer", form="one-process", devices=3),
    *both_norms("ddp"),
    case("ddp", "resnet18", "batch", batch_size=8),
    case("ddp", "resnet18", "group", batch_size=8),
    case("ddp", "transformer"),
    *both_norms("ddp", microbatches=3),
    *both_norms("data_parallel", form="one-process", microbatches=2),
    *both_norms("model_parallel", cut="layer1"),
    *both_norms("model_parallel", form="one-process", cut="layer2"),
    case("model_parallel", "resnet18", "batch", batch_size=8, cut="layer2.1"),
    case("model_parallel", "resnet18", "batch", batch_size=8, cut="4", form="one-process"),
    case("model_parallel", "transformer", cut="block.5"),
    case("model_parallel", "transformer", form="one-process"),
    *both_norms("pipeline", form="one-process", microbatches=4),
    case("pipeline", "transformer", form="one-process", microbatches=3, devices=3, batch_size=12),
    case("pipeline", "resnet18", "batch", form="one-process", microbatches=2, batch_size=8),
    *both_norms("pipeline", schedule="GPipe", microbatches=2),
    *both_norms("pipeline", schedule="1F1B", microbatches=6, cut="layer2"),
    case("pipeline", "resnet18", "batch", schedule="1F1B", microbatches=4, batch_size=16, cut="layer3.0"),
    case("pipeline", "resnet18", "group", schedule="ZBVZeroBubble", microbatches=4, batch_size=16),
    case("pipeline", "toy", schedule="Interleaved1F1B", microbatches=4),
    case("pipeline", "toy", schedule="InterleavedZeroBubble", microbatches=4),
    case("pipeline", "toy", schedule="ZBVZeroBubble", microbatches=4),
    *(case("pipeline", "transformer", schedule=name, microbatches=4) for name in ("GPipe", "1F1B")),
    case("pipeline", "transformer", schedule="Interleaved1F1B", microbatches=4, cut="2,5,8"),
    case("pipeline", "transformer", schedule="InterleavedZeroBubble", microbatches=4),
    case("pipeline", "transformer", schedule="ZBVZeroBubble", microbatches=8, cut="block.1,block.3,block.5"),
]
THREE = [
    case("ddp", "convnet", "batch"),
    case("model_parallel", "convnet", "batch", cut="1,2"),
    case("pipeline", "toy", schedule="1F1B", microbatches=6, cut="linear1,linear2"),
    case("pipeline", "transformer", schedule="GPipe", microbatches=3, cut="2,6"),
    case("pipeline", "transformer", schedule="Interleaved1F1B", microbatches=6),
    case("pipeline", "transformer", schedule="InterleavedZeroBubble", microbatches=6),
    case("pipeline", "transformer", schedule="ZBVZeroBubble", microbatches=6),
    case("pipeline", "resnet18", "batch", schedule="1F1B", microbatches=4, batch_size=16, cut="3,6"),
]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Results by (processes, number of the case)."""
    return compared(tmp_path_factory.mktemp("equality"), {2: TWO, 3: THREE})


def named(cases):
    skip = ("norm", "batch_size", "optimizer", "lr")
    return [" ".join(str(v) for k, v in c.items() if k not in skip) + f" {c['norm']}" for c in cases]


def check(result, case):
    """Equal to the single device with the same microbatches; with group norm to the whole batch as well."""
    for which in ("same", "full"):
        if which == "full" and case["norm"] == "batch" and case["model"] in ("convnet", "resnet18"):
            continue
        for what, difference in result[which].items():
            shared = case["rung"] in ("data_parallel", "ddp") or which == "full"
            if case["norm"] == "batch" and (what == "validation" or (what == "buffers" and shared)):
                continue  # batch norm's running statistics depend on who saw which images
            assert difference < CLOSE, (which, what, difference)


def check_but_buffers(path, number, case):
    """Check a result of a file but for batch norm's statistics, of which each process has its own."""
    result = json.loads(path.read_text())[number]
    check({which: {k: v for k, v in values.items() if k != "buffers"} for which, values in result.items()}, case)


@pytest.mark.parametrize("number", range(len(TWO)), ids=named(TWO))
def test_two_processes(results, number):
    check(results[2][number], TWO[number])


@pytest.mark.parametrize("number", range(len(THREE)), ids=named(THREE))
def test_three_processes(results, number):
    check(results[3][number], THREE[number])


def test_batch_norm_sees_microbatches(results):
    """The lesson of notebook 05: with batch norm a cut batch is another computation than the whole batch."""
    number = next(i for i, c in enumerate(TWO) if c["norm"] == "batch" and c.get("schedule") == "1F1B")
    assert results[2][number]["full"]["gradients"] > 1e-2
