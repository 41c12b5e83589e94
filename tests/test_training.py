"""The loop: what it writes, and that a training run stopped anywhere continues as if nothing had happened."""

import itertools
import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from test_world_failures import running
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from worker_jobs import signal_while_compiling, until
from worlds import TRAIN, run_worlds, written

from mpdemo.data.loaders import Batches
from mpdemo.errors import UserError
from mpdemo.measure import timeline
from mpdemo.paths import root
from mpdemo.run import train
from mpdemo.settings import Settings, checked
from mpdemo.training import checkpoint
from mpdemo.world.env import World

ROUNDING = 2e-5  # float32, summed in another order


@pytest.fixture
def runs(tmp_path):
    """Train in this process, one core, in folders of `tmp_path`: run("name", **settings) -> its folder."""
    return lambda name, **settings: run_here(tmp_path / name, **settings)


def run_here(out, **settings):
    torch.set_num_threads(1)
    settings = {"rung": "single", "out": str(out)} | settings
    assert train(checked(Settings(**settings)), World()) == 0
    return out


def lines(out, event):
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def losses(out):
    """Loss by step; each step stands there once."""
    rows = lines(out, "step")
    by_step = {row["step"]: row["loss"] for row in rows}
    assert len(by_step) == len(rows)
    return by_step


def epochs(out):
    """The epochs' results, without the times."""
    return [{k: v for k, v in row.items() if k not in ("images_per_second", "time")} for row in lines(out, "epoch")]


def summary(out):
    return json.loads((Path(out) / "summary.json").read_text())


def tensors(out):
    return checkpoint.tensors(checkpoint.newest(out))


def test_what_a_run_writes(runs):
    out = runs("run", model="toy", batch_size=512, epochs=2, log_every=2)
    start, *rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (start["event"], start["step"], start["steps"]) == ("start", 0, 6)
    assert [(r["event"], r["step"], r["epoch"]) for r in rows] == [
        ("step", 1, 0), ("step", 2, 0), ("step", 3, 0), ("epoch", 3, 0),
        ("step", 4, 1), ("step", 5, 1), ("step", 6, 1), ("epoch", 6, 1),
    ]  # fmt: skip
    written = {"event", "step", "epoch", "loss", "images_per_second", "time"}
    measured = {"peak_memory_mib", "utilisation", "mfu"}
    assert [set(row) - written for row in rows[:3]] == [{"peak_memory_mib"}, measured, measured]
    assert written <= set(rows[0])
    assert 50 < rows[1]["peak_memory_mib"][0] <= summary(out)["peak_memory_mib"][0]
    assert set(rows[3]) == {"event", "step", "epoch", "train_loss", "train_accuracy", "validation_loss",
                            "validation_accuracy", "images_per_second", "time"}  # fmt: skip
    times = [row["time"] for row in rows]
    assert times == sorted(times) and abs(times[-1] - time.time()) < 60
    assert all(row["images_per_second"] > 0 for row in rows)
    assert rows[3]["train_loss"] == pytest.approx(sum(r["loss"] for r in rows[:3]) / 3)
    assert 0 <= rows[7]["validation_accuracy"] <= 1 and (rows[7]["validation_accuracy"] * 261) % 1 < 1e-6
    written = summary(out)
    assert written["settings"]["batch_size"] == 512 and written["settings"]["rung"] == "single"
    assert written["environment"]["torch"] == torch.__version__ and written["environment"]["device"] == "cpu core"
    assert len(written["environment"]["hosts"]) == len(written["peak_memory_mib"]) == written["world_size"] == 1
    assert 50 < written["peak_memory_mib"][0] < 20_000
    assert (written["steps"], written["epochs"], written["images"], written["stopped"]) == (6, 2, 3072, False)
    assert (written["loss"], written["validation_loss"]) == (rows[6]["loss"], rows[7]["validation_loss"])
    assert written["parameters"] == 28 * 28 * 32 + 32 + 2 * (32 * 32 + 32) + 32 * 10 + 10


def test_a_warning_during_a_validation_is_obeyed(runs, tmp_path, monkeypatch):
    """It may take longer than what is left. The resumed run does the whole validation."""
    common = {"model": "toy", "batch_size": 512, "epochs": 2, "log_every": 1}  # 3 steps per epoch
    whole, batches = runs("whole", **common), Batches.__iter__

    def warned(self):
        for batch in batches(self):
            if len(self.data.validation) == len(self.loader.dataset):
                os.kill(os.getpid(), signal.SIGUSR1)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "__iter__", warned)
        settings = Settings(rung="single", out=str(tmp_path / "part"), **common)
        assert train(checked(settings), World()) == 3
    part = tmp_path / "part"
    assert list(losses(part)) == [1, 2, 3] and epochs(part) == []
    runs("part", **common, resume="auto")
    assert losses(part) == losses(whole) and epochs(part) == epochs(whole)


def test_a_new_run_keeps_the_last_ones_metrics(runs):
    out = runs("run", model="toy", batch_size=512, steps=2)
    (out / "timeline-rank3.json").write_text("of a larger world")
    out = runs("run", model="toy", batch_size=512, steps=1)
    assert list(losses(out)) == [1]
    assert (out / "metrics.previous.jsonl").read_text().count('"event": "step"') == 2
    assert not (out / "timeline-rank3.json").exists()


# resuming


@pytest.fixture(scope="module")
def jpeg(jpegs):
    """Settings of ten steps in two epochs, on images that are decoded and augmented."""
    return {"dataset": "folder", "data": str(jpegs), "image_size": 32, "batch_size": 8, "log_every": 3}


def test_resume_goes_back_to_the_checkpoint(runs, jpeg):
    """A run that died two steps after its checkpoint: those two are done again, and stand there once."""
    out = runs("run", model="toy", steps=8, checkpoint_every=6, **jpeg)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # it died while it wrote
    whole = runs("whole", model="toy", epochs=2, **jpeg)
    runs("run", model="toy", epochs=2, resume=str(out), **jpeg)
    assert losses(out) == losses(whole) and epochs(out) == epochs(whole)


def test_a_run_that_goes_on_from_another_folder_keeps_the_checkpoints_that_are_in_its_own(runs):
    """But a job that Slurm puts back into the queue finds its own checkpoints, and may begin again."""
    settings = {"model": "toy", "batch_size": 512, "checkpoint_every": 1}
    old, other = runs("old", **settings, steps=1), runs("other", **settings, steps=2)
    files = sorted((other / "checkpoints").iterdir())
    with pytest.raises(UserError, match="other holds the checkpoints of a run"):
        runs("other", **settings, steps=3, resume=str(old))
    assert sorted((other / "checkpoints").iterdir()) == files
    new = runs("new", **settings, steps=2, resume=str(old))
    assert list(losses(runs("new", **settings, steps=3, resume=str(old)))) == [2, 3]
    assert list(losses(runs("new", **settings, steps=4, resume=str(new)))) == [2, 3, 4]
    assert list(losses(runs("new", **settings, steps=2, resume=str(old)))) == [2]


COURSE = {"optimizer": "adamw", "lr": 0.01, "warmup_steps": 4, "lr_schedule": "cosine"}


def rates(runs, **settings):
    """The learning rate of every step that a run did."""
    seen = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    try:
        runs("rates", **settings)
    finally:
        hook.remove()
    return seen


def test_learning_rate_of_every_step(runs):
    """Linear to --lr, then half a cosine to 0 at the end of the epochs, also where --steps ends the run earlier."""
    common = {"model": "toy", "batch_size": 512, "epochs": 4} | COURSE  # 3 steps per epoch
    wanted = [0.0025, 0.005, 0.0075, 0.01, *(0.005 * (1 + math.cos(math.pi * i / 8)) for i in range(8))]
    assert rates(runs, **common) == pytest.approx(wanted)
    assert rates(runs, **common, steps=7) == pytest.approx(wanted[:7])
    assert rates(runs, **common | {"epochs": None}, steps=12) == pytest.approx(wanted)
    assert rates(runs, **common | {"lr_schedule": "constant"}) == pytest.approx([*wanted[:3], *[0.01] * 9])
    for optimizer, lr in (("sgd", 0.01), ("adamw", 0.001)):  # unless --lr says another
        assert rates(runs, model="toy", batch_size=512, optimizer=optimizer) == [lr] * 3


STOPS = [pytest.param(stop, marks=[] if stop in (2, 5, 8) else pytest.mark.nightly) for stop in range(1, 11)]


@pytest.mark.parametrize("stop", STOPS)
def test_adamw_warm_up_and_cosine_are_resumed(runs, jpeg, stop):
    """After any step (here in the warm-up, at an epoch's end, in the cosine): the very same losses and weights."""
    common = {"model": "toy", "epochs": 2, "checkpoint_every": 10} | COURSE | jpeg
    whole = runs("whole", **common)
    part = runs("part", **common | {"checkpoint_every": stop}, steps=stop)
    assert list(losses(part)) == list(range(1, stop + 1))
    runs("part", **common, resume=str(part))
    assert losses(part) == losses(whole) and epochs(part) == epochs(whole)
    torch.testing.assert_close(tensors(part), tensors(whole), rtol=0, atol=0)
    assert "optimizer.state.linear2.0.weight.exp_avg_sq" in tensors(part)
    small = [checkpoint.read(checkpoint.newest(out))["small"] for out in (part, whole)]
    assert small[0] == small[1] and small[0]["optimizer.state.linear2.0.weight.step"] == 10


def test_a_cosine_of_another_length_is_refused(runs):
    """Of a constant learning rate the length does not matter."""
    common = {"model": "toy", "batch_size": 512}
    out = runs("run", **common | COURSE, steps=5, checkpoint_every=5)
    with pytest.raises(UserError, match="the checkpoint's cosine ends after 5 steps, not 12; give") as refusal:
        runs("run", **common | COURSE, epochs=4, resume=str(out))
    assert "\n" not in str(refusal.value)
    out = runs("constant", **common, steps=5, checkpoint_every=5)
    assert list(losses(runs("constant", **common, epochs=4, resume=str(out)))) == list(range(1, 13))


CHAIN = [  # one training that is handed on after every step: in how many processes it continues, and as what
    (1, {"rung": "single"}),
    (2, {"rung": "pipeline", "schedule": "ZBVZeroBubble", "microbatches": 4}),
    (2, {"rung": "ddp"}),
    (2, {"rung": "model_parallel", "cut": "block.5"}),
    (1, {"rung": "pipeline", "form": "one-process", "microbatches": 2, "cut": "block.2"}),
    (1, {"rung": "data_parallel"}),
    (2, {"rung": "fsdp"}),
    (2, {"rung": "tensor"}),
    (4, {"rung": "hybrid", "schedule": "ZBVZeroBubble", "microbatches": 4, "timeline": True}),
    (4, {"rung": "hybrid", "schedule": "1F1B", "microbatches": 2, "sharded": True}),
    (1, {"rung": "single"}),
]
RECORDED = next(stop for stop, (_, rung) in enumerate(CHAIN, 1) if rung.get("timeline"))
COMMON = {"model": "transformer", "image_size": 14, "batch_size": 8, "epochs": 1, "log_every": 1} | COURSE


@pytest.fixture(scope="module")
def handed_on(tmp_path_factory):
    """Do every step of CHAIN, with a world for each row of as many processes; return the folder of the runs."""
    folder, todo = tmp_path_factory.mktemp("chain"), []
    for stop, (processes, rung) in enumerate(CHAIN, 1):
        where = {"steps": stop, "checkpoint_every": stop, "out": str(folder / f"step-{stop}")}
        before = {"resume": str(folder / f"step-{stop - 1}")} if stop > 1 else {}
        todo.append((processes, {**COMMON, **rung, **where, **before}))
    worlds = []
    for processes, runs in itertools.groupby(todo, key=lambda run: run[0]):
        file = written(folder / f"{len(worlds)}.json", [settings for _, settings in runs])
        worlds.append([processes, TRAIN, file])
    run_worlds(folder, worlds)
    return folder


@pytest.mark.parametrize("rung", [
    pytest.param({"rung": "ddp"}, id="ddp"),
    pytest.param({"rung": "pipeline", "microbatches": 4, "cut": "layer1"}, id="pipeline", marks=pytest.mark.nightly),
])  # fmt: skip
def test_resumed_world_equals_uninterrupted_and_validates_what_it_saves(tmp_path, runs, jpeg, rung):
    """Two processes, mid-epoch, batch norm, augmented JPEG files: the very same losses and validation.

    One process that only validates the world's last checkpoint finds the world's own result, batch norm and all.
    """
    part, whole = tmp_path / "part", tmp_path / "whole"
    todo = [
        {"epochs": 2, "checkpoint_every": 10, "out": str(whole)},
        {"steps": 7, "checkpoint_every": 7, "out": str(part)},
        {"epochs": 2, "out": str(part), "resume": str(part)},
    ]
    todo = [{"model": "convnet"} | rung | jpeg | settings for settings in todo]
    run_worlds(tmp_path, [[2, TRAIN, written(tmp_path / "runs.json", todo)]])
    assert list(losses(whole)) == list(range(1, 11))
    assert losses(part) == losses(whole) and epochs(part) == epochs(whole)
    alone = runs("alone", model="convnet", epochs=2, resume=str(whole), **jpeg)
    assert losses(alone) == {}
    validated, wanted = epochs(alone)[0], epochs(whole)[1]
    assert validated["validation_loss"] == pytest.approx(wanted["validation_loss"], rel=ROUNDING)
    assert validated["validation_accuracy"] == wanted["validation_accuracy"]


def test_any_rung_resumes_any_rungs_checkpoint(handed_on, runs):
    """With AdamW and a cosine, in worlds of one, two and four: losses, validation and weights of an unbroken run."""
    stops = range(1, len(CHAIN) + 1)
    whole, last = runs("whole", **COMMON, steps=stops[-1], checkpoint_every=stops[-1]), handed_on / f"step-{stops[-1]}"
    together = {step: loss for stop in stops for step, loss in losses(handed_on / f"step-{stop}").items()}
    assert together == pytest.approx(losses(whole), rel=ROUNDING)
    assert epochs(last)[0]["validation_loss"] == pytest.approx(epochs(whole)[0]["validation_loss"], rel=ROUNDING)
    resumed = tensors(last)
    for name, weight in tensors(whole).items():
        if name.startswith("model."):
            assert torch.linalg.vector_norm(resumed[name] - weight) < 1e-4 * torch.linalg.vector_norm(weight), name
    ends = [summary(handed_on / f"step-{stop}") for stop in stops]
    assert {end["parameters"] for end in ends} == {summary(whole)["parameters"]}
    assert {end["busy"]["flops_per_step"] for end in ends} == {summary(whole)["busy"]["flops_per_step"]}
    for (processes, _), end in list(zip(CHAIN, ends, strict=True))[1:]:  # the first step is not counted
        assert processes in (1, len(end["busy"]["utilisation"])) and end["busy"]["mfu"] > 0


def test_the_timeline_of_a_hybrid_has_two_pipelines_and_an_all_reduce_at_their_end(handed_on):
    (rows,) = timeline.load(handed_on / f"step-{RECORDED}")
    work = {rank: [r for r in rows if r["rank"] == rank and r["kind"] in timeline.WORKS] for rank in range(4)}
    assert {rank: {row["stage"] for row in lane} for rank, lane in work.items()} == {
        0: {0, 3}, 1: {1, 2}, 2: {0, 3}, 3: {1, 2}}  # fmt: skip
    assert all([row["kind"] for row in lane].index("A") == len(lane) - 1 for lane in work.values())
    assert timeline.step_time(rows) == max(lane[-1]["end"] for lane in work.values())


# stopping and waiting


def test_sigusr1_leaves_a_checkpoint(tmp_path, runs):
    """Slurm's warning before the time limit: a checkpoint, exit status 3, and the resumed run is the same run."""
    out = tmp_path / "run"
    common = {"model": "toy", "batch_size": 128, "epochs": 10_000}
    words = ["-m", "mpdemo", "train", "--rung", "ddp", "--processes", "2", "--log-every", "1"]
    with running([*words, *Settings(rung="single", **common).arguments()[2:]], out) as child:
        until(lambda: child.poll() or ((out / "metrics.jsonl").exists() and len(lines(out, "step")) >= 2))
        child.send_signal(signal.SIGUSR1)
        stderr = child.communicate(timeout=60)[1]
    assert child.returncode == 3, stderr
    assert "Traceback" not in stderr
    stopped = max(losses(out))
    assert checkpoint.newest(out).name == f"step-{stopped:06d}"
    assert summary(out)["stopped"] is True and summary(out)["steps"] == stopped
    more = {**common, "epochs": None, "steps": stopped + 2}
    wanted = losses(runs("whole", **more))
    assert losses(runs("run", **more, resume=str(out))) == pytest.approx(wanted, rel=ROUNDING)


@pytest.mark.nightly
def test_sigusr1_during_a_compilation_does_not_reach_the_compiler(tmp_path):
    """Slurm signals every process of a step."""
    out = tmp_path / "run"
    command = ["-m", "mpdemo.rungs.ddp", "--model", "convnet", "--compile", "--epochs", "1000", "--out", str(out)]
    _, printed = signal_while_compiling(signal.SIGUSR1, root(), tmp_path / "compiled", *command)
    assert summary(out)["stopped"] is True and checkpoint.newest(out), printed


class CountWaits(TorchDispatchMode):
    """Count what makes the host wait for the device: numbers fetched from tensors."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        tolist = torch.Tensor.tolist

        def counting(tensor):
            self.count += 1
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", counting)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        fetching = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")
        self.count += any(name in str(function) for name in fetching)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("rung", ["single", "data_parallel", "model_parallel", "pipeline"])
def test_the_loop_does_not_wait_every_step(runs, monkeypatch, rung):
    """Forty steps more, the same number of waits."""
    counts = []
    for steps in (10, 50):
        form = "one-process" if rung in ("model_parallel", "pipeline") else None
        monkeypatch.setattr("mpdemo.world.collectives.INTERVAL", 1e6)  # s; on a busy machine it would come round
        with CountWaits(monkeypatch) as waits:
            runs(f"run{steps}", rung=rung, form=form, model="toy", batch_size=24, steps=steps, log_every=1000)
        counts.append(waits.count)
        monkeypatch.undo()
    assert counts[0] == counts[1] > 0
