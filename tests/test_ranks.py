"""Ranks beside a real kernel: what cells print, how errors and hangs are reported, what is left over; programs."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from kernels import start_new_kernel
from project import environment, python_path
from worker_jobs import came, processes_in

from mpdemo.errors import COLUMNS, UserError
from mpdemo.notebook.ranks import check_login_node, start_ranks
from mpdemo.paths import root
from mpdemo.ranks import group, run_program
from mpdemo.ranks.places import place_in_program
from mpdemo.world import warm

START = "from mpdemo.notebook.ranks import start_ranks\nranks = start_ranks(2)"
ENDED = "The ranks were ended: run ranks.restart(), or this cell again, for fresh ones without earlier variables."


def nothing_is_left(folder) -> bool:
    """Return whether all of this kernel has ended in time: a server first ends its import of PyTorch."""
    return came(lambda: not processes_in(folder), 30)


class Kernel:
    """A kernel whose files all lie in a folder; `run` executes a cell and returns what it prints, then its error."""

    def __init__(self, folder):
        more = {"PYTHONPATH": python_path(root()), "TMPDIR": str(folder)}
        self.manager, self.client = start_new_kernel(environment(folder, **more))
        self.pid = self.manager.provisioner.pid

    def run(self, source) -> str:
        printed, self.shown = [], []

        def note(message):
            if "display_data" in message["msg_type"]:  # also update_display_data
                self.shown.append(message["content"]["data"]["text/plain"])
            text, error = (message["content"].get(name, "") for name in ("text", "ename"))
            printed.append(f"{error}: {message['content']['evalue']}" if error else text)

        self.client.execute_interactive(source, timeout=90, output_hook=note)
        return "".join(printed)

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    with tempfile.TemporaryDirectory(prefix="mpdemo-") as folder:
        kernel = Kernel(folder)
        yield kernel
        kernel.stop()
        assert nothing_is_left(folder), processes_in(folder)
        assert not list(Path(folder).glob("mpdemo-ranks-*")), "a temporary folder is left"


def test_an_all_reduce_is_printed_in_order_of_rank(kernel):
    cores = "one core each" if len(os.sched_getaffinity(0)) > 1 else "sharing the cores"
    assert kernel.run(START) == f"2 ranks are ready: gloo, {cores}\n"
    cell = "%%ranks\ntensor = torch.full((2,), float(rank))\ndist.all_reduce(tensor)\nprint(tensor)"
    assert kernel.run(cell) == "[rank 0] tensor([1., 1.])\n[rank 1] tensor([1., 1.])\n"


def test_one_thread_per_rank_a_value_is_shown_and_warnings_keep_their_place(kernel):
    cell = (
        "%%ranks\nimport sys\nprint('a\\nb')\nprint('c', file=sys.stderr)\n(rank, torch.get_num_threads())"
    )
    expected = [f"[rank {rank}] {text}\n" for rank in (0, 1) for text in ("a", "b", "c", f"({rank}, 1)")]
    assert kernel.run(cell) == "".join(expected)
    assert kernel.run("%%ranks\nrank;") == ""
    unfinished = "%%ranks\nprint('without an end', end=' ')"
    assert kernel.run(unfinished) == "[rank 0] without an end \n[rank 1] without an end \n"


def test_start_twice_gives_the_living_ranks_and_one_rank_can_run_alone(kernel):
    kernel.run("%%ranks\nkept = 10 + rank")
    kernel.run("%%ranks 1\nkept = 21")
    assert "Error" not in kernel.run("before = ranks\n" + START + "\nassert ranks is before")
    assert kernel.run("%%ranks\nkept") == "[rank 0] 10\n[rank 1] 21\n"


def test_errors_name_rank_and_line_and_the_cell_fails(kernel):
    cell = "%%ranks\nif rank == 1:\n    raise ValueError('no such\\nthing')\nprint('fine')"
    printed = "[rank 0] fine\n[rank 1] ValueError: no such  (line 3)\n"
    assert kernel.run(cell) == printed + "CellFailed: the cell failed on rank 1; see above"
    both = "".join(f"[rank {rank}] ZeroDivisionError: division by zero  (line 2)\n" for rank in (0, 1))
    assert (
        kernel.run("%%ranks --expect-error\n1 / 0")
        == both + "the cell failed on ranks 0 and 1; see above\n"
    )
    assert kernel.run("%%ranks\nx = = 3") == "CellFailed: SyntaxError: invalid syntax  (line 2)"
    assert "no rank failed" in kernel.run("%%ranks --expect-error\npass")
    assert "there is no rank 7; there are: 0 to 1" in kernel.run("%%ranks 7\npass")


def test_a_recv_without_send_is_reported_with_its_line_and_restart_gives_fresh_ranks(kernel):
    cell = "%%ranks --timeout 2\nprint('before')\nif rank == 0:\n    dist.recv(torch.ones(1), src=1)"
    waits = "After 2 s rank 0 still waits in recv, line 4; rank 1 is done."
    assert kernel.run(cell) == f"[rank 0] before\n[rank 1] before\nCellFailed: {waits} {ENDED}"
    assert "2 fresh ranks are ready: gloo" in kernel.run("ranks.restart()")
    assert kernel.run("%%ranks\n'kept' in globals()") == "[rank 0] False\n[rank 1] False\n"


def test_mismatched_collectives_and_waits_inside_functions_are_found_and_the_cell_itself_restarts(kernel):
    kernel.run("%%ranks\ndef exchange(tensor):\n    dist.irecv(tensor, src=1).wait()")
    cell = "%%ranks --timeout 2 --expect-error\nx = torch.ones(1)\nif rank:\n    dist.all_reduce(x)\nif not rank:\n"
    cell += "    exchange(x)"
    waits = "rank 0 is still in exchange, line 6; rank 1 still waits in all_reduce, line 4."
    printed = kernel.run(cell)
    assert printed.split() == f"After 2 s {waits} {ENDED}".split()
    assert all(len(line) <= COLUMNS for line in printed.splitlines())
    cell = "%%ranks --timeout 2 --expect-error\nif rank:\n    dist.barrier()\nwhile not rank:\n    pass"
    fresh, *sentence = kernel.run(cell).splitlines()
    assert fresh.startswith("2 fresh ranks are ready")
    waits = "rank 1 still waits in barrier, line 3."
    runs = [f"rank 0 still runs line {line}" for line in (4, 5)]
    assert " ".join(sentence) in [f"After 2 s {place}; {waits} {ENDED}" for place in runs]


def test_once_a_rank_has_failed_the_others_have_two_seconds(kernel):
    kernel.run(START)
    printed = kernel.run("%%ranks --timeout 80\nif rank:\n    raise ValueError('no ' * 50)\ndist.barrier()")
    error, sentence = printed.split("CellFailed: ")
    assert sentence == f"2 s after an error rank 0 still waits in barrier, line 4; rank 1 failed. {ENDED}"
    lines = error.splitlines()
    assert len(lines) == 2 and all(line.startswith("[rank 1] ") and len(line) <= COLUMNS for line in lines)


def test_a_page_shows_what_ranks_print_while_they_run_and_what_is_waited_for(kernel, tmp_path):
    """The kernel prints the same as without a page; nothing of the display is left at the end."""
    page = {"JPY_SESSION_NAME": "a.ipynb", "MPDEMO_ROOT": str(tmp_path)}
    kernel.run(
        f"import os\nfrom mpdemo import front_end\n{START}\nos.environ |= {page}\nfront_end.AFTER = 0.5"
    )
    printed = kernel.run("%%ranks\nimport time\nprint('first')\ntime.sleep(2)\nprint('second')")
    first = "[rank 0] first\n[rank 1] first\n"
    assert printed == "".join(f"[rank {rank}] {text}\n" for rank in (0, 1) for text in ("first", "second"))
    assert first in kernel.shown and kernel.shown[-1] == ""
    assert f"{first}waiting for rank 0 and rank 1, 1 s so far" in kernel.shown
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(2)\nprint('done')\n")
    job = "run('torchrun --nproc-per-node=2 slow.py', name='slow')"
    assert kernel.run(f"from mpdemo.notebook.course import run\nprint({job}.output())") == "done\ndone\n"
    assert "waiting for runs/slow (running, 2 processes), 1 s so far" in kernel.shown
    assert kernel.shown[-1] == ""
    kernel.run(f"for name in {list(page)}:\n    del os.environ[name]\nfront_end.AFTER = 10.0")


ENDS = [(f"os._exit({status})", f"its process exited with status {status}") for status in (0, 3)]
ENDS += [("os.kill(os.getpid(), 9)", "its process was killed (SIGKILL)")]


@pytest.mark.parametrize(("end", "how"), ENDS, ids=["done", "exit", "kill"])
def test_a_rank_that_dies_in_a_cell_is_named(kernel, end, how):
    kernel.run(START)
    printed = kernel.run(f"%%ranks\nimport os\nif rank == 1:\n    {end}\ndist.barrier()")
    assert printed == f"CellFailed: rank 1 is gone: {how}. {ENDED}"


def test_a_cell_that_misses_an_earlier_one_is_told_so(kernel):
    kernel.run(START)
    assert "NameError: name 'loss' is not defined  (line 2); a cell above defines it?" in kernel.run(
        "%%ranks\nloss"
    )


def test_an_interrupt_ends_a_waiting_cell(kernel):
    kernel.run(START)
    timer = threading.Timer(1.0, kernel.manager.interrupt_kernel)
    timer.start()
    printed = kernel.run("%%ranks --timeout 60\ndist.recv(torch.ones(1), src=1 - rank)")
    timer.join()
    places = [f"rank {rank} still waits in recv, line 2" for rank in (0, 1)]
    assert printed == f"CellFailed: Interrupted: {places[0]}; {places[1]}. {ENDED}"


@pytest.mark.parametrize("seconds", [
    pytest.param(0.6, id="early in the start"),
    pytest.param(1.5, id="late in the start", marks=pytest.mark.nightly),
    pytest.param(None, id="in a cell"),
])  # fmt: skip
def test_a_killed_kernel_leaves_no_process(tmp_path, seconds):
    kernel = Kernel(tmp_path)
    try:
        if seconds is None:
            kernel.run(START)
            kernel.client.execute(
                "%%ranks\nimport os\nos.system('sleep 300 &')\ndist.recv(torch.ones(1), src=1 - rank)"
            )
        else:
            kernel.client.execute(START)
        time.sleep(seconds or 1)
        assert came(lambda: len(processes_in(tmp_path)) > 1, 60), "the ranks were not there yet"
        os.kill(kernel.pid, signal.SIGKILL)
        kernel.manager.provisioner.process.wait()
        assert nothing_is_left(tmp_path), processes_in(tmp_path)
    finally:
        kernel.stop()


def test_a_start_that_takes_too_long_is_given_up_and_what_starts_later_ends(monkeypatch):
    monkeypatch.setattr(warm, "IMPORT_SECONDS", 0.01)
    warm.SERVERS.clear()
    with pytest.raises(UserError, match="the ranks did not start: TimeoutError: timed out"):
        start_ranks(2, oversubscribe=True)
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    servers = [child for child in alive if "mpdemo.world.warm" in str(child.cmdline())]
    assert not psutil.wait_procs(servers, timeout=60)[1]


def test_a_start_that_fails_gives_its_reason_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(group.ENVIRONMENT, "GLOO_SOCKET_IFNAME", "none")
    with pytest.raises(UserError, match="the ranks did not start: rank 0 is gone: RuntimeError: .* none"):
        start_ranks(1)
    assert not list(tmp_path.glob("mpdemo-ranks-*"))


def test_more_ranks_than_cores_are_refused(monkeypatch):
    with pytest.raises(UserError, match="1000 processes need 1000 CPU cores"):
        start_ranks(1000)
    with pytest.raises(UserError, match="world_size 0 is not allowed"):
        start_ranks(0)
    monkeypatch.setenv("MPDEMO_CORES", "two")
    with pytest.raises(
        UserError, match="^MPDEMO_CORES = 'two' is not allowed; allowed: a number of processes"
    ):
        start_ranks(2)


def test_a_site_may_forbid_ranks_on_its_front_end(project, no_slurm, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    check_login_node(2)
    text = (project / "slurm/sites/throwaway.sbatch").read_text()
    strict = text.replace("#:", "#: ranks_on_front_end = false\n#:", 1)
    (project / "slurm/sites/strict.sbatch").write_text(strict)
    monkeypatch.setenv("MPDEMO_SITE", "strict")
    with pytest.raises(UserError, match="srun --cpus-per-task=2 .* jupyter lab"):
        check_login_node(2)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    check_login_node(2)


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
        (MEAN.replace(" / world_size", ""), ["Rank 0 has 1.0.", "Rank 1 has 1.0."]),
        (MEAN.replace("mean", "median"), ["The program defines no mean."] * 2),
        (MEAN.replace("    d", "    1 / rank\n    d"),
         ["Rank 0 failed: ZeroDivisionError: division by zero (line 2)", None]),
        (MEAN + "import os\nif rank:\n    os.abort()", [None, "Rank 1 failed: its process was killed (SIGABRT)"]),
        ("def mean(:", [f"Rank {rank} failed: SyntaxError: invalid syntax (line 1)" for rank in (0, 1)]),
        (MEAN.replace("    d", "    if rank: return tensor / 2\n    d"),
         ["After 4 s rank 0 still waits in all_reduce, line 3; rank 1 is done.", None]),
    ],
    ids=["wrong", "another name", "error", "killed", "syntax", "hangs"],
)  # fmt: skip
def test_a_wrong_program_is_told_why(program, errors):
    """Soon: the others are not waited for once a rank has failed."""
    hangs = "After 4 s" in str(errors)  # the others have longer than the test itself
    assert [error for _, _, error in run_program(program, TEST, timeout=4.0 if hangs else 1e4)] == errors


def test_a_right_program_prints_and_returns_and_may_write_files_and_make_its_own_group():
    assert run_program("print('hi', rank)\n" + MEAN, TEST, 3) == [
        (f"hi {rank}\n", [1.0], None) for rank in range(3)
    ]
    program = (
        "from pathlib import Path\ndist.init_process_group('gloo')\nPath(str(rank)).touch()\ndist.barrier()"
    )
    test = "import os\nsorted(os.listdir()), os.environ['LOCAL_RANK']"
    results = run_program(program, test, 3, group=False, files={"data": b"x"}, per_node=2)
    assert [value for _, value, _ in results] == [(["0", "1", "2", "data"], local) for local in "010"]
    assert not Path("data").exists()


def test_the_place_is_found_whatever_thread_was_interrupted():
    report = (
        'Current thread 0x00007f (most recent call first):\n  File "/lib/zmq/garbage.py", line 46 in run\n\n'
        'Thread 0x00007e (most recent call first):\n  File "/lib/torch/nn/module.py", line 1 in _call_impl\n'
        '  File "<ranks cell 2>", line 2 in <module>\n'
    )
    assert place_in_program(report, "<ranks cell 2>", "\nloss = model(x)") == "is still in model, line 2"
    assert place_in_program(report, "<ranks cell 3>", "\nloss = model(x)") == "still runs"
