"""Each known failure is found in its real message: caused here where that is cheap, else in a saved line."""

import os
import re
import subprocess
import sys

import pytest

from mpdemo import __main__ as command_line
from mpdemo.errors import UserError
from mpdemo.jobs import explain, slurm
from mpdemo.jobs.explain import said_by
from mpdemo.notebook.tables import failure_table
from mpdemo.paths import root
from mpdemo.schedules import check_schedule

# What tests/programs/known_failures.py causes: the first words of each known failure.
CAUSED = {
    "EADDRINUSE",
    "Timed out after ... seconds waiting for clients.",
    "environment variable ... expected, but not set",
    "Default process group has not been initialized",
    "unrecognized arguments: --local-rank",
    "Detected mismatch between collectives on ranks",
    "failed to pass monitoredBarrier",
    "Timed out waiting ... for recv operation",
    "Expected to have finished reduction in the prior iteration",
    "device_ids and output_device arguments only work with",
    "SyncBatchNorm layers only work with GPU modules",
    "must be greater than or equal to the number of stages",
    "arg_mbs but got",
    "Weights only load failed",
    "PytorchStreamReader failed reading zip archive",
    'Unexpected key(s) in state_dict: "module.',
}
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
# Real lines of other runs: of notebook 10, of a cluster, of GPUs (the last from PyTorch's and nccl's source).
SAVED = {
    "Can't get attribute": ["AttributeError: Can't get attribute 'train' on <module '__main__' (built-in)>"],
    "An attempt has been made": ["        An attempt has been made to start a new process before the"],
    "Cannot re-initialize": [
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use"
    ],
    "EADDRINUSE": ["mpdemo: error: port 29500 on 127.0.0.1 is in use; set MASTER_PORT to another one"],
    "The client socket has timed out": [
        "[E1121 19:22:28.239573719 socket.cpp:1028] [c10d] The client socket has timed out after 3000ms while "
        "trying to connect to (127.0.0.1, 38319)."
    ],
    "has no GPU of its own": ["1: mpdemo: error: local rank 1 has no GPU of its own: 2 processes on this node, 1 GPUs"],
    "operator torchvision": ["RuntimeError: operator torchvision::nms does not exist"],
    "No module named": ["ModuleNotFoundError: No module named 'torch'"],
    "Received data size": [
        f"  what():  [enforce fail at {GLOO[1:]}pair.cc:464] op.preamble.length <= op.nbytes. 8 vs 4. Received "
        "data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
        "RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (5), got (4))",
    ],
    "Watchdog caught": ["[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)"],
    "appears not to match": [
        "RuntimeError: [1]: params[0] in this process with sizes [2, 2] appears not to match sizes of the same param "
        "in process 0."
    ],
    "terminate called": ["terminate called without an active exception"],
    "No space left": ["OSError: [Errno 28] No space left on device"],
    "CUDA out of memory": [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
    "oom_kill": [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
        "srun: error: n1: task 1: Out Of Memory",
    ],
    "DUE TO TIME LIMIT": ["slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:22:28 DUE TO TIME LIMIT ***"],
    "DUE TO NODE FAILURE": [
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:22:28 DUE TO NODE FAILURE ***"
    ],
    "Connection closed by peer": [
        f"[rank0]: RuntimeError: {GLOO}pair.cc:561] Connection closed by peer [127.0.0.1]:8840. This is typically",
        f"RuntimeError: {GLOO}pair.cc:545] Read error [127.0.0.1]:35254: Connection reset by peer. This is typically",
    ],
    "ProcessExitedException": [
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 1"
    ],
}
SAVED |= {
    "setup line failed": ["setup line failed with exit status 1: module load nowhere"],
    "execve()": [
        "slurmstepd: error: execve(): no-such-python: No such file or directory",
        "0: bash: line 1: exec: no-such-python: not found",
    ],
}
SAVED_LINES = [(words, line) for words, lines in SAVED.items() for line in lines]
FROM_A_LAUNCHER = """\
[rank0]:   File "train.py", line 4, in <module>
[rank0]:     raise ValueError("Default process group has not been initialized")
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:8840.
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     raise ValueError("the digits are upside down")
[rank1]: ValueError: the digits are upside down
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
E1121 19:27:41.122000 17456 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
"""


def words_of(findings):
    return {finding.known.seen[0] for finding in findings}


def loud():
    return [known for known in explain.known_failures() if known.kind != "silent"]


@pytest.fixture(scope="module")
def caused(tmp_path_factory):
    """The log of a program that causes many failures."""
    words = [sys.executable, "tests/programs/known_failures.py", str(tmp_path_factory.mktemp("failures"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root())}
    kept = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, cwd=root(), env=kept, text=True, timeout=240, **both)
    assert "did not fail" not in done.stdout, done.stdout
    return done.stdout


def test_failures_that_are_caused_here_are_found(caused):
    findings = explain.find(caused)
    assert words_of(findings) >= CAUSED, CAUSED - words_of(findings)
    kinds = [finding.known.kind for finding in findings]
    assert kinds == sorted(kinds, key=explain.KINDS.index)


@pytest.mark.parametrize(("words", "line"), SAVED_LINES, ids=str)
def test_a_saved_line_is_found(words, line):
    (finding,) = explain.find(f"loss 0.3\n{line}\nthe end\n")
    assert finding.known.seen[0].startswith(words)
    assert (finding.number, finding.count) == (2, 1)
    what = finding.known.what.partition("...")[0]
    assert what in explain.report(line) and finding.known.do in explain.report(line)


def test_every_known_failure_is_tried_and_its_notebook_is_there():
    tried = {known.seen[0] for known in loud() if known.seen[0] in CAUSED or known.seen[0].startswith(tuple(SAVED))}
    assert {known.seen[0] for known in loud() if known.by != "slurm"} == tried
    for known in explain.known_failures():
        assert (root() / f"notebooks/{known.notebook}.ipynb").exists() and known.kind in explain.KINDS


def test_the_table_of_the_notebook_has_a_row_for_each():
    lines = failure_table().data["text/markdown"].splitlines()
    assert len(lines) == 2 + len(explain.known_failures())
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {5}
    silent = failure_table("silent").data["text/markdown"].splitlines()[2:]
    assert silent and not set(silent) - set(lines)


@pytest.mark.parametrize("known", said_by("slurm"), ids=lambda known: known.seen[0])
def test_a_refusal_of_slurm_is_found_and_explained_at_once(known):
    said = f"sbatch: error: Batch job submission failed: {known.seen[0]}"
    (finding,) = explain.find(said)
    assert finding.known is known
    assert slurm.explain("sbatch", said).endswith(f"Likely cause: {known.what}; {known.do}")


@pytest.mark.parametrize("numbers", [{"microbatches": 1, "batch": 8}, {"microbatches": 3, "batch": 8}], ids=str)
def test_refusals_of_the_package_are_known(numbers):
    with pytest.raises(UserError) as refusal:
        check_schedule("1F1B", ranks=2, **numbers)
    (finding,) = explain.find(f"mpdemo: error: {refusal.value}")
    assert finding.known.notebook in ("05_pipeline", "10_when_it_breaks")


def test_the_first_real_cause_comes_first():
    lost, waited = (
        "RuntimeError: Connection closed by peer",
        "RuntimeError: Timed out waiting 5000ms for recv operation",
    )
    own = "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
    findings = explain.find("\n".join([lost, waited, own, own, "UnpicklingError: Weights only load failed."]))
    assert [(finding.number, finding.count) for finding in findings] == [(3, 2), (5, 1), (2, 1), (1, 1)]
    assert findings[0].message == "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_an_unknown_cause_is_shown_before_what_follows_from_it():
    said = explain.report(FROM_A_LAUNCHER)
    assert said.startswith(
        "No known cause in this log. The last line that looks like an error:\nline 7: [rank1]: Value"
    )
    assert said.index("line 3: ") > said.index("What follows from it:")
    assert "line 2" not in said  # code that a traceback quotes


def test_a_log_without_a_known_failure():
    assert explain.report("all is well\n") == "No known cause in this log. No line looks like an error."
    said = explain.report("srun: error: n1: task 0: Segmentation fault\nbye\n")
    assert said.endswith("error:\nline 1: srun: error: n1: task 0: Segmentation fault")


def test_a_line_is_shown_safely_and_short():
    said = explain.report("\x1b[31mCUDA out of memory\x1b[0m \x07" + "x" * 9999 + "\n")
    assert "\x1b" not in said and "\x07" not in said and len(said.splitlines()[0]) < 300
    (finding,) = explain.find("10%|##  |\r90%|### |\rRuntimeError: CUDA out of memory.\r\n")
    assert finding.line == "RuntimeError: CUDA out of memory."


def run(*words):
    return command_line.main(["explain", *map(str, words)])


def test_the_command_reads_the_end_of_a_huge_file(tmp_path, capsys, monkeypatch):
    log = tmp_path / "log with spaces.txt"
    log.write_bytes(b"Weights only load failed\n" + b"\xff loss 0.3\n" * 100 + b"port 29500 on n1 is in use\n")
    assert run(log) == 0
    assert "line 1: Weights" in capsys.readouterr().out
    monkeypatch.setattr(explain, "MOST_BYTES", 300)
    assert run(log) == 0
    said = capsys.readouterr().out
    assert said.startswith("Only its last") and "in use" in said and "Weights" not in said


def test_what_is_no_log_is_refused_in_one_line(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04\0\0")
    for name in ("missing", "", "pipe", "model.pt", "a\0b", "x" * 5000):
        assert run(f"{tmp_path}/{name}") == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
