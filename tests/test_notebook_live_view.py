"""An awaited job without a front end, and how a job is displayed. Live, in a browser: test_notebook_browser.py."""

import asyncio
import html
import queue
import re
import threading
from types import SimpleNamespace

import pytest
from kernels import start_new_kernel
from project import environment, python_path
from toyjob import ToyJob
from worker_jobs import all_gone, attach, sleepers, spec

from mpdemo.front_end import has_front_end
from mpdemo.notebook.job_widget import JobView, picture_of
from mpdemo.notebook.live_view import follow
from mpdemo.paths import source


def text_of(page):
    """Return the text of some HTML."""
    return html.unescape(re.sub("<[^>]*>", " ", page)).strip()


@pytest.mark.parametrize(
    ("words", "said"), [({"steps": 3}, "done, 3 steps"), ({"steps": 3, "status": 1}, "failed")]
)
def test_a_job_is_displayed_when_it_has_ended(words, said, tmp_path, capsys):
    job = ToyJob(tmp_path / "07_toy", **words)
    asyncio.run(follow(job))
    assert job.finished and capsys.readouterr().out == f"07_toy: {said}\n"
    assert picture_of(JobView(job)).data["image/png"].startswith("iVBOR")


TRAIN = """
from mpdemo.notebook.course import run
await run("torchrun --standalone --nproc-per-node=2 {}", name="toy")
"""


def reply(client, number, timeout=30):
    """Return a kernel's answer to a cell; answers to earlier questions may come before it."""
    while (message := client.get_shell_msg(timeout=timeout))["parent_header"]["msg_id"] != number:
        pass
    return message["content"]


def test_an_interrupted_kernel_keeps_its_job_follows_it_again_and_ends_it_at_last(tmp_path, project):
    manager, client = start_new_kernel(
        environment(tmp_path, PYTHONPATH=python_path(source()), MPDEMO_ROOT=str(project))
    )
    try:
        train = TRAIN.format(" ".join(spec("sleep").command))
        first = client.execute(train, stop_on_error=False)  # else the kernel may drop the next cell
        pids = sleepers(project / "runs/toy", 2)
        manager.interrupt_kernel()
        said = reply(client, first)
        job = attach("runs/toy")
        left = f"job {job.id} (toy) is still running on this machine. Run the cell again to follow it. Cancel it: "
        assert said["ename"] == "Detached" and said["evalue"].startswith(left)
        assert said["evalue"].endswith("with the kernel that started it. The cells below were not run.")
        assert job.state == "running"
        again = client.execute(train)
        with pytest.raises(queue.Empty):  # it waits
            reply(client, again, timeout=1)
        assert job.state == "running"
        manager.shutdown_kernel(now=True)
        assert job.wait(20) == "cancelled" and all_gone(pids)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_wait_is_bounded_and_its_error_says_that_the_job_runs_on(tmp_path):
    job = ToyJob(tmp_path / "07_toy", steps=1000)
    try:
        with pytest.raises(TimeoutError, match=r"toy\) is still running after 0.5 s; it runs on"):
            asyncio.run(follow(job, timeout=0.5))
        assert not job.finished
    finally:
        job.cancel()
        job.process.wait()


def test_the_kernel_goes_on_while_slurm_is_slow(tmp_path):
    """The answer comes only once the kernel's loop has done something else."""
    answer, came = threading.Event(), []

    class SlowJob(ToyJob):
        @property
        def state(self):
            came.append(answer.wait(30))
            return super().state

    async def cell():
        asyncio.get_running_loop().call_later(0.2, answer.set)
        await follow(SlowJob(tmp_path / "07_toy", steps=3))

    asyncio.run(cell())
    assert all(came)


def view(rows=(), log="", **changes):
    """Return the view of a job that has just been submitted."""
    facts = {
        "state": "pending",
        "reason": "",
        "queue": None,
        "run_time": 0.0,
        "where": "this machine",
        "id": "1",
    }
    facts |= {"out": "runs/23_two", "finished": False, "metrics": lambda: list(rows), "log": lambda: log}
    return JobView(SimpleNamespace(**(facts | changes)))


def test_the_view_of_a_running_job_is_readable():
    step = {"event": "step", "step": 7, "steps": 56, "loss": 1.5, "images_per_second": 250.0}
    rows = [step | {"peak_memory_mib": [412.3, 398.0]}, {"event": "epoch", "epoch": 0}]
    running = view(state="running", run_time=4.21, rows=rows, log="a\n\r1%\r2%\n<b>\n")
    facts = "this machine, job 1 · 4.2 s · step 7 of 56, loss 1.5000 · 250 images/s · memory 412, 398 MiB"
    assert " ".join(text_of(running.header()).split()) == f"23_two running {facts}"
    assert text_of(running.log_tail()) == "a\n2%\n<b>"
    assert 'aria-label="loss 1.5 at step 7"' in running.chart()
    two = view(state="running", rows=[step, step | {"step": 9, "loss": 0.5}]).chart()
    # of 56
    assert 'points="52.0,22.0 430.0,136.0"' in two and ">7</text>" in two and ">step 9</text>" in two
    resumed = view(state="running", rows=[*rows, {"event": "start", "step": 7, "steps": 99}])
    assert "step 7 of 99" in text_of(resumed.header())
    waiting = view(reason="Resources", queue=3, where="cluster box", id="12")
    assert "position 3 in the queue (Resources)" in text_of(waiting.header())
    assert waiting.chart() == "" and repr(picture_of(waiting)) == "23_two: pending"


def test_a_test_and_a_script_have_no_front_end(run_once, monkeypatch):
    assert not has_front_end()
    for name in ("PYTEST_CURRENT_TEST", "NBVAL"):
        monkeypatch.delenv(name, raising=False)
    code = "import IPython; from mpdemo.front_end import has_front_end; print(has_front_end())"
    done = run_once("-c", code, JPY_SESSION_NAME="a.ipynb")  # started from a kernel
    assert done.stdout.strip() == "False", done.stderr
