"""The scaling experiment of notebook 09, which runs it: what it asks for, what its report says, what it refuses."""

import dataclasses
import math
from pathlib import Path

import pytest

from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, slurm, submit
from mpdemo.labs import scaling_jobs
from mpdemo.labs.scaling_jobs import WARMUP, report, run_all, sizes_here, specs, table
from mpdemo.notebook import plots


class FakeJob:
    """A job that ends at once; two steps of warm-up, ten times slower than the others."""

    def __init__(self, spec, end="done"):
        self.spec, self.name, self.id, self.out = spec, spec.name, "7", Path(spec.out)
        self.state, self.run_time = end, 36.0

    def wait(self, *limits):
        assert 0 < max(limits) <= 60  # bounded, by what is left of the time for all jobs
        if self.state == "running":
            raise TimeoutError('follow it again: await follow("runs/toy")')

    def result(self):
        if self.state != "done":
            raise JobFailed(f"job {self.id} ({self.name}) {self.state}")
        facts = {"world_size": self.spec.world_size, "steps": of(self.spec, "--steps"), "validation_loss": 2.0}
        return facts | {"settings": {"batch_size": of(self.spec, "--batch-size")}}

    def metrics(self):
        devices, batch, steps = self.spec.world_size, of(self.spec, "--batch-size"), of(self.spec, "--steps")
        seconds = 0.01 * batch / devices + 0.02 * math.log2(devices)  # the model of mpdemo.plan.scaling
        rates = [batch / (10 * seconds)] * WARMUP + [batch / seconds] * (steps - WARMUP)
        return [{"event": "start"}, *({"event": "step", "images_per_second": rate} for rate in rates)]


def of(spec, option):
    """The number behind an option of a job's command."""
    return int(spec.command[spec.command.index(option) + 1])


@pytest.fixture
def fake(no_slurm, project, monkeypatch):
    """Jobs that need no process; returns those that were submitted, and the ends of some by name."""
    submitted, ends = [], {}

    def submit(spec, **options):
        submitted.append((spec.name, options["resubmit"]))
        return FakeJob(spec, ends.get(spec.name, "done"))

    monkeypatch.setattr(scaling_jobs, "submit", submit)
    return submitted, ends


def test_strong_keeps_the_batch_and_weak_the_share():
    """The example at the end of the notebook."""
    own = {"model": "resnet50", "dataset": "imagenet", "workers": 8, "time_limit": "01:00:00"}
    jobs = specs((1, 2, 4), 1024, 409_600, "mine", processes_per_node=4, **own)
    assert list(jobs) == [("strong", 1), ("strong", 2), ("strong", 4), ("weak", 2), ("weak", 4)]
    assert [of(spec, "--batch-size") for spec in jobs.values()] == [1024, 1024, 1024, 2048, 4096]
    assert [of(spec, "--steps") for spec in jobs.values()] == [400, 400, 400, 200, 100]
    assert [spec.world_size for spec in jobs.values()] == [4, 8, 16, 8, 16]
    alone = specs((1,), 64, 3072, "one")["strong", 1]
    assert "single" in alone.command and "ddp" in jobs["strong", 1].command


def test_the_sizes_that_there_is_room_for(no_slurm, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert sizes_here((1, 2, 4)) == (1, 2) and sizes_here((1, 2), processes_per_node=2) == (1,)
    monkeypatch.setattr(slurm, "in_reach", lambda: True)
    monkeypatch.setattr(slurm, "client", lambda *words: "node1\nnode2\nnode1\nnode3\nnode4\n")  # two partitions
    assert sizes_here((1, 2, 4, 8)) == (1, 2, 4)


def test_a_failed_job_ends_the_experiment(fake):
    submitted, ends = fake
    ends["a_strong_2"] = "failed"
    with pytest.raises(JobFailed, match="a_strong_2"):
        run_all(specs((1, 2, 4), 64, 3072, "a"), wait=60)
    assert [name for name, _ in submitted] == ["a_strong_1", "a_strong_2"]


def test_it_says_how_to_resume_when_time_is_over(fake):
    fake[1]["a_strong_2"] = "running"
    with pytest.raises(TimeoutError) as error:
        run_all(specs((1, 2), 64, 3072, "a"), wait=60)
    said = "job 7 (a_strong_2) is still running after 60 s; do: the same again, which resumes with what has ended well"
    assert str(error.value) == said


def test_a_job_that_was_cancelled_runs_again_in_the_next_call(fake):
    jobs = specs((1,), 64, 3072, "a")
    submit(dataclasses.replace(jobs["strong", 1], command=("-c", "import time; time.sleep(60)"))).cancel()
    run_all(jobs, wait=60)
    assert fake[0] == [("a_strong_1", True)]


def test_the_report_of_known_steps_and_its_picture(fake):
    found = report(run_all(specs((1, 2, 4), 64, 3072, "a"), wait=60))
    assert [(row["scaling"], row["devices"]) for row in found["rows"]] == [
        (kind, n) for kind in ("strong", "weak") for n in (1, 2, 4)
    ]
    four, weak = found["rows"][2], found["rows"][5]
    assert four["images_per_second"] == pytest.approx(320)  # without the two slow steps of the warm-up
    assert four["speedup"] == pytest.approx(3.2) and four["efficiency"] == pytest.approx(0.8)
    assert four["speedup_interval"] == pytest.approx([3.2, 3.2])
    assert four["device_hours"] == pytest.approx(4 * 36 / 3600)
    assert weak["speedup"] == pytest.approx(4 * 0.64 / 0.68) and weak["steps"] == 12
    for model in found["fit"].values():
        assert model["compute"] == pytest.approx(30.72) and model["communication"] == pytest.approx(0.02)
    lines = table(found).splitlines()
    assert len(lines) == 7 and "speed-up" in lines[0] and lines[3].split()[:3] == ["strong", "4", "64"]
    lines = {line.get_label(): line for line in plots.scaling(found).figure.axes[0].get_lines()}
    assert list(lines["ideal"].get_ydata()) == [1, 2, 4]
    assert lines["strong, model"].get_ydata()[-1] == pytest.approx(3.2)
    assert lines["weak, model"].get_ydata()[-1] == pytest.approx(4 * 0.64 / 0.68)


def test_two_sizes_are_not_fitted(fake):
    assert report(run_all(specs((1, 2), 64, 3072, "a"), wait=60))["fit"] == {"strong": None, "weak": None}


REFUSED = [
    ((), 3072, "nodes () are not allowed; allowed: rising numbers"),
    ((2, 1), 3072, "nodes (2, 1) are not allowed; allowed: rising numbers"),
    ((1, 3), 3072, "batches of 64 on 3 devices (strong scaling) do not divide"),
    ((1, 2), 768, "batches of 128 on 2 devices (weak scaling) do not divide"),
]


@pytest.mark.parametrize(("nodes", "images", "message"), REFUSED)
def test_what_cannot_be_compared_is_refused(nodes, images, message):
    with pytest.raises(UserError) as error:
        specs(nodes, 64, images, "a")
    assert message in str(error.value)
