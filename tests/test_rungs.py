"""Every rung is the same training as the single device: loss, gradients, weights after three steps, validation.

Worlds of two, three, four and six processes run all their cases (starting a world costs seconds, a case little).
"""

import functools
import subprocess

import pytest
from worlds import compared

from mpdemo.errors import UserError
from mpdemo.paths import source
from mpdemo.settings import RUNGS, Settings, checked, is_per_device

CLOSE = 2e-5  # float32, summed in another order
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def case(rung, model, norm="group", **more):
    """Settings of one comparison; the batch is 24 images unless said. The transformer learns by AdamW."""
    optimizer, lr = ("adamw", 1e-3) if model == "transformer" else ("sgd", 0.01)
    common = {"norm": norm, "batch_size": 24, "optimizer": optimizer, "lr": lr}
    return {"rung": rung, "model": model, **common, **more}


def both_norms(rung, **more):
    return [case(rung, "convnet", norm, **more) for norm in ("batch", "group")]


ONE = {"form": "one-process"}
CUTS = {
    "model_parallel": "block.3",
    "pipeline": "block.1,block.3,block.5",
    "hybrid": "block.1,block.3,block.5",
}
TINY = {"model": "transformer", "image_size": 14}  # 4 tokens
SMALL = {"model": "transformer", "batch_size": 8}
TWO = [
    *both_norms("data_parallel", **ONE, microbatches=2),
    *both_norms("ddp", microbatches=3),
    case("ddp", **TINY),
    *both_norms("model_parallel", cut="layer1"),
    case("pipeline", "convnet", **ONE, microbatches=4),
    *both_norms("pipeline", schedule="1F1B", microbatches=6, cut="layer2"),
    case("pipeline", **TINY, schedule="GPipe", microbatches=4),
    case("pipeline", **TINY, schedule="Interleaved1F1B", microbatches=4, cut="2,5,8"),
    case("pipeline", **TINY, schedule="InterleavedZeroBubble", microbatches=4),
    case("pipeline", **TINY, schedule="ZBVZeroBubble", microbatches=8, cut="block.1,block.3,block.5"),
    case("fsdp", **TINY, microbatches=2, batch_size=8),
    case("fsdp", "toy", batch_size=16),
    case("tensor", **SMALL),
    case("tensor", **SMALL, microbatches=2),
]
THREE = [  # the least with a device between the first and the last
    case("ddp", "convnet", "batch"),
    case("model_parallel", "convnet", "batch", cut="1,2"),
    case("pipeline", **TINY, schedule="GPipe", microbatches=3, cut="2,6"),
    case("pipeline", **TINY, schedule="ZBVZeroBubble", microbatches=6),
]
FOUR = [  # hybrid: 2 replicas of 2 devices
    *(
        case("hybrid", "toy", schedule=name, microbatches=2)
        for name in ("Interleaved1F1B", "ZBVZeroBubble")
    ),
    case("hybrid", "convnet", "batch", schedule="1F1B", microbatches=3, cut="layer2"),
    case("hybrid", **TINY, schedule="InterleavedZeroBubble", microbatches=2, batch_size=8),
    case("hybrid", **TINY, schedule="1F1B", microbatches=2, batch_size=8, sharded=True),
    case("hybrid", "convnet", "batch", schedule="GPipe", microbatches=2, sharded=True),
    case("fsdp", "toy", microbatches=2),
]
MORE = {  # by processes, and only in `make nightly`: the other models, cuts and shapes
    2: [
        *both_norms("data_parallel", **ONE),
        case("pipeline", "convnet", "batch", batch_size=8, schedule="GPipe", microbatches=2),
        case("model_parallel", **TINY, cut="block.5", **ONE),
        case("pipeline", "convnet", "batch", **ONE, microbatches=4),
        case("data_parallel", **TINY, **ONE, devices=3),
        *both_norms("ddp"),
        case("ddp", "resnet18", "batch", batch_size=8),
        *both_norms("model_parallel", **ONE, cut="layer2"),
        case("model_parallel", "resnet18", "batch", batch_size=8, cut="layer2.1"),
        case("model_parallel", "resnet18", "batch", batch_size=8, cut="4", **ONE),
        case("model_parallel", "transformer", cut="block.5"),
        case("pipeline", "transformer", **ONE, microbatches=3, devices=3, batch_size=12),
        *both_norms("pipeline", schedule="GPipe", microbatches=2),
        case(
            "pipeline", "resnet18", "batch", schedule="1F1B", microbatches=4, batch_size=16, cut="layer3.0"
        ),
        case("pipeline", "resnet18", "group", schedule="ZBVZeroBubble", microbatches=4, batch_size=16),
        *(case("pipeline", "toy", schedule=name, microbatches=4) for name in SCHEDULES[2:]),
        case("pipeline", "transformer", schedule="1F1B", microbatches=4),
        case("fsdp", "convnet", "batch"),
    ],
    3: [
        *(case("pipeline", "transformer", schedule=name, microbatches=6) for name in SCHEDULES[2:4]),
        case("pipeline", "resnet18", "batch", schedule="1F1B", microbatches=4, batch_size=16, cut="3,6"),
    ],
    4: [
        case("hybrid", "toy", schedule="GPipe", microbatches=2),
        case("hybrid", "transformer", schedule="1F1B", microbatches=2, cut="block.2", batch_size=8),
        *(
            case("hybrid", "toy", schedule=name, microbatches=2, sharded=True)
            for name in ("GPipe", "Interleaved1F1B")
        ),
    ],
    6: [  # 2 x 3 and 3 x 2
        case("hybrid", "toy", schedule="1F1B", microbatches=3, cut="linear1,linear2"),
        case("hybrid", "transformer", schedule="ZBVZeroBubble", microbatches=3, batch_size=6),
        case("hybrid", "toy", schedule="Interleaved1F1B", microbatches=2, replicas=3),
    ],
}
CASES = {"usual": {2: TWO, 3: THREE, 4: FOUR}, "nightly": MORE}


def each_case():
    """Yield when a case is tried, in how many processes, and its number among them."""
    for when, worlds in CASES.items():
        for world, cases in worlds.items():
            for number, settings in enumerate(cases):
                shown = {
                    k: v for k, v in settings.items() if k not in ("norm", "batch_size", "optimizer", "lr")
                }
                name = " ".join(map(str, (world, *shown.values(), settings["norm"])))
                marks = pytest.mark.nightly if when == "nightly" else ()
                yield pytest.param(when, world, number, id=name, marks=marks)


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Results by when cases are tried, world and number; all of a time are computed when the first is asked for."""
    return functools.cache(lambda when: compared(tmp_path_factory.mktemp(when), CASES[when]))


def check(result, case):
    """Equal to the single device with the same microbatches; with group norm to the whole batch as well."""
    batch_norm = case["norm"] == "batch" and case["model"] in ("convnet", "resnet18")
    replicated = case["rung"] in ("data_parallel", "ddp", "hybrid", "fsdp")
    for which in ("same", "full"):
        if which == "full" and batch_norm:
            continue
        for what, difference in result[which].items():
            if batch_norm and (what == "validation" or (what == "buffers" and replicated)):
                continue  # batch norm's running statistics depend on who saw which images
            assert difference < CLOSE, (which, what, difference)


@pytest.mark.parametrize(("when", "world", "number"), list(each_case()))
def test_equal_to_the_single_device(results, when, world, number):
    check(results(when)[world][number], CASES[when][world][number])


def test_batch_norm_sees_microbatches(results):
    """The lesson of sitting 32: with batch norm a cut batch is another computation than the whole batch."""
    number = next(i for i, c in enumerate(TWO) if c["norm"] == "batch" and c.get("schedule") == "1F1B")
    assert results("usual")[2][number]["full"]["gradients"] > 1e-2


def test_neighbours_differ_by_the_lesson():
    """The difference of two files is what the course teaches: it must stay short enough to read."""
    for one, other, most in (("single", "ddp", 16), ("ddp", "fsdp", 24)):
        files = [str(source() / f"mpdemo/rungs/{name}.py") for name in (one, other)]
        done = subprocess.run(
            ["git", "diff", "--no-index", "--numstat", *files], capture_output=True, text=True
        )
        assert sum(map(int, done.stdout.split()[:2])) <= most, done.stdout
    for rung in RUNGS:
        lines = len((source() / f"mpdemo/rungs/{rung}.py").read_text().splitlines())
        assert lines <= (80 if rung == "data_parallel" else 68), rung


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            {"rung": "hybrid", "schedule": "ZBVZeroBubble", "sharded": True},
            "--sharded does not go with --schedule ZBV",
        ),
        (
            {"rung": "hybrid", "replicas": 1, "sharded": True},
            "--sharded divides stages among replicas; allowed: --rep",
        ),
        ({"rung": "pipeline", "sharded": True}, "--sharded belongs to rung hybrid alone"),
        (
            {"rung": "hybrid", "form": "one-process"},
            "rung hybrid has no form 'one-process'; allowed: per-device",
        ),
        (
            {"rung": "fsdp", "batch_size": 15},
            "does not divide by 2 devices; allowed: a multiple of 2, such as 14",
        ),
        (
            {"rung": "tensor", "model": "convnet"},
            "splits the layers of --model transformer alone, not of convnet",
        ),
        ({"rung": "tensor", "replicas": 2}, "--replicas belongs to rung hybrid alone"),
        ({"rung": "tensor", "timeline": True}, "--timeline records rungs"),
        (
            {"rung": "model_parallel", "microbatches": 2},
            "takes no --microbatches 2: with them it is rung pipeline",
        ),
        (
            {"rung": "pipeline", "model": "convnet"},
            "4 stages do not fit a model of 3 blocks; allowed: 1 to 3",
        ),
    ],
)
def test_refused(words, said):
    with pytest.raises(UserError, match=said) as refusal:
        checked(Settings(**words), 4 if words["rung"] == "hybrid" else 2)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("rung", "processes", "said"),
    [
        (
            "ddp",
            None,
            "and this is one alone; start them by torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs",
        ),
        ("hybrid", None, "torchrun --standalone --nproc-per-node 4 -m mpdemo.rungs.hybrid"),
        (
            "hybrid",
            5,
            "5 processes do not make 2 replicas of 2 or more devices each; allowed: a multiple of 2 from 4",
        ),
        (
            "data_parallel",
            2,
            "was started as 2 processes; start 1 .and say --devices for how many devices it drives",
        ),
        ("single", 2, "was started as 2 processes; start 1$"),
        ("tensor", 4, "6 heads do not divide by 4 processes; allowed: 2, 3, 6"),
    ],
)
def test_a_wrong_number_of_processes_is_refused(rung, processes, said):
    with pytest.raises(UserError, match=said):
        checked(Settings(rung=rung), processes)


def test_checked_settings_stay_as_they_are():
    """A trial checks those of a run again. A pipeline has equal stages by default."""
    for rung in RUNGS:
        settings = Settings(rung=rung)
        processes = {"hybrid": 4}.get(rung, 2) if is_per_device(settings) else None
        once = checked(settings, processes)
        assert checked(once, processes) == once and once.microbatches >= 1
        assert once.cut == CUTS.get(rung)
