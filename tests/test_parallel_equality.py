"""Every rung is the same training as the single device: loss, gradients, weights after three steps, validation.

One world of two and one of three processes run all their cases (starting a world costs seconds, a case little).
"""

import json
import os
import subprocess
import sys

import pytest

from mpdemo.paths import root

CLOSE = 2e-5  # float32, summed in another order


def case(rung, model, norm="group", **more):
    """Settings of one comparison; the batch is 24 images unless said."""
    return {"rung": rung, "model": model, "norm": norm, "batch_size": 24, "lr": 0.01, **more}


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
    *both_norms("pipeline", form="one-process", microbatches=4),
    case("pipeline", "transformer", form="one-process", microbatches=3, devices=3, batch_size=12),
    case("pipeline", "resnet18", "batch", form="one-process", microbatches=2, batch_size=8),
    *both_norms("pipeline", schedule="gpipe", microbatches=2),
    *both_norms("pipeline", schedule="1f1b", microbatches=6, cut="layer2"),
    *both_norms("pipeline", schedule="naive"),
    case("pipeline", "resnet18", "batch", schedule="1f1b", microbatches=4, batch_size=16, cut="layer3.0"),
    case("pipeline", "resnet18", "group", schedule="zbv", microbatches=4, batch_size=16),
    case("pipeline", "toy", schedule="interleaved-1f1b", microbatches=4),
    case("pipeline", "toy", schedule="interleaved-zero-bubble", microbatches=4),
    case("pipeline", "toy", schedule="zbv", microbatches=4),
    case("pipeline", "transformer", schedule="interleaved-1f1b", microbatches=4, cut="2,5,8"),
    case("pipeline", "transformer", schedule="interleaved-zero-bubble", microbatches=4),
    case("pipeline", "transformer", schedule="zbv", microbatches=8, cut="block.1,block.3,block.5"),
]
THREE = [
    case("ddp", "convnet", "batch"),
    case("model_parallel", "convnet", "batch", cut="1,2"),
    case("pipeline", "toy", schedule="1f1b", microbatches=6, cut="linear1,linear2"),
    case("pipeline", "transformer", schedule="gpipe", microbatches=3, cut="2,6"),
    case("pipeline", "transformer", schedule="interleaved-1f1b", microbatches=6),
    case("pipeline", "transformer", schedule="interleaved-zero-bubble", microbatches=6),
    case("pipeline", "transformer", schedule="zbv", microbatches=6),
    case("pipeline", "resnet18", "batch", schedule="1f1b", microbatches=4, batch_size=16, cut="3,6"),
]


def run_world(processes, cases, folder):
    """Run all cases in one world; a result a case."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["tests/programs/equality.py", str(folder / "cases.json"), str(folder / "results.json")]
    environment = {**os.environ, "PYTHONPATH": str(root()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Results by (processes, number of the case)."""
    worlds = {2: TWO, 3: THREE}
    return {n: run_world(n, cases, tmp_path_factory.mktemp(f"world{n}")) for n, cases in worlds.items()}


def named(cases):
    skip = ("norm", "batch_size", "lr")
    return [" ".join(str(v) for k, v in c.items() if k not in skip) + f" {c['norm']}" for c in cases]


def check(result, case):
    """Equal to the single device with the same microbatches; with group norm to the whole batch as well."""
    for which in ("same", "full"):
        if which == "full" and case["norm"] == "batch" and case["model"] in ("convnet", "resnet18"):
            continue
        for what, difference in result[which].items():
            if what == "validation" and case["norm"] == "batch":
                continue  # batch norm's running statistics depend on who saw which images
            assert difference < CLOSE, (which, what, difference)


@pytest.mark.parametrize("number", range(len(TWO)), ids=named(TWO))
def test_two_processes(results, number):
    check(results[2][number], TWO[number])


@pytest.mark.parametrize("number", range(len(THREE)), ids=named(THREE))
def test_three_processes(results, number):
    check(results[3][number], THREE[number])


def test_batch_norm_sees_microbatches(results):
    """The lesson of notebook 05: with batch norm a cut batch is another computation than the whole batch."""
    number = next(i for i, c in enumerate(TWO) if c["norm"] == "batch" and c.get("schedule") == "1f1b")
    assert results[2][number]["full"]["gradients"] > 1e-2
