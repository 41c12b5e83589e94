"""Each known failure is found in its real message, and each log of a table is explained as a support desk would."""

import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from project import python_path

from mpdemo.errors import UserError
from mpdemo.paths import root
from mpdemo.settings.schedules import check_schedule
from mpdemo.tools.explain import asked, looks, reading
from mpdemo.tools.explain import findings as explain
from mpdemo.tools.explain.known import KINDS, REASONS, known_failures, known_in

LOGS = Path(__file__).parent / "logs"
# What is expected of each log: the file NAME.txt, or lines from public bug reports (more.json names them).
TABLE = json.loads((LOGS / "expected.json").read_text())
MORE = json.loads((LOGS / "more.json").read_text())
ALL = {name: "\n".join(log["log"]) for name, log in MORE.items()}
ALL |= {name: (LOGS / f"{name}.txt").read_text() for name in TABLE}
HEALTHY = [name for name, wanted in (TABLE | MORE).items() if wanted.get("healthy")]
MESSAGES = tomllib.loads((LOGS / "messages.toml").read_text())  # by their source
QUOTED = [  # on the page of the scripts to take home; programs/known_failures.py provokes them
    "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    "environment variable RANK expected, but not set",
    "EADDRINUSE",
    "1/2 clients joined",
    "device_ids and output_device arguments only work with single-device/multiple-device GPU modules",
    "sampler option is mutually exclusive with shuffle",
    'Missing key(s) in state_dict: "weight", "bias". Unexpected key(s) in state_dict: "module.weight", "module.bias".',
    "Expected to have finished reduction in the prior iteration before starting a new one",
    "PytorchStreamReader failed reading zip archive: failed finding central directory",
]


@pytest.mark.nightly
def test_failures_that_are_caused_here_are_known_and_quoted_as_they_are(run_once, tmp_path, monkeypatch):
    """The messages of the PyTorch that is installed, from a program that causes many failures."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    done = run_once(
        "tests/programs/known_failures.py", tmp_path, timeout=240, PYTHONPATH=python_path(root())
    )
    said, page = done.stdout + done.stderr, (root() / "notebooks/scripts/nine_steps.md").read_text()
    findings = explain.find(said)
    assert "did not fail" not in said and len(findings) >= 15, said
    assert [finding.line for finding in findings if not finding.known.seen] == []
    for text in (said, page):
        assert [quoted for quoted in QUOTED if quoted not in " ".join(text.split())] == []
    assert len(re.findall(r"(?m)^\d\. \*\*", page)) == 9


@pytest.mark.parametrize("name", [*TABLE, *MORE])
def test_a_log_is_explained_as_a_support_desk_would(name):
    """The first shown line is the first cause, and the remedy speaks of the right thing; or the run ended well."""
    wanted = (TABLE | MORE)[name]
    text = ALL[name] if name in MORE else (LOGS / f"{name}.txt").read_bytes()
    said = explain.report(text)
    if name in HEALTHY:
        assert "ended well" in said and "what to do" not in said, said
        return
    first = next(line for line in said.splitlines() if line.startswith("line "))
    remedy = next(line for line in said.splitlines() if "what to do: " in line)
    assert re.search(wanted["first"], first) and re.search(wanted["remedy"], remedy), said
    assert wanted.get("where", "") in said and re.search(wanted.get("what", ""), said)
    assert explain.verdict(explain.find(text), "failed")[0] in wanted.get("verdict", "fix retry")


def test_each_row_of_the_table_is_found_in_a_real_message():
    """In a line of the logs above, or in a message of messages.toml: none stands behind a row that takes it first."""
    lines = [*sum(MESSAGES.values(), []), *"\n".join(ALL.values()).splitlines()]
    found = {known_in(line, by) for line in lines for by in ("", "slurm")}
    assert [known.seen for known in known_failures() if known not in found] == []
    for known in known_failures():
        assert known.kind in KINDS and known.what and known.do
        assert not known.page or (root() / known.page).exists()


def test_no_message_of_the_table_stands_behind_another_row():
    reasons = {name.split()[0]: f" {texts.partition('|')[0]}" for name, texts in REASONS.items()} | {
        "-": ""
    }
    for known in known_failures():
        for words in known.seen:
            line = (
                re.sub(r"^\^|\$$", "", words).replace("...", "x") + reasons[(known.errno or "-").split()[0]]
            )
            assert known_in(line, known.by) == known, line


def riffled(text, choose) -> str:
    """Return a log in which lines of different ranks have changed places, as they do within a moment."""
    log, lines = reading.Log(text), text.split("\n")
    labels = [log.split(number)[0] for number in range(len(lines))]
    for first in range(0, len(lines) - 1, 2):
        ranks = {*labels[first : first + 2]}
        if len(ranks) == 2 and "" not in ranks and choose.random() < 0.5:
            for some in (lines, labels):
                some[first : first + 2] = reversed(some[first : first + 2])
    return "\n".join(lines)


def in_json(number, line):
    return json.dumps(
        {"log": f"{line}\n", "stream": "stderr", "time": f"2026-11-28T10:00:{number % 60:02}.5Z"}
    )


TIME = "2026-11-28 10:00:{:02}"  # of line number ...
LABELS = {  # of launchers, containers and loggers: what a line becomes
    "srun --label": lambda _, line: f"3: {line}",
    "torchrun": lambda _, line: f"[rank3]: {line}",
    "mpirun": lambda _, line: f"[1,3]<stderr>:{line}",
    "docker compose": lambda _, line: f"worker-1  | {line}",
    "kubectl --prefix": lambda _, line: f"[pod/train-0/pytorch] {line}",
    "a Ray actor": lambda _, line: f"(TrainWorker pid=4001, ip=10.0.0.1) {line}",
    "pdsh": lambda _, line: f"node07: {line}",
    "Windows": lambda _, line: f"{line}\r",
    "time": lambda number, line: f"{TIME.format(number % 60)} {line}",
    "a logger": lambda number, line: f"{TIME.format(number % 60)},123 - launcher - INFO - {line}",
    "colours": lambda _, line: f"\x1b[33m{line}\x1b[0m",
    "a progress bar": lambda number, line: line and f"{number % 9}0%|##   | {number}/90\r{line}",
    "JSON": in_json,
    "JSON of a logger": lambda number, line: json.dumps({"ts": number, "level": "INFO", "message": line}),
}
EVERY = [pytest.param(0, 9, id="a ninth")] + [
    pytest.param(part, 9, id=f"ninth {part}", marks=pytest.mark.nightly) for part in range(1, 9)
]


@pytest.mark.parametrize(("part", "of"), EVERY)
def test_labels_before_each_line_change_no_answer(part, of):
    def answer(text) -> list:
        return [finding.as_dict() | {"text": "", "kind": ""} for finding in explain.find(text)[:1]]

    def row(text) -> list:
        return [finding.known.seen for finding in explain.find(text)[:1]]

    for name, text in list(ALL.items())[part::of]:
        lines, wanted = text.split("\n"), answer(text)
        for style, labelled in LABELS.items():
            assert answer("\n".join(itertools.starmap(labelled, enumerate(lines)))) == wanted, (name, style)
        riff = riffled(text, random.Random(part)) if len(lines) > 6 else text
        assert row(riff) == row(re.sub(f"(?m)^{looks.TIME}", "", text)) == row(text), name


FOREIGN = """Traceback (most recent call last):
  File "main.py", line 41, in <module>
    main()
  File "main.py", line 17, in main
    rows = table["zebra"]
KeyError: 'zebra'"""


def shows_none(head, healthy) -> bool:
    """Whether the beginning of a log shows no failure, nor is about to: the exception that follows is the first."""
    last, said = head.rstrip().rpartition("\n")[2], explain.find(head)
    if looks.TRACEBACK in last or any(
        begun.search(last) for begun in (looks.IGNORED, looks.THREAD, looks.CHAIN)
    ):
        return False
    return not any(
        found.place or found.known.kind == "node" or "CANCELLED AT" in found.line or not healthy
        for found in said
    )


@pytest.mark.parametrize(("part", "of"), EVERY)
def test_an_exception_that_ends_a_rank_outranks_what_merely_looks_bad(part, of):
    """Whatever a healthy run, or a failing one before its failure, has written: who died first is named first."""
    choose, wrong = random.Random(part), []
    for name, text in list(ALL.items())[part::of]:
        lines = text.split("\n")
        for number in choose.sample(range(1, len(lines) + 1), min(9, len(lines))):
            label, head = choose.choice(["", "[rank3]: ", "3: "]), "\n".join(lines[:number])
            if shows_none(head, name in HEALTHY):
                found = explain.find("\n".join([head, *(label + line for line in FOREIGN.split("\n"))]))
                if not found or "zebra" not in found[0].line:
                    wrong.append((name, number, label, found and found[0].line))
    assert wrong == []


def test_a_log_that_ends_with_an_exception_did_not_end_well():
    """Not even with one that says only that another process failed, whatever a healthy run has written before."""
    last = FOREIGN.replace(
        "KeyError: 'zebra'", "ProcessExitedException: process 6 terminated with exit code 17"
    )
    assert [name for name in HEALTHY if not explain.find(f"{ALL[name]}\n{last}")] == []


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("torch.OutOfMemoryError: x", "OutOfMemoryError"),
        ("MemoryError", "MemoryError"),
        ("pkg.MyMemoryErrorHandler: x", ""),
        ("exits with return code = 1", "exits with return code = ..."),
        ("exits with return code = 137", "(SIGKILL)"),
        ("Process 4 got signal: 15", "got signal: 15"),
    ],
)
def test_messages_match_as_whole_words(line, seen):
    known = known_in(line)
    assert seen in known.seen if seen else known is None


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("NCCL WARN Call to shm_open failed : Permission denied", "ls -ld /dev/shm"),
        ("NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes", "--shm-size"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/a'", "--shm-size"),
        ("PermissionError: [Errno 13] Permission denied: '/scratch/.triton/cache/b'", "owner"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/scratch/.triton/cache/b'", "its own"),
        (
            "slurmstepd: error: pyxis: tar: /raid/a: Ne peut open: Permission non accordée",
            "ENROOT_CACHE_PATH",
        ),
        ("OSError: [Errno 30] Read-only file system: '/opt/cache/.triton/cache/b'", "--writable-tmpfs"),
        ("OSError: [Errno 24] inotify instance limit reached", "max_user_watches"),
        ("OSError: [Errno 27] File too large", "ulimit -a"),
        ("Failed to initialize NVML: Driver/library version mismatch", "restart the driver"),
        ("bash: ./a.sh: /bin/bash: bad interpreter: Permission denied", "noexec"),
        (
            "cp: 'a' kann nicht angelegt werden: Auf dem Gerät ist kein Speicherplatz mehr verfügbar",
            "quota",
        ),
    ],
)
def test_a_reason_outranks_a_path_or_a_call_in_any_language(line, remedy):
    assert remedy in known_in(line).do


@pytest.mark.parametrize(
    ("text", "reports"),
    [
        ("RuntimeError: Command failed with return code 1", True),
        ("Exception: process 3 terminated with exit code 1", True),
        ("TuneError: 2 trials failed", True),
        ("RuntimeError: worker failed: no such label", False),
        ("RuntimeError: the workers failed to agree on a shape", False),
    ],
)
def test_an_exception_that_only_reports_a_failure_is_no_cause(text, reports):
    own = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n'
    findings = explain.find(f"step 1\nerror: the zebra is lost\n{own}{text}\n")
    assert ("zebra" in findings[0].line) is reports


@pytest.mark.parametrize(
    "numbers", [{"microbatches": 1, "batch": 8}, {"microbatches": 3, "batch": 8}], ids=str
)
def test_refusals_of_the_package_are_known(numbers):
    with pytest.raises(UserError) as refusal:
        check_schedule("1F1B", ranks=2, **numbers)
    (finding,) = explain.find(f"mpdemo: error: {refusal.value}")
    assert finding.known.notebook == "31_microbatches"


FOUND = {  # what a log shows: what is found in it, in order; and the log
    "an exception, then a line of an error, then a warning; no mere mention of a path": (
        "9 cause, 3 error, 2 warning",
        "Using ~/.cache/torch_extensions/py310 as PyTorch extensions root\n"
        "WARNING: cannot write to ~/.triton/cache/x\n"
        f"ERROR: Weights only load failed\n{FOREIGN}",
    ),
    "the first real cause, and no progress where a checkpoint was not saved": (
        "3 cause twice, 5 cause, 2 waiting, 1 consequence",
        "RuntimeError: Connection closed by peer\n"
        "RuntimeError: Timed out waiting 5000ms for recv operation\n"
        "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "RuntimeError: PytorchStreamReader failed reading zip archive: the checkpoint was not saved properly",
    ),
    "what other ranks and a launcher write at once after an error is no part of its message": (
        "1 error, 3 consequence",
        "ValueError: the digits are upside down\nrank 0 of 2\nmpdemo: rank 1 of 2 ended with exit status 7",
    ),
    "the earlier time first": (
        "2 warning, 1 warning",
        "2026-11-29 10:00:07 Weights only load failed\n2026-11-29 10:00:05 CUDA out of memory",
    ),
    "a line with a time is no part of a message without one": (
        "6 cause, 7 warning",
        f"{FOREIGN}\n2026-05-01 10:00:00 cleaning up /tmp/x: No space left on device",
    ),
    "no frames of C++, which PyTorch prints where another rank has closed its socket": (
        "24 warning",
        "[rank1]: frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f in /venv/libc10.so)\n"
        "#5 c10::Error::Error(c10::SourceLocation, std::string) from ??:0\n"
        + "x\n" * 21
        + "CUDA out of memory",
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_is_found_in_a_log_and_in_which_order(what):
    found, log = FOUND[what]
    said = [f"{one.number} {one.known.kind}{' twice' * (one.count == 2)}" for one in explain.find(log)]
    assert ", ".join(said) == found


def test_a_line_is_shown_safely_and_short():
    said = explain.report("\x1b[31mCUDA out of memory\x1b[0m \x07" + "x" * 9999 + "\n")
    assert "\x1b" not in said and "\x07" not in said and len(said.splitlines()[0]) < 300
    (finding,) = explain.find("10%|##  |\r90%|### |\rRuntimeError: CUDA out of memory.\r\n")
    assert finding.line == "RuntimeError: CUDA out of memory."
    assert explain.report("") == explain.report("\n \n") and "empty" in explain.report("")
    assert "interrupted: Ctrl-C" in explain.report("[rank1]: KeyboardInterrupt\n")  # behind a label


STEPS = "".join(
    f"step {number} loss {1000 / (number + 1):.4f} images/s {800 + number % 17}\n"
    for number in range(10**6)
)
ODD = "".join(
    f"Error: no image {number:x}-{number**3:x}-{number**7:x}\n".translate({48: "o"})
    for number in range(700_000)
)


WORDS = ["".join(letters) for letters in itertools.product("aeiostrn", repeat=4)]
TEXTS = "".join(
    f"{WORDS[number % 4093]} {WORDS[number % 4091]} {WORDS[number % 4079]}\n" for number in range(10**6)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STEPS + "CUDA out of memory\n", "GPU|device"),
        (STEPS + "done\n", "ended well"),
        (ODD, "no image"),
        (TEXTS[:13_000_000] + "CUDA out of memory\n" + TEXTS, "GPU|device"),
        ("CUDA out of memory\n" + STEPS, "ended well"),
        ("KeyError: 'image'\n" + TEXTS + "srun: error: n1: task 0: Exited with exit code 1\n", "KeyError"),
    ],
    ids=[
        "a failure",
        "none",
        "every line a failure",
        "every line differs",
        "survived",
        "far before the end",
    ],
)
def test_forty_megabytes_take_seconds(text, said):
    """Of the processor; here 0.8 to 2.0, and minutes where an expression goes back and forth in each line."""
    begun = time.process_time()
    assert re.search(said, explain.report(text[-40_000_000:]))
    assert time.process_time() - begun < 10


def test_the_command_reads_the_end_of_a_huge_file(tmp_path, call_mpdemo, monkeypatch):
    log = tmp_path / "log with spaces.txt"
    log.write_bytes(
        b"Weights only load failed\n" + b"\xff loss 0.3\n" * 100 + b"port 29500 on n1 is in use\n"
    )
    monkeypatch.setattr(asked, "MOST_BYTES", 300)
    done = call_mpdemo("explain", log)
    assert done.returncode == 0 and done.stdout.startswith("Only its last")
    assert "in use" in done.stdout and "Weights" not in done.stdout


def test_the_command_reads_standard_input(call_mpdemo, monkeypatch):
    def piped(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return call_mpdemo("explain", "-")

    done = piped(b"step 1 loss 0.5\nRuntimeError: CUDA out of memory.\n")
    assert done.returncode == 0 and done.stdout.startswith("line 2: RuntimeError")
    assert "\nverdict: fix; " in done.stdout
    monkeypatch.setattr(asked, "MOST_BYTES", 300)
    assert piped(b"loss 0.3\n" * 100).stdout.startswith("Only its last")
    for data, words in ((b"", "is empty"), (b"PK\0", "is not text")):
        done = piped(data)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    """As in ``mpdemo explain LOG | head -1``."""
    (tmp_path / "log").write_text("CUDA out of memory\n")
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "mpdemo", "explain", str(tmp_path / "log")]
    done = subprocess.run(words, cwd=root(), stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert done.stderr == b""


@pytest.mark.parametrize(
    "data",
    [
        "step 1\nCUDA out of memory: é\n".encode("utf-16"),
        b"\0" * 700 + "\nCUDA out of memory: é\n".encode(),
    ],
    ids=["UTF-16 with a mark", "a block of NULs"],
)
def test_odd_text_is_read(tmp_path, call_mpdemo, data):
    """As PowerShell writes it, and as a node leaves it that crashed."""
    (tmp_path / "log").write_bytes(data)
    done = call_mpdemo("explain", tmp_path / "log")
    assert done.returncode == 0 and done.stdout.startswith("line 2: CUDA out of memory: é\n")
