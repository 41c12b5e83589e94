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
    text = "\n".join(wanted["log"]) if name in MORE else (LOGS / f"{name}.txt").read_bytes()
    said = explain.report(text)
    if wanted.get("healthy"):
        assert "ended well" in said and "what to do" not in said, said
        return
    first = next(line for line in said.splitlines() if line.startswith("line "))
    remedy = next(line for line in said.splitlines() if "what to do: " in line)
    assert re.search(wanted["first"], first) and re.search(wanted["remedy"], remedy), said
    assert wanted.get("where", "") in said and re.search(wanted.get("what", ""), said)
    assert explain.verdict(explain.find(text), "failed")[0] in wanted.get("verdict", "fix retry")


def test_each_row_of_the_table_is_found_in_a_real_message():
    """In a line of the logs above, or in a message of messages.toml: none stands behind a row that takes it first."""
    logs = ["\n".join(log["log"]) for log in MORE.values()] + [
        path.read_text() for path in LOGS.glob("*.txt")
    ]
    lines = [line for log in logs for line in log.splitlines()] + [
        line for some in MESSAGES.values() for line in some
    ]
    found = {known_in(line, by) for line in lines for by in ("", "slurm")}
    assert [known.seen for known in known_failures() if known not in found] == []
    for known in known_failures():
        assert known.kind in KINDS and known.what and known.do
        assert not known.page or (root() / known.page).exists()


def test_no_message_of_the_table_stands_behind_another_row():
    rows = [(known, words) for known in known_failures() for words in known.seen]
    reasons = {name.split()[0]: " " + texts.partition("|")[0] for name, texts in REASONS.items()} | {
        "-": ""
    }
    lines = [
        (
            known,
            re.sub(r"^\^|\$$", "", words).replace("...", "x") + reasons[(known.errno or "-").split()[0]],
        )
        for known, words in rows
    ]
    assert [line for known, line in lines if known_in(line, known.by) != known] == []


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
    texts = {name: "\n".join(wanted["log"]) for name, wanted in MORE.items()}
    texts |= {name: (LOGS / f"{name}.txt").read_text() for name in TABLE}
    for name in list(texts)[part::of]:
        wanted = [finding.as_dict() | {"text": "", "kind": ""} for finding in explain.find(texts[name])[:1]]
        for style, labelled in LABELS.items():
            text = "\n".join(itertools.starmap(labelled, enumerate(texts[name].split("\n"))))
            found = [finding.as_dict() | {"text": "", "kind": ""} for finding in explain.find(text)[:1]]
            assert found == wanted, f"{name}, {style}"
        wanted = [finding.known.seen for finding in explain.find(texts[name])[:1]]
        riff = riffled(texts[name], random.Random(part)) if texts[name].count("\n") > 5 else texts[name]
        others = [riff, re.sub(f"(?m)^{looks.TIME}", "", texts[name])]
        for what, text in zip(("riffled", "without times"), others, strict=True):
            assert [found.known.seen for found in explain.find(text)[:1]] == wanted, f"{name}, {what}"


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
    texts = {name: (LOGS / f"{name}.txt").read_text() for name in TABLE}
    texts |= {name: "\n".join(log["log"]) for name, log in MORE.items()}
    for name in list(texts)[part::of]:
        lines, healthy = texts[name].split("\n"), bool((TABLE | MORE)[name].get("healthy"))
        for number in choose.sample(range(1, len(lines) + 1), min(9, len(lines))):
            label, head = choose.choice(["", "[rank3]: ", "3: "]), "\n".join(lines[:number])
            if shows_none(head, healthy):
                found = explain.find("\n".join([head, *(label + line for line in FOREIGN.split("\n"))]))
                if not found or "zebra" not in found[0].line:
                    wrong.append((name, number, label, found and found[0].line))
    assert wrong == []


def test_a_log_that_ends_with_an_exception_did_not_end_well():
    """Not even with one that says only that another process failed, whatever a healthy run has written before."""
    last = FOREIGN.replace(
        "KeyError: 'zebra'", "ProcessExitedException: process 6 terminated with exit code 17"
    )
    texts = [(LOGS / f"{name}.txt").read_text() for name in TABLE if TABLE[name].get("healthy")]
    texts += ["\n".join(log["log"]) for log in MORE.values() if log.get("healthy")]
    assert [text for text in texts if not explain.find(f"{text}\n{last}")] == []


def test_the_order_of_evidence():
    """An exception, then a line of an error, then a warning, whichever comes first; what mentions a path is none."""
    mention = "Using ~/.cache/torch_extensions/py310 as PyTorch extensions root"
    warning = "WARNING: cannot write to ~/.triton/cache/x"
    error = "ERROR: Weights only load failed"
    found = explain.find("\n".join([mention, warning, error, *FOREIGN.split("\n")]))
    assert [(finding.number, finding.known.kind) for finding in found] == [
        (9, "cause"),
        (3, "error"),
        (2, "warning"),
    ]
    assert explain.find(mention) == []
    early, late = "2026-11-29 10:00:05 CUDA out of memory", "2026-11-29 10:00:07 Weights only load failed"
    assert [finding.line[-6:] for finding in explain.find(f"{late}\n{early}")] == ["memory", "failed"]


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


def test_the_first_real_cause_comes_first():
    lost, waited = (
        "RuntimeError: Connection closed by peer",
        "RuntimeError: Timed out waiting 5000ms for recv operation",
    )
    own = "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
    # no word of progress, although a checkpoint and "saved" are in it
    short = "RuntimeError: PytorchStreamReader failed reading zip archive: the checkpoint was not saved properly"
    findings = explain.find("\n".join([lost, waited, own, own, short]))
    assert [(finding.number, finding.count) for finding in findings] == [(3, 2), (5, 1), (2, 1), (1, 1)]


def test_a_launchers_report_is_no_part_of_an_errors_message():
    """Without a traceback, what other ranks write follows the error at once."""
    lines = [
        "ValueError: the digits are upside down",
        "rank 0 of 2",
        "mpdemo: rank 1 of 2 ended with exit status 7",
    ]
    findings = explain.find("\n".join(lines))
    assert [(finding.number, finding.line) for finding in findings] == [(1, lines[0]), (3, lines[2])]


def test_a_line_with_a_time_is_no_part_of_a_message_without_one():
    said = explain.find(f"{FOREIGN}\n2026-05-01 10:00:00 cleaning up /tmp/x: No space left on device")
    assert "zebra" in said[0].line


def test_a_frame_of_a_stack_of_cpp_is_no_error():
    """PyTorch prints such stacks where another rank has closed its socket; the cause may come much later."""
    frames = [
        "[rank1]: frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f in /venv/libc10.so)"
    ]
    # TORCH_SHOW_CPP_STACKTRACES=1
    frames += ["#5 c10::Error::Error(c10::SourceLocation, std::string) from ??:0"]
    assert [
        found.number for found in explain.find("\n".join([*frames, "x\n" * 20, "CUDA out of memory"]))
    ] == [24]


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
