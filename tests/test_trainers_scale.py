"""The scaling experiment: which jobs it asks for, how many run at once, what its report says, and what it refuses."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from mpdemo.__main__ import main
from mpdemo.jobs import JobFailed, slurm, submit
from mpdemo.notebook import plots
from mpdemo.trainers import scale
from mpdemo.trainers.report import WARMUP
from mpdemo.trainers.scale import Experiment, gather, run_jobs, sentences, show_table, sizes_here


class FakeJob:
    """A job that ends at once; two steps of warm-up, ten times slower than the others."""

    def __init__(self, spec, end="done"):
        self.spec, self.name, self.id, self.where, self.out = spec, spec.name, "7", "this machine", Path(spec.out)
        self.state, self.run_time = end, 36.0

    def wait(self, *limits):
        assert 0 < max(limits) <= 60  # bounded, by what is left of the time for all jobs
        if self.state == "running":
            raise TimeoutError('follow it again: await follow("runs/toy")')

    def result(self):
        if self.state != "done":
            raise JobFailed(f"job {self.id} ({self.name}) {self.state}")
        words = list(self.spec.command)
        self.batch, self.steps = (int(words[words.index(name) + 1]) for name in ("--batch-size", "--steps"))
        environment = {"device": "cpu core", "torch": "2", "python": "3", "backend": "gloo", "hosts": ["here"]}
        counts = {"world_size": self.spec.world_size, "steps": self.steps, "images": self.steps * self.batch}
        facts = {"settings": {"batch_size": self.batch}, "seconds": 30.0, "validation_loss": 2.0}
        return facts | counts | {"environment": environment}

    def metrics(self):
        devices = self.spec.world_size
        seconds = 0.01 * self.batch / devices + 0.02 * math.log2(devices)  # the model of mpdemo.plan.scaling
        rates = [self.batch / (10 * seconds)] * WARMUP + [self.batch / seconds] * (self.steps - WARMUP)
        return [{"event": "start"}, *({"event": "step", "images_per_second": rate} for rate in rates)]


@pytest.fixture
def fake(no_slurm, monkeypatch):
    """Jobs that need no process, on a machine of four cores; returns those that were submitted, and their ends."""
    submitted, ends = [], {}

    def submit(spec, site=None, **options):
        submitted.append(FakeJob(spec, ends.get(spec.name, "done")))
        return submitted[-1]

    monkeypatch.setattr(scale, "submit", submit)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3})
    return submitted, ends


def test_strong_keeps_the_batch_and_weak_the_share():
    experiment = Experiment(nodes=(1, 2, 4), batch=64, images=3072, processes_per_node=2)
    specs = experiment.specs()
    assert list(specs) == [("strong", 1), ("strong", 2), ("strong", 4), ("weak", 2), ("weak", 4)]

    def of(spec, option):
        return int(spec.command[spec.command.index(option) + 1])

    assert [of(spec, "--batch-size") for spec in specs.values()] == [64, 64, 64, 128, 256]
    assert {of(spec, "--batch-size") * of(spec, "--steps") for spec in specs.values()} == {3072}
    assert [spec.world_size for spec in specs.values()] == [2, 4, 8, 4, 8]
    alone = Experiment(nodes=(1,)).specs()["strong", 1]
    assert "single" in alone.command and "ddp" in specs["strong", 1].command


def test_the_sizes_that_there_is_room_for(no_slurm, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert sizes_here((1, 2, 4)) == (1, 2) and sizes_here((1, 2), processes_per_node=2) == (1,)
    monkeypatch.setattr(slurm, "in_reach", lambda: True)
    monkeypatch.setattr(slurm, "client", lambda *words: "node1\nnode2\nnode1\nnode3\nnode4\n")  # two partitions
    assert sizes_here((1, 2, 4, 8), "generic") == (1, 2, 4)


def test_a_failed_job_ends_the_experiment(fake):
    submitted, ends = fake
    ends["scale_strong_2"] = "failed"
    with pytest.raises(JobFailed, match="scale_strong_2"):
        run_jobs(Experiment(nodes=(1, 2, 4)), wait=60)
    assert [job.name for job in submitted] == ["scale_strong_1", "scale_strong_2"]


def test_the_command_says_how_to_resume_when_time_is_over(fake, project, capsys):
    fake[1]["scale_strong_2"] = "running"
    assert main(["scale", "--nodes", "1,2", "--wait", "60"]) == 1
    said = "job 7 (scale_strong_2) is still running after 60 s; do: the same again, which resumes with what has ended"
    error = capsys.readouterr().err
    assert said in error and "follow" not in error and len(error.splitlines()) == 1


def test_a_job_that_was_cancelled_runs_again_in_the_next_call(fake, project, monkeypatch):
    experiment, asked = Experiment(nodes=(1,), kinds=("strong",)), []
    spec = experiment.specs()["strong", 1]
    submit(dataclasses.replace(spec, command=("-c", "import time; time.sleep(60)"))).cancel()
    monkeypatch.setattr(scale, "submit", lambda spec, site, **options: asked.append(options) or FakeJob(spec))
    run_jobs(experiment, wait=60)
    assert [options["resubmit"] for options in asked] == [True]


def test_the_report_of_known_steps_and_its_picture(fake):
    experiment = Experiment(nodes=(1, 2, 4), batch=64, images=3072)
    report = gather(experiment, run_jobs(experiment, wait=60))
    rows = {(row["scaling"], row["nodes"]): row for row in report["rows"]}
    assert list(rows) == [(kind, n) for kind in ("strong", "weak") for n in (1, 2, 4)]
    four = rows["strong", 4]
    assert four["step_seconds"] == pytest.approx(0.16 + 0.04)  # without the two slow steps of the warm-up
    assert four["images_per_second"] == pytest.approx(320)
    assert four["speedup"] == pytest.approx(3.2) and four["efficiency"] == pytest.approx(0.8)
    assert four["speedup_interval"] == pytest.approx([3.2, 3.2])
    assert four["device_hours"] == pytest.approx(4 * 36 / 3600) and four["start_seconds"] == pytest.approx(6)
    assert rows["weak", 4]["speedup"] == pytest.approx(4 * 0.64 / 0.68) and rows["weak", 4]["steps"] == 12
    for model in report["fit"].values():
        assert model["compute"] == pytest.approx(30.72) and model["communication"] == pytest.approx(0.02)
    assert report["advice"]["strong"]["efficient"] == 5  # 0.64 s of arithmetic and 0.02 s x log2(N) per step
    assert report["machine"]["one_machine"] and report["machine"]["torch"] == "2"
    table = show_table(report).splitlines()
    assert len(table) == 7 and "speed-up" in table[0] and table[-1].endswith("0.0400")
    said = "\n".join(sentences(report))
    assert "share its cores" in said and "strong: time = 30.7 s / N + 0.02 s x log2(N) x steps + 0 s" in said
    figures = "strong: 4 devices have a speed-up of 3.20 (95 % interval over the steps: 3.20 to 3.20)"
    assert f"{figures}: an efficiency of 80%." in said
    json.dumps(report)
    lines = {line.get_label(): line for line in plots.scaling(report).figure.axes[0].get_lines()}
    assert list(lines["ideal"].get_ydata()) == [1, 2, 4]
    assert lines["strong, model"].get_ydata()[-1] == pytest.approx(3.2)
    assert lines["weak, model"].get_ydata()[-1] == pytest.approx(4 * 0.64 / 0.68)


def test_two_sizes_give_no_advice_and_slower_ones_say_so(fake):
    experiment = Experiment(nodes=(1, 2), kinds=("strong",))
    report = gather(experiment, run_jobs(experiment, wait=60))
    assert report["fit"] == report["advice"] == {"strong": None}
    assert sentences(report)[-1] == "strong: a fit needs 3 sizes, so there is no advice."
    report["fit"]["strong"], report["advice"]["strong"] = {"compute": 0.0}, {}
    report["rows"][1] |= {"speedup": 1.2, "speedup_interval": [0.99, 1.3]}
    said = sentences(report)
    assert (
        said[-2].endswith("(95 % interval over the steps: 0.99 to 1.30): no gain can be reported.")
        and "no part of the time became less" in said[-1]
    )


REFUSED = [
    (["--nodes", "2,1"], "nodes 2,1 are not allowed; allowed: rising numbers"),
    (["--nodes", "one"], "--nodes 'one' is not allowed; allowed: rising numbers, such as 1,2,4"),
    (["--scaling", "strong", "--nodes", "1,64"], "64 nodes with 1 processes each are too many; here fit: 1; do: fewer"),
    (["--nodes", "1,2", "--out", "elsewhere/scale"], "--out elsewhere/scale is not allowed"),
    (["--nodes", "1,3"], "batches of 64 on 3 devices (strong scaling) do not divide"),
    (["--nodes", "1,2", "--images", "768"], "batches of 128 on 2 devices (weak scaling) do not divide"),
    (["--nodes", "1,2", "--model", "resnet19"], "--model resnet19 is not allowed"),
    (["--wait", "0"], "--wait: '0' is not a whole number from 1"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words[-2:]) for words, _ in REFUSED])
def test_bad_input_is_one_line_and_starts_nothing(words, message, no_slurm, project, monkeypatch, capsys):
    monkeypatch.setattr(scale, "submit", lambda *of, **options: pytest.fail("a job was submitted"))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    try:
        status = main(["scale", *words])
    except SystemExit as end:  # of argparse
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and len(error.splitlines()) == 1


def test_the_command_runs_real_jobs_and_goes_on_with_them(no_slurm, project, capsys):
    words = ["scale", "--nodes", "1,2", "--model", "toy", "--scaling", "strong", "--images", "512", "--wait", "240"]
    assert main(words) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert "scale_strong_2 runs on this machine, 2 processes" in out and "no advice" in out
    report = json.loads((project / "runs/scale/report.json").read_text())
    assert [row["devices"] for row in report["rows"]] == [1, 2]
    assert report["rows"][0]["loss"] == pytest.approx(report["rows"][1]["loss"], rel=1e-3)  # the same training
    assert all(row["images_per_second"] > 0 and row["job_seconds"] > row["start_seconds"] for row in report["rows"])
    assert (project / "runs/scale/scaling.png").stat().st_size > 1000
    assert "#SBATCH --nodes=2" in (project / "runs/scale_strong_2/job.sbatch").read_text()
    assert main(words) == 0
    assert capsys.readouterr().out.count("not submitted again") == 2
