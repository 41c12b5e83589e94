"""Ranks beside a real kernel: what their cells print, how errors and endless waits are reported, what is left over."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from project import environment

from mpdemo.errors import UserError
from mpdemo.notebook.ranks import check_front_end, start_ranks
from mpdemo.paths import root
from mpdemo.ranks import group, run_program
from mpdemo.ranks.places import place_in_program

MARK = "MPDEMO_TEST_RANKS"  # in the environment of a kernel and of all that descends from it
START = "from mpdemo.notebook.ranks import start_ranks\nranks = start_ranks(2)"
ENDED = "The ranks were ended: run ranks.restart(), or this cell again, for fresh ones without earlier variables."


def marked_environment(folder) -> dict:
    """Return the environment for a kernel whose files all lie in `folder`."""
    return environment(folder, PYTHONPATH=str(root()), TMPDIR=str(folder), **{MARK: str(folder)})


def left_behind(folder, seconds=5.0) -> list:
    """Return the processes of the kernel with this folder that still live after `seconds`."""
    deadline = time.monotonic() + seconds
    while (living := [process for process in psutil.process_iter() if has_mark(process, str(folder))]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return living


def has_mark(process, folder) -> bool:
    try:
        return process.environ().get(MARK) == folder
    except psutil.Error:
        return False


class Kernel:
    """A kernel with two ranks; `run` executes one cell."""

    def __init__(self, client):
        self.client = client
        self.start_line = self.run(START)
        self.pid = int(self.run("import os\nprint(os.getpid())"))

    def run(self, source) -> str:
        """Return what the cell prints, followed by its error."""
        cell = nbformat.v4.new_code_cell(source)
        self.client.nb.cells.append(cell)
        try:
            self.client.execute_cell(cell, len(self.client.nb.cells) - 1)
        except CellExecutionError as error:
            return text_of(cell) + f"{error.ename}: {error.evalue}"
        return text_of(cell)


def text_of(cell) -> str:
    assert all(output.output_type in ("stream", "error") for output in cell.outputs), cell.outputs
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture(scope="module")
def kernel():
    with tempfile.TemporaryDirectory(prefix="mpdemo-") as folder:
        client = NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3", timeout=90)
        with client.setup_kernel(env=marked_environment(Path(folder))):
            yield Kernel(client)
        assert not left_behind(folder)
        assert not list(Path(folder).glob("mpdemo-ranks-*")), "a temporary folder is left"


def test_an_all_reduce_is_printed_in_order_of_rank(kernel):
    cores = "one core each" if len(os.sched_getaffinity(0)) > 1 else "sharing the cores"
    assert kernel.start_line == f"2 ranks are ready: gloo, {cores}\n"
    cell = "%%ranks\ntensor = torch.full((2,), float(rank))\ndist.all_reduce(tensor)\nprint(tensor)"
    assert kernel.run(cell) == "[rank 0] tensor([1., 1.])\n[rank 1] tensor([1., 1.])\n"


def test_one_thread_per_rank_a_value_is_shown_and_warnings_keep_their_place(kernel):
    cell = "%%ranks\nimport sys\nprint('a\\nb')\nprint('c', file=sys.stderr)\n(rank, torch.get_num_threads())"
    expected = [f"[rank {rank}] {text}\n" for rank in (0, 1) for text in ("a", "b", "c", f"({rank}, 1)")]
    assert kernel.run(cell) == "".join(expected)
    assert kernel.run("%%ranks\nrank;") == ""


def test_start_twice_gives_the_living_ranks_and_one_rank_can_run_alone(kernel):
    kernel.run("%%ranks\nkept = 10 + rank")
    kernel.run("%%ranks 1\nkept = 21")
    assert kernel.run("before = ranks\n" + START + "\nassert ranks is before") == kernel.start_line
    assert kernel.run("%%ranks\nkept") == "[rank 0] 10\n[rank 1] 21\n"


def test_errors_name_rank_and_line_and_the_cell_fails(kernel):
    cell = "%%ranks\nif rank == 1:\n    raise ValueError('no such\\nthing')\nprint('fine')"
    printed = "[rank 0] fine\n[rank 1] ValueError: no such  (line 3)\n"
    assert kernel.run(cell) == printed + "CellFailed: the cell failed on rank 1; see above"
    both = "".join(f"[rank {rank}] ZeroDivisionError: division by zero  (line 2)\n" for rank in (0, 1))
    assert kernel.run("%%ranks --expect-error\n1 / 0") == both + "the cell failed on ranks 0 and 1; see above\n"
    assert kernel.run("%%ranks\nx = = 3") == "CellFailed: SyntaxError: invalid syntax  (line 2)"
    assert "no rank failed" in kernel.run("%%ranks --expect-error\npass")
    assert "there is no rank 7; there are: 0 to 1" in kernel.run("%%ranks 7\npass")
    assert "--timeout 0 is not allowed" in kernel.run("%%ranks --timeout 0\npass")


def test_a_recv_without_send_is_reported_with_its_line_and_restart_gives_fresh_ranks(kernel):
    cell = "%%ranks --timeout 2\nprint('before')\nif rank == 0:\n    dist.recv(torch.ones(1), src=1)"
    waits = "After 2 s rank 0 still waits in recv, line 4; rank 1 is done."
    assert kernel.run(cell) == f"[rank 0] before\n[rank 1] before\nCellFailed: {waits} {ENDED}"
    begin = time.monotonic()
    assert "2 fresh ranks are ready: gloo" in kernel.run("ranks.restart()")
    seconds = time.monotonic() - begin
    print(f"restart: {seconds:.1f} s")
    assert seconds < 5
    assert kernel.run("%%ranks\n'kept' in globals()") == "[rank 0] False\n[rank 1] False\n"


def test_mismatched_collectives_and_waits_inside_functions_are_found_and_the_cell_itself_restarts(kernel):
    kernel.run("%%ranks\ndef exchange(tensor):\n    dist.irecv(tensor, src=1).wait()")
    cell = "%%ranks --timeout 2 --expect-error\nx = torch.ones(1)\nif rank:\n    dist.all_reduce(x)\nif not rank:\n"
    cell += "    exchange(x)"
    waits = "rank 0 is still in exchange, line 6; rank 1 still waits in all_reduce, line 4."
    assert kernel.run(cell) == f"After 2 s {waits} {ENDED}\n"
    cell = "%%ranks --timeout 2 --expect-error\nif rank:\n    dist.barrier()\nwhile not rank:\n    pass"
    fresh, sentence = kernel.run(cell).splitlines()
    assert fresh.startswith("2 fresh ranks are ready")
    waits = "rank 1 still waits in barrier, line 3."
    runs = [f"rank 0 still runs line {line}" for line in (4, 5)]
    assert sentence in [f"After 2 s {place}; {waits} {ENDED}" for place in runs]


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os._exit(3)", "its process exited with status 3"),
        ("os.kill(os.getpid(), 9)", "its process was killed (SIGKILL)"),
    ],
    ids=["exit", "kill"],
)
def test_a_rank_that_dies_in_a_cell_is_named(kernel, end, how):
    kernel.run("ranks = start_ranks(2)")
    printed = kernel.run(f"%%ranks\nimport os\nif rank == 1:\n    {end}\ndist.barrier()")
    assert printed == f"CellFailed: rank 1 is gone: {how}. {ENDED}"


def test_an_interrupt_ends_a_waiting_cell(kernel):
    kernel.run("ranks = start_ranks(2)")
    timer = threading.Timer(1.0, os.kill, (kernel.pid, signal.SIGINT))
    timer.start()
    printed = kernel.run("%%ranks --timeout 60\ndist.recv(torch.ones(1), src=1 - rank)")
    timer.join()
    places = [f"rank {rank} still waits in recv, line 2" for rank in (0, 1)]
    assert printed == f"CellFailed: Interrupted: {places[0]}; {places[1]}. {ENDED}"


def test_a_start_that_fails_gives_its_reason_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(group, "child_environment", lambda: {"PYTHONPATH": "", "NOT": "a\0b"})
    with pytest.raises(UserError, match="the ranks did not start: rank 0 is gone: ValueError: embedded null byte"):
        start_ranks(1)
    assert not list(tmp_path.glob("mpdemo-ranks-*"))


@pytest.mark.parametrize("seconds", [0.6, 1.5, None], ids=["early in the start", "late in the start", "in a cell"])
def test_a_killed_kernel_leaves_no_process(tmp_path, seconds):
    manager, client = start_new_kernel(env=marked_environment(tmp_path))
    try:
        if seconds is None:
            client.execute_interactive(START, timeout=60, output_hook=lambda message: None)
            client.execute("%%ranks\ndist.recv(torch.ones(1), src=1 - rank)")
        else:
            client.execute(START)
        time.sleep(seconds or 1)
        end = time.monotonic() + 60
        while len(left_behind(tmp_path, 0)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(left_behind(tmp_path, 0)) > 1, "the ranks were not there yet"
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        manager.provisioner.process.wait()
        assert not left_behind(tmp_path)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(UserError, match="1000 processes need 1000 CPU cores"):
        start_ranks(1000)
    with pytest.raises(UserError, match="world_size 0 is not allowed"):
        start_ranks(0)


def test_a_site_may_forbid_ranks_on_its_front_end(project, no_slurm, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    check_front_end(2)
    site = project / "slurm/sites/strict.toml"
    site.write_text('account = "abc"\nranks_on_front_end = false\n')
    monkeypatch.setenv("MPDEMO_SITE", "strict")
    with pytest.raises(UserError, match="srun --account=abc --ntasks=1 --cpus-per-task=2 .* jupyter lab"):
        check_front_end(2)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    check_front_end(2)


MEAN = "def mean(tensor):\n    dist.all_reduce(tensor)\n    return tensor / world_size\n"
TEST = """
def test(rank, n):
    value = mean(torch.full((1,), float(rank))).item()
    assert value == (n - 1) / 2, f"Rank {rank} has {value}.\\nMore."
    return [value]
test(rank, world_size)"""


@pytest.mark.parametrize(
    ("program", "errors"),
    [
        ("print('hi')\n" + MEAN, [None, None]),
        (MEAN.replace(" / world_size", ""), ["Rank 0 has 1.0.", "Rank 1 has 1.0."]),
        (MEAN.replace("mean", "median"), ["The program defines no mean."] * 2),
        (MEAN.replace("    dist", "    assert rank, 'mine'\n    dist"),
         ["Rank 0 failed: AssertionError: mine (line 2)", None]),
        ("import os\n" + MEAN + "if rank:\n    os.kill(os.getpid(), 9)",
         [None, "Rank 1 failed: its process was killed (SIGKILL)"]),
        ("def mean(:", [f"Rank {rank} failed: SyntaxError: invalid syntax (line 1)" for rank in (0, 1)]),
        (MEAN.replace("    dist", "    if rank: return tensor / 2\n    dist"),
         ["After 2 s rank 0 still waits in all_reduce, line 3; rank 1 is done.", None]),
    ],
)  # fmt: skip
def test_a_program_and_its_test_give_each_ranks_verdict(program, errors):
    results = run_program(program, TEST, timeout=2.0 if "return tensor / 2" in program else 20.0)
    if errors:
        assert [error for _, _, error in results] == errors
    if errors == [None, None]:
        assert [result[:2] for result in results] == [("hi\n", [0.5])] * 2


def test_the_place_is_found_whatever_thread_was_interrupted():
    report = (
        'Current thread 0x00007f (most recent call first):\n  File "/lib/zmq/garbage.py", line 46 in run\n\n'
        'Thread 0x00007e (most recent call first):\n  File "/lib/torch/nn/module.py", line 1 in _call_impl\n'
        '  File "<ranks cell 2>", line 2 in <module>\n'
    )
    assert place_in_program(report, "<ranks cell 2>", "\nloss = model(x)") == "is still in model, line 2"
    assert place_in_program(report, "<ranks cell 3>", "\nloss = model(x)") == "still runs"
    assert place_in_program("", "<ranks cell 2>", "") == "still runs"
