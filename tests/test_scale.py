"""The scaling experiment: which jobs it asks for, how many run at once, what its report says, and what it refuses."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mpdemo.__main__ import main
from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, submit
from mpdemo.notebook import plots
from mpdemo.plan import imagenet
from mpdemo.plan.scaling import fit
from mpdemo.scale import Experiment, energy, gather, run_jobs, runs, show_table, sizes_here
from mpdemo.scale.report import sentences


class FakeJob:
    """A job that ends when it has been asked a few times; two steps of warm-up, ten times slower than the others."""

    alive, most = 0, 0

    def __init__(self, spec, end="done", asked=3):
        self.spec, self.name, self.id, self.where, self.out = spec, spec.name, "7", "this machine", Path(spec.out)
        self.end, self.left, self.cancelled, self.run_time = end, asked, False, 36.0
        FakeJob.alive += 1
        FakeJob.most = max(FakeJob.most, FakeJob.alive)

    @property
    def finished(self):
        self.left -= 1
        if self.left == 0:
            FakeJob.alive -= 1
        return self.left <= 0

    @property
    def state(self):
        return self.end if self.left <= 0 else "running"

    def cancel(self):
        self.cancelled = True

    def result(self):
        if self.end != "done":
            raise JobFailed(f"job {self.id} ({self.name}) {self.end}", self, None)
        words = list(self.spec.command)
        self.batch, self.steps = (int(words[words.index(name) + 1]) for name in ("--batch-size", "--steps"))
        environment = {"device": "cpu core", "torch": "2", "python": "3", "backend": "gloo", "hosts": ["here"]}
        settings = {"batch_size": self.batch}
        counts = {"world_size": self.spec.world_size, "steps": self.steps, "images": self.steps * self.batch}
        facts = {"settings": settings, "seconds": 30.0, "validation_loss": 2.0, "environment": environment}
        return facts | counts

    def metrics(self):
        devices = self.spec.world_size
        seconds = 0.01 * self.batch / devices + 0.02 * math.log2(devices)  # the model of mpdemo.plan.scaling
        rates = [self.batch / (10 * seconds)] * runs.WARMUP + [self.batch / seconds] * (self.steps - runs.WARMUP)
        return [{"event": "start"}, *({"event": "step", "images_per_second": rate} for rate in rates)]


@pytest.fixture
def fake(no_slurm, monkeypatch):
    """Jobs that need no process; returns those that were submitted, and the end of each by its name."""
    submitted, ends = [], {}
    FakeJob.alive = FakeJob.most = 0

    def submit(spec, site=None, **options):
        submitted.append(FakeJob(spec, ends.get(spec.name, "done")))
        return submitted[-1]

    monkeypatch.setattr(runs, "submit", submit)
    monkeypatch.setattr(runs, "check_here", lambda *of: None)
    return submitted, ends


def test_strong_keeps_the_batch_and_weak_the_share():
    experiment = Experiment(nodes=(1, 2, 4), batch=64, images=1536, processes_per_node=2)
    specs = experiment.specs()
    assert list(specs) == [("strong", 1), ("strong", 2), ("strong", 4), ("weak", 2), ("weak", 4)]

    def of(spec, option):
        return int(spec.command[spec.command.index(option) + 1])

    assert [of(spec, "--batch-size") for spec in specs.values()] == [64, 64, 64, 128, 256]
    assert {of(spec, "--batch-size") * of(spec, "--steps") for spec in specs.values()} == {1536}
    assert [spec.world_size for spec in specs.values()] == [2, 4, 8, 4, 8]
    alone = Experiment(nodes=(1,)).specs()["strong", 1]
    assert "single" in alone.command and "ddp" in specs["strong", 1].command


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": (2, 1)}, "nodes 2,1 are not allowed; allowed: rising numbers"),
        ({"nodes": (1, 1)}, "nodes 1,1 are not allowed"),
        ({"nodes": (0, 1)}, "nodes 0,1 are not allowed"),
        ({"nodes": ()}, "allowed: rising numbers"),
        ({"nodes": (1, 3)}, "batches of 64 on 3 devices (strong scaling) do not divide"),
        ({"nodes": (1, 2), "images": 384}, "batches of 128 on 2 devices (weak scaling) do not divide"),
        ({"nodes": (1,), "images": 100}, "100 images in batches of 64"),
    ],
)
def test_an_experiment_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError) as refusal:
        Experiment(**changes)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_sizes_that_there_is_room_for(no_slurm, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert sizes_here((1, 2, 4)) == (1, 2)
    monkeypatch.setattr(runs.slurm, "in_reach", lambda: True)
    monkeypatch.setattr(runs.slurm, "client", lambda *words: "node1\nnode2\nnode1\nnode3\nnode4\n")  # two partitions
    assert sizes_here((1, 2, 4, 8), "generic") == (1, 2, 4)


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_more_jobs_at_once_than_allowed(fake, at_once):
    done = run_jobs(Experiment(nodes=(1, 2, 4)), at_once=at_once, wait=60)
    assert len(done) == len(fake[0]) == 5
    assert FakeJob.most == at_once


def test_a_failed_job_ends_the_experiment_and_cancels_the_others(fake):
    submitted, ends = fake
    ends["scale_strong_2"] = "failed"
    with pytest.raises(JobFailed, match="scale_strong_2"):
        run_jobs(Experiment(nodes=(1, 2, 4)), at_once=2, wait=60)
    assert len(submitted) < 5
    assert all(job.cancelled for job in submitted if job.left > 0)


def test_a_job_that_was_cancelled_runs_again_in_the_next_call(fake, project, monkeypatch):
    experiment, asked = Experiment(nodes=(1,), kinds=("strong",)), []
    spec = experiment.specs()["strong", 1]
    job = submit(dataclasses.replace(spec, command=("-c", "import time; time.sleep(60)")))
    job.cancel()
    monkeypatch.setattr(runs, "submit", lambda spec, site, **options: asked.append(options) or FakeJob(spec))
    run_jobs(experiment, wait=60)
    assert [options["resubmit"] for options in asked] == [True]


def test_the_wait_for_jobs_is_bounded(fake, monkeypatch):
    monkeypatch.setattr(runs, "submit", lambda spec, site=None, **options: FakeJob(spec, asked=10**9))
    with pytest.raises(TimeoutError, match=r"scale_strong_1 \(running\) not ended after 0.2 s; later the same command"):
        run_jobs(Experiment(nodes=(1, 2)), wait=0.2)


def test_the_report_of_known_steps(fake):
    experiment = Experiment(nodes=(1, 2, 4), batch=64, images=1536)
    report = gather(experiment, run_jobs(experiment, wait=60))
    rows = {(row["scaling"], row["devices"]): row for row in report["rows"]}
    assert list(rows) == [(kind, n) for kind in ("strong", "weak") for n in (1, 2, 4)]
    four = rows["strong", 4]
    assert four["step_seconds"] == pytest.approx(0.16 + 0.04)  # without the two slow steps of the warm-up
    assert four["images_per_second"] == pytest.approx(320)
    assert four["speedup"] == pytest.approx(3.2) and four["efficiency"] == pytest.approx(0.8)
    assert four["speedup_quartiles"] == pytest.approx([3.2, 3.2])
    assert four["device_hours"] == pytest.approx(4 * 36 / 3600) and four["start_seconds"] == pytest.approx(6)
    assert rows["weak", 4]["speedup"] == pytest.approx(4 * 0.64 / 0.68) and rows["weak", 4]["steps"] == 6
    for model in report["fit"].values():
        assert model["compute"] == pytest.approx(15.36) and model["communication"] == pytest.approx(0.02)
    assert report["advice"]["strong"]["efficient"] == 5  # 0.64 s of arithmetic and 0.02 s x log2(N) per step
    assert report["machine"]["one_machine"] and report["machine"]["torch"] == "2"
    table = show_table(report).splitlines()
    assert len(table) == 7 and "speed-up" in table[0] and table[-1].endswith("not told")
    said = "\n".join(sentences(report))
    assert "share its cores" in said and "strong: time = 15.4 s / N + 0.02 s x log2(N) x steps + 0 s" in said
    json.dumps(report)


def test_two_sizes_give_no_advice_and_slower_ones_say_so(fake):
    experiment = Experiment(nodes=(1, 2), kinds=("strong",))
    report = gather(experiment, run_jobs(experiment, wait=60))
    assert report["fit"] == report["advice"] == {"strong": None}
    assert sentences(report)[-1] == "strong: a fit needs 3 sizes, so there is no advice."
    report["fit"]["strong"] = {"compute": 0.0}
    report["advice"]["strong"] = {}
    assert "no part of the time became less" in sentences(report)[-1]


def test_the_counter_of_the_processor_is_read_and_may_begin_again(tmp_path):
    for name, joules in (("intel-rapl:0", 90), ("intel-rapl:1", 5), ("intel-rapl:0:0", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{joules * 10**6}\n")
        (tmp_path / name / "max_energy_range_uj").write_text(f"{100 * 10**6}\n")
    before = energy.rapl_joules(tmp_path)
    assert before == {"intel-rapl:0": (90.0, 100.0), "intel-rapl:1": (5.0, 100.0)}
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("20000000\n")
    assert energy.difference(before, energy.rapl_joules(tmp_path)) == pytest.approx(30)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert energy.rapl_joules(tmp_path) is None and energy.difference(before, None) is None
    assert energy.rapl_joules(tmp_path / "absent") is None


def test_the_energy_of_a_job_is_kept_for_a_later_call(tmp_path, monkeypatch):
    job = SimpleNamespace(where="this machine", id="3", out=tmp_path)
    monkeypatch.setattr(energy, "rapl_joules", lambda: {"intel-rapl:0": (50.0, 100.0)})
    assert energy.used(job, None) is None
    assert energy.used(job, {"intel-rapl:0": (20.0, 100.0)}) == energy.used(job, None) == pytest.approx(30)
    job.id = "4"  # another job in the same folder
    assert energy.used(job, None) is None


@pytest.mark.parametrize(("answer", "joules"), [("5000\n1\n4999\n", 5000), ("0\n0\n", None), ("\n", None), ("", None)])
def test_slurms_count_of_energy(monkeypatch, answer, joules):
    monkeypatch.setattr(energy.slurm, "client", lambda *words: answer)
    assert energy.used(SimpleNamespace(where="cluster x", id="3"), None) == joules


def test_without_accounting_nobody_tells_the_energy(monkeypatch):
    def refuse(*words):
        raise energy.SlurmError("Slurm accounting storage is disabled")

    monkeypatch.setattr(energy.slurm, "client", refuse)
    assert energy.slurm_joules("3") is None


REFUSED = [
    (["--nodes", "2,1"], "nodes 2,1 are not allowed"),
    (["--nodes", "one"], "--nodes 'one' is not allowed; allowed: rising numbers, such as 1,2,4"),
    (["--scaling", "strong", "--nodes", "1,64"], "64 processes need 64 CPU cores"),
    (["--nodes", "1,2", "--efficiency", "1.5"], "--efficiency 1.5 is not allowed; allowed: 1.0 or less"),
    (["--nodes", "1,2", "--out", "elsewhere/scale"], "--out elsewhere/scale is not allowed"),
    (["--nodes", "1,2", "--site", "nowhere"], "no site 'nowhere'"),
    (["--nodes", "1,2", "--images", "100"], "100 images in batches of 64"),
    (["--nodes", "1,2", "--model", "resnet19"], "--model 'resnet19' is not allowed"),
    (["--nodes", "1,2", "--precision", "fp8"], "--precision 'fp8' is not allowed"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words[-2:]) for words, _ in REFUSED])
def test_bad_input_is_one_line_and_starts_nothing(words, message, no_slurm, project, monkeypatch, capsys):
    monkeypatch.setattr(runs, "submit", lambda *of, **options: pytest.fail("a job was submitted"))
    if "1,64" in words:
        monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert main(["scale", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_the_command_runs_real_jobs_and_goes_on_with_them(no_slurm, project, capsys):
    words = ["scale", "--nodes", "1,2", "--model", "toy", "--scaling", "strong", "--images", "320", "--wait", "240"]
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


def test_the_picture_shows_the_ideal_the_spread_and_the_model(fake):
    experiment = Experiment(nodes=(1, 2, 4))
    report = gather(experiment, run_jobs(experiment, wait=60))
    bundle = plots.scaling(report)
    assert repr(bundle).startswith("speed-up against devices with the ideal, the fitted model, and the cost of a job")
    assert repr(bundle).endswith(": strong, weak on 1, 2, 4 devices")
    figure = bundle.figure
    speed, cost = figure.axes
    assert cost.get_ylabel() == "cost of a job (device-minutes)" and speed.get_xlabel() == "devices N"
    lines = {line.get_label(): line for line in speed.get_lines()}
    assert list(lines["ideal"].get_ydata()) == [1, 2, 4]
    assert lines["strong, model"].get_ydata()[-1] == pytest.approx(3.2)
    assert lines["weak, model"].get_ydata()[-1] == pytest.approx(4 * 0.64 / 0.68)
    assert len({line.get_color() for name, line in lines.items() if "model" in name}) == 2
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [*figure.legends[0].get_texts(), speed.title, speed.yaxis.label, cost.yaxis.label, cost.xaxis.label]
    for box in (text.get_window_extent(renderer) for text in texts):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_the_picture_of_runs_without_steps_has_no_bars():
    first = imagenet.RUNS[0]
    rows = [
        {
            "scaling": "ImageNet",
            "devices": run.devices,
            "batch": run.batch,
            "speedup": first.seconds / run.seconds,
            "device_hours": run.devices * run.seconds / 3600,
        }
        for run in imagenet.RUNS
    ]
    figure = plots.scaling({"rows": rows, "fit": {"ImageNet": vars(fit(imagenet.RUNS[:3], imagenet.IMAGES))}}).figure
    assert not figure.axes[0].get_title() and figure.axes[1].get_ylabel() == "cost of a job (device-hours)"
    with pytest.raises(UserError, match="no rows to draw"):
        plots.scaling({"rows": [], "fit": {}})
