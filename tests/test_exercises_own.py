"""The exercises of 80 and 81 as one: the solutions' script in the solutions' job, through all that stops a job."""

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest
from test_exercises import answer_of, code_cells
from worker_jobs import until

from mpdemo.notebook import check
from mpdemo.paths import root
from mpdemo.tools.cluster import Cluster
from mpdemo.world.processes import child_environment

SOLUTIONS = root() / "notebooks" / "solutions" / "81_resume_submit.ipynb"
# what the notebook's picture shows; written if it is missing
RECORD = root() / "notebooks" / "checks" / "81_jobs.json"
STEPS = 80
SECONDS = 240  # in which a job comes so far
WHY = "time limit", "warned", "node lost", "preempted", "2 processes"

check._answers("81")
own_job = sys.modules["checks.own_job"]
job_files = sys.modules["checks.job_files"]


@pytest.fixture(scope="module")
def solved() -> tuple:
    """The training script and the batch script of the solutions."""
    batch = next(cell.source for cell in code_cells(SOLUTIONS) if cell.source.startswith("%%task 81.5"))
    return answer_of("81.3"), batch.partition("\n")[2]


class OneRun:
    """The job of a training script on the nodes of a cluster, in a folder of its own."""

    def __init__(self, folder, cluster, training, batch, pause=0.2):
        folder.mkdir(exist_ok=True)
        self.folder, self.cluster, self.training = (
            folder,
            cluster,
            training.replace("64, 16, 20)", f"64, 16, {STEPS})"),
        )
        self.environment = child_environment() | cluster.environ
        self.ends = [0]  # of the log, at each stop
        self.pause(pause)
        (folder / "bard.sbatch").write_text(batch)
        self.place = own_job.started(folder / "bard.sbatch", folder, self.environment, folder / "log")

    def pause(self, seconds):
        """Choose the pause after each step, from the next start on."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own_job, "PAUSE", seconds)
            own_job.filled(self.folder, own_job.files_in_job(self.training))

    def client(self, *words):
        return job_files.client(self.environment, *words)

    def node(self):
        return self.client("squeue", "-h", "-j", self.place[0], "-o", "%N").stdout.strip()

    def state(self, *wanted):
        """Wait until the job has one of these states."""
        return job_files.wait_for(
            *self.place, lambda state: state in wanted, f"become {wanted[0]}", SECONDS
        )

    def trains(self, run, steps=6):
        """Wait until a run of the job has made some steps."""
        until(lambda: len(self.steps()) == run and self.steps()[-1] >= steps, SECONDS)

    def stopped(self):
        """Wait until the job is back in the queue, and note how far its log has come."""
        self.state("pending")
        self.ends.append(len(self.log()))

    def again(self):
        """Let the job that is back in the queue start at once."""
        time.sleep(2)  # a node refuses a job that starts again within the second of its end
        self.client("scontrol", "update", f"jobid={self.place[0]}", "StartTime=now")

    def steps(self):
        return own_job.steps_of(self.folder)

    def log(self):
        return "".join(file.read_text() for file in sorted(self.folder.glob("slurm-*.out")))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_solutions_survive_time_limits_a_lost_node_preemption_and_fewer_gpus(
    slurm_programs, solved, tmp_path
):
    """The losses are those of a run that never stopped, to the last digit; on fewer GPUs up to rounding."""
    training, batch = solved
    size = {"nodes": 2, "cpus": 40, "gpus": 4, "urgent": True}
    with tempfile.TemporaryDirectory(prefix="mp") as short, Cluster.up(**size) as cluster:
        never = OneRun(Path(short, "never"), cluster, training, batch, pause=0.0)
        never.state("completed")
        whole = own_job.losses_at(never.log())
        assert sorted(whole) == list(range(5, STEPS + 1, 5))
        run = OneRun(Path(short, "run"), cluster, training, batch, pause=1.0)
        number = f"jobid={run.place[0]}"
        run.trains(1)
        run.client("scontrol", "update", number, "EndTime=now+600")  # Slurm looks every 30 s for limits
        run.stopped()
        run.pause(0.3)
        run.again()
        run.trains(2)
        run.client("scancel", "--batch", "--signal=USR1", run.place[0])
        run.stopped()
        run.again()
        run.trains(3, steps=9)  # some of them after a checkpoint: they are lost
        cluster.kill_node(node := run.node())
        run.client("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
        run.stopped()
        run.again()
        run.trains(4)
        run.client("scontrol", "update", "partition=debug", "GraceTime=60")
        urgent = ["--partition=urgent", "--nodes=1", "--exclusive", "--output=/dev/null"]
        run.client("sbatch", *urgent, "--nodelist", run.node(), "--wrap=sleep 2")
        run.stopped()
        run.client("scancel", run.place[0])
        assert "--gpus-per-node=4" in batch and "--nproc-per-node=4" in batch
        fewer = batch.replace("per-node=4", "per-node=2")
        last = OneRun(run.folder, cluster, training, fewer)
        last.state("completed")
        printed, steps = run.log(), run.steps()
    losses = [own_job.losses_at(printed[a:b]) for a, b in pairwise([*run.ends, None])]
    resumed = min(losses[3]) - 5  # after the node was lost: at a checkpoint
    first, second, third, fourth, fifth = steps
    spans = [[0, first], [first, first + second], [first + second, first + second + third]]
    spans += [[resumed, resumed + fourth], [STEPS - fifth, STEPS]]
    assert resumed % 5 == 0 and spans[1][1] < resumed <= spans[2][1] and spans[3][1] == STEPS - fifth
    for found in losses[:4]:
        assert found and found == {step: whole[step] for step in found}
    assert losses[4] == pytest.approx({step: whole[step] for step in losses[4]}, rel=1e-4)
    assert set().union(*losses) == set(whole)
    compare(
        whole,
        [dict(steps=s, losses=[*f.items()], why=w) for s, f, w in zip(spans, losses, WHY, strict=True)],
    )


def compare(whole, jobs):
    """Require that what the notebook draws is what such a run prints."""
    if not RECORD.exists():
        RECORD.write_text(json.dumps({"whole": [*whole.items()], "jobs": jobs}) + "\n")
    record = json.loads(RECORD.read_text())
    assert dict(record["whole"]) == pytest.approx(whole, rel=1e-3)
    assert [job["why"] for job in record["jobs"]] == [job["why"] for job in jobs]


WHOLE, ANY = (
    'file.parent for file in Path().glob("bard-*/.metadata")',
    'file for file in Path().glob("bard-*")',
)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_script_that_takes_its_log_for_a_checkpoint_is_told(
    slurm_programs, solved, tmp_path, monkeypatch
):
    training, batch = solved
    assert WHOLE in training and "slurm-%j.out" in batch
    (tmp_path / "bard.py").write_text(training.replace(WHOLE, ANY))
    (tmp_path / "answer.sbatch").write_text(batch.replace("slurm-%j.out", "bard-%j.out"))
    monkeypatch.setattr(own_job, "OWN", [tmp_path / "bard.py", tmp_path / "none"])
    state, message = check.verdict("81.5", tmp_path / "answer.sbatch")
    assert state == "wrong" and "ValueError" in message and ".out" in message, message


def test_a_path_given_as_text_is_asked_for_as_a_path():
    assert check.verdict("80.1", "bard.py")[1].endswith("The check wants a path: Path('bard.py').")
