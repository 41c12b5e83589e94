"""What became of a job, by its number or its run's folder; and where the ranks of one are that hangs."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time

import pytest
from worker_jobs import spec, until

from mpdemo.jobs import load_site, submit
from mpdemo.jobs.job import RECORD
from mpdemo.tools.explain import command as explain_command
from mpdemo.tools.explain import live, probe, who_waits
from mpdemo.tools.explain.asked import resolve
from mpdemo.tools.explain.findings import find, verdict
from mpdemo.tools.explain.who_waits import Place


@pytest.fixture
def explain(call_mpdemo):
    """Run the command; return what it prints."""

    def explained(*words):
        done = call_mpdemo("explain", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return explained


def hanging(**shape):
    """Submit a job in which all ranks wait for rank 1, on a site of nodes with one GPU; return it when it hangs."""
    job = submit(
        spec(program="hanging.py", **shape), dataclasses.replace(load_site("throwaway"), gpus_per_node=1)
    )
    world = shape.get("nodes", 1) * shape["processes_per_node"]
    until(lambda: job.log().count("is ready") == world or job.finished)
    until(lambda: resolve(job.id).silence > explain_command.QUIET)
    return job


WAITS = r" waits? in barrier \(.*hanging.py, line \d+ in <module>\) for rank 1, which is at .*line \d+ in load_images\."


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        (3, {"processes_per_node": 3}),  # each with a GPU, and so on a node of its own
        pytest.param(
            2,
            {
                "nodes": 2,
                "processes_per_node": 2,
                "gpus_per_process": 0,
                "cpus_per_process": 1,
                "launcher": "torchrun",
            },
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["srun", "torchrun"],
)
def test_a_job_that_hangs_is_explained_by_its_number_at_once(cluster, project, explain, nodes, shape):
    job = hanging(**shape)
    begin = time.monotonic()
    said = explain(job.id, "--live")
    assert time.monotonic() - begin < 30  # processes start slowly on a busy machine
    others = "ranks 0, 2" if nodes == 3 else "ranks 0, 2, 3"
    assert re.search("^" + others + WAITS, said, re.MULTILINE), said
    assert "verdict: fix; " in said and "(it waits for something else)" in said
    (project / "runs/toy" / RECORD).unlink()  # now it is any user's job
    told = json.loads(explain(job.id, "--live", "--json"))
    assert re.match(others + WAITS, told["live"]) and told["verdict"] == "fix"
    assert len({row["node"] for row in told["ranks"]}) == nodes  # whichever were free
    job.cancel()
    until(lambda: "throwaway: cancelled" in explain(job.id))
    assert "verdict: retry; " in explain(job.id)


def test_a_job_on_this_machine_that_hangs(project, explain, call_mpdemo, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(project / "recorder_"))
    job = submit(spec(program="hanging.py", gpus_per_process=0, processes_per_node=2, oversubscribe=True))
    until(lambda: job.log().count("is ready") == 2 or job.finished)
    said = explain("runs/toy", "--live")
    assert re.search("^rank 0" + WAITS, said, re.MULTILINE), said
    assert f"torchfrtrace {project} -p recorder_ compares" in said
    job.cancel()
    done = call_mpdemo("explain", job.id, "--live")
    assert done.returncode == 2 and "looks into a running job; job" in done.stderr


def test_a_failed_job_is_explained_by_its_folder(project, explain):
    job = submit(spec("fail", 0, 1, gpus_per_process=0))
    assert job.wait(60) == "failed"
    said = explain("runs/toy")
    assert said.startswith(f"job {job.id} (toy) on this machine: failed, exit status 1, after ")
    assert "ValueError: the digits are upside down" in said and "log: " in said
    assert said.rstrip().splitlines()[-1].startswith("verdict: fix; ")
    (project / "runs/other").mkdir()
    (project / "runs/other" / RECORD).write_text(f'{{"id": "{job.id}"')  # of another run, and damaged
    assert explain(job.id) == said


HANDLES = "import faulthandler, signal; faulthandler.register(signal.SIGUSR2); "


@pytest.mark.parametrize(("begin", "asked"), [(HANDLES, True), ("", False)])
def test_a_rank_is_asked_by_a_signal_only_if_it_handles_it(tmp_path, begin, asked, monkeypatch):
    """By default the signal kills; submitit's handler would queue the job again."""
    monkeypatch.setattr(probe, "of_py_spy", lambda pid: None)
    code = f"{begin}import time; print('up', flush=True); time.sleep(60)"
    log = tmp_path / "log"
    with (
        open(log, "w") as file,
        subprocess.Popen([sys.executable, "-c", code], stdout=file, stderr=file) as rank,
    ):
        try:
            until(lambda: "up" in log.read_text())
            (place,), _ = live.look_here({0: rank.pid}, [log])
            assert rank.poll() is None and not probe.may_be_asked(rank.pid, {"SUBMITIT_EXECUTOR": "slurm"})
            rank.send_signal(signal.SIGSTOP)
            (stopped,), _ = live.look_here({0: rank.pid}, [log])
        finally:
            rank.kill()
    assert (place.line == "<string>, line 1 in <module>") == asked
    assert (place.kind, stopped.kind) == ("elsewhere" if asked else "unseen", "stopped")
    assert f"its process {rank.pid} is stopped" in str(stopped)


# --- in one sentence


def at(rank, collective, line=7, **more):
    return Place(rank, collective, f"train.py, line {line} in main", **{"node": "n1"} | more)


TORCH = "/x/site-packages/torch"


@pytest.mark.parametrize(
    ("inner", "collective"),
    [
        (
            [(f"{TORCH}/distributed/distributed_c10d.py", 9, name) for name in ("_gather", "all_gather")],
            "all_gather",
        ),
        ([(f"{TORCH}/distributed/pipelining/schedules.py", 9, "_wait_batch_p2p")], "_wait_batch_p2p"),
        (
            [(f"{TORCH}/autograd/graph.py", 9, "_engine_run_backward")],
            "the backward pass (which averages gradients)",
        ),
        (
            [(f"{TORCH}/nn/modules/linear.py", 9, "forward"), (f"{TORCH}/distributed/fsdp/x.py", 9, "run")],
            "",
        ),
        ([], ""),
    ],
)
def test_what_a_rank_waits_in(inner, collective):
    known = {"recorder": "", "stopped": False, "pid": 0}
    row = {
        "rank": 3,
        "node": "n1",
        "cpu": 0.0,
        "mib": 9,
        "frames": [*inner, ("train.py", 7, "main")],
    } | known
    assert who_waits.place_of(row) == Place(3, collective, "train.py, line 7 in main", "n1", 0.0, 9)


@pytest.mark.parametrize(
    ("found", "kind", "said"),
    [
        (
            [at(0, "barrier"), at(1, "barrier"), Place(2)],
            "gone",
            "ranks 0, 1 wait in barrier .* for rank 2, whose",
        ),
        (
            [at(0, "barrier"), at(1, "", 9)],
            "elsewhere",
            "0 waits in barrier .* for rank 1, which is at .*line 9 in",
        ),
        (
            [at(0, "barrier"), Place(1, node="n1")],
            "unseen",
            "for rank 1, which is at a place that is not known",
        ),
        ([at(0, "barrier"), Place(1, "", "a", "n1", cpu=0.9)], "works", "for rank 1, which is at a"),
        (
            [at(0, "barrier"), Place(1, node="n1", stopped=True, pid=7)],
            "stopped",
            "process 7 on n1 is stopped",
        ),
        (
            [at(0, "barrier"), at(1, "all_reduce", 9)],
            "different",
            "0 waits in barrier .*; rank 1 waits in all_reduce .*9",
        ),
        ([at(0, "barrier"), at(1, "barrier")], "same", "No rank is missing: ranks 0, 1 wait in barrier"),
        ([at(0, ""), at(1, "")], "none", "No rank waits"),
    ],
)
def test_who_waits_for_whom(found, kind, said):
    word, text = who_waits.sentence(found)
    assert word == kind and re.search(said, text), text
    quiet = [explain_command.verdict_live(kind, seconds)[1] for seconds in (1, 100)]
    assert ("ask again" in quiet[0]) == (kind not in ("none", "stopped", "unseen"))
    assert quiet[1] == who_waits.ADVICE[kind][1]


def test_what_a_stack_means(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("loss.item()\nwork()\n")
    places = [
        Place(1, "", f"{file}, line {line} in main", "n1", cpu)
        for line, cpu in ((1, 1.0), (2, 1.0), (2, 0.0))
    ]
    assert [place.meaning for place in places] == [
        " (on a GPU it waits there for all work before, collectives too)",
        " (it computes)",
        " (it waits for something else)",
    ]


def test_the_stacks_of_tasks_that_write_into_one_log_are_told_apart():
    stack = 'Thread 0x1 (most recent call first):\n  File "b.py", line 1 in helper\n\n'
    stack += "Current thread 0x2 (most recent call first):\n"
    texts = [stack + f'  File "train.py", line {number} in main\n' for number in (5, 6)]
    lines = [[f"{number}: {line}" for line in text.splitlines()] for number, text in enumerate(texts)]
    mixed = "\n".join(line for pair in zip(*lines, strict=True) for line in pair)
    assert live.stacks_in(mixed) == {"0": [[("train.py", 5, "main")]], "1": [[("train.py", 6, "main")]]}


def test_without_labels_the_stacks_came_in_the_order_in_which_ranks_were_asked():
    asked = [{"rank": 0, "task": "0"}, {"rank": 1, "task": "0"}]
    live.assign({"": [["first"], ["second"]]}, asked)
    assert [row["frames"] for row in asked] == [["first"], ["second"]]
    lost = [{"rank": 0, "task": "0", "frames": None}, {"rank": 1, "task": "0", "frames": None}]
    live.assign({"0": [["whose?"]]}, lost)
    assert [row["frames"] for row in lost] == [None, None]


@pytest.mark.parametrize(
    ("log", "state", "word"),
    [
        ("DUE TO NODE FAILURE", "", "retry"),
        ("CUDA error: uncorrectable ECC error encountered", "failed", "retry"),
        ("CUDA out of memory", "failed", "fix"),
        ("CUDA out of memory", "cancelled", "fix"),
        ("", "cancelled", "retry"),
        ("", "failed", "fix"),
        ("", "node_failure", "retry"),
        ("", "stopped", "retry"),
        ("", "timeout", "fix"),
        ("", "running", None),
        ("step 1 loss 0.3\ndone", "", None),
    ],
)
def test_the_verdict(log, state, word):
    assert verdict(find(log), state)[0] == word
    assert verdict([], "timeout", resumes=True)[0] == "retry"
