"""Record what a GPU can show in 16 minutes: tests, the scripts to take home, throughput; with several, speed-ups.

    python tests/gpu/record.py --out FOLDER/record.json                make gpu-record does this
    python tests/gpu/record.py --out FOLDER/record.json --missing      in 8 minutes what no such GPU has passed yet
    python tests/gpu/record.py --out FOLDER/record.json --on cpu       in small, to test this program

Each part is a process with a time limit of its own, so that a CUDA error in one spoils no other. The record is written
anew whenever a part has something to say, so that a cut loses nothing; FOLDER/record-parts has what each part printed.
Tests that ran just before by ``pytest tests/gpu --junitxml=FOLDER/gpu.xml`` are taken over instead of running again.

A new part is one more line in `list_parts`; its program appends a row of JSON to the file {rows} as soon as it has one,
or leaves ``summary.json`` with its rows in a folder that is called like the part.
"""

import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from mpdemo.options import Parser
from mpdemo.tools.plan.gpus import named
from mpdemo.world.devices import ON_THE_CPU, gpus_here, processor
from mpdemo.world.family import adopt_orphans, end_children
from mpdemo.world.processes import be_killed_with_parent, child_environment, clean_up_on_signals

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 960  # for all parts together
SECONDS_MORE = 600  # for what two GPUs add
STRATEGIES = "data_parallel", "ddp", "fsdp", "model_parallel", "pipeline"  # which are timed on two GPUs
SCRIPTS = {  # to take home, which two GPUs run as well -> their options: each has a checkpoint of its own
    "first_ddp": [],
    "train_ddp": ["two_ddp"],
    "train_fsdp": ["--checkpoint", "two_fsdp"],
    "train_gpt": ["--tp", "2", "--checkpoint", "two_gpt"],
}
PATIENCE = 3  # on a CPU the limits are so many times as long: its cores may be shared
LEAST = 5  # seconds: with less left, no part is started
LINES = 40  # of what a part printed, in the record
ROOMY = 60_000  # MiB of a GPU, on which several tests fit at once
SMI = "nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap --format=csv,noheader,nounits"
# the line that conftest.py writes after the rows of a run that was not cut
END_OF_TESTS = '{"finished": true}\n'
KILLED = "test_gpu_killed.py"  # these tests are a part of their own
SMALL_TESTS = ["-k", "each_rank_says or [4"]  # one that runs, and one that needs four GPUs


class Part(NamedTuple):
    """What it is called in the record, the seconds that it may take, and the arguments of Python."""

    name: str
    limit: float
    arguments: list[str]
    folder: Path = ROOT


def list_parts(on_cpu, files, at_once, gpus=2) -> list[Part]:
    """What is recorded with so many GPUs, the most valuable first."""
    many = min(gpus, 2)  # twice as many tests, in worlds of two to four processes
    pytest, here = (
        ["-m", "pytest", "-q", "-n", str(at_once), "--timeout", str(120 * many)],
        ROOT / "tests/gpu",
    )
    tests = [str(here), f"--ignore={here / KILLED}", *(SMALL_TESTS if on_cpu else [])]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    parts = [
        Part("tests", 200 * many, [*pytest, *tests, f"--junitxml={files / 'tests.xml'}"]),
        Part("memory", 100, [str(here / "memory_of_one.py"), "{rows}"]),
        Part("train_single", 40, ["train_single.py"], files / "scripts"),
        Part("train_ddp", 40, [*torchrun, "train_ddp.py"], files / "scripts"),
        Part("train_fsdp", 80, [*torchrun, "train_fsdp.py"], files / "scripts"),
        Part("gpt", 120, [str(here / "throughput.py"), "gpt", "{rows}"]),
        Part("resnet", 170, [str(here / "throughput.py"), "resnet", "{rows}"]),
        Part("efficiency", 90, [str(here / "efficiency.py"), "{rows}"]),
        Part("traces", 100, [str(here / "trace.py"), "steps", "{rows}"]),
        Part("data_parallel", 30, [str(here / "data_parallel.py"), "{rows}"]),
        Part("train_gpt", 60, [*torchrun, "train_gpt.py"], files / "scripts"),
        Part("experts", 40, [*torchrun, "experts.py"], files / "scripts"),
        Part("player", 50, [str(here / "trace.py"), "player", "{rows}"]),
        Part("killed", 110, [*pytest, "-rP", str(here / KILLED), f"--junitxml={files / 'killed.xml'}"]),
        Part(
            "predicted",
            60,
            [str(here / "predicted.py"), "{rows}", f"{files}/gpt.jsonl", f"{files}/resnet.jsonl"],
        ),
    ]
    if gpus > 1:
        two, rounds = [*torchrun[:-1], "2"], ["2"] if on_cpu else []
        for name, options in SCRIPTS.items():
            parts.append(Part(f"two_{name}", 120, [*two, f"{name}.py", *options], files / "scripts"))
        for name in STRATEGIES:
            lab = ["-m", "mpdemo.labs.speed", str(files / f"two_{name}"), name, *rounds]
            parts.append(Part(f"two_{name}", 60, [*two, *lab]))
    return parts


def describe(on_cpu) -> dict:
    """Return what is measured. CUDA is left alone: this process keeps no context on the GPU."""
    import torch  # here, since a mistake in the command line should not wait for it

    facts = {"device": "one CPU core", "processor": processor(), "cores": len(os.sched_getaffinity(0))}
    if not on_cpu:
        lines = subprocess.run(SMI.split(), capture_output=True, text=True, timeout=60).stdout.splitlines()
        names = ("device", "memory_mib", "driver", "compute_capability")
        # whatever an old driver knows
        facts |= dict(zip(names, "".join(lines[:1]).split(", "), strict=False))
    facts |= {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    return facts | {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d %H:%M:%S")}


def commit() -> str | None:
    """Return the commit that is checked out, marked where files differ from it; None where no git knows."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return (
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20).stdout.strip()
            or None
        )
    return None


def passed_before(device) -> set:
    """Return the names of the parts that have passed in a committed record of the same kind of GPU."""
    records = [json.loads(file.read_text()) for file in (ROOT / "notebooks/gpu").glob("*.json")]
    same = [r for r in records if (named(r["device"]) or r["device"]) == (named(device) or device)]
    return {part["part"] for record in same for part in record["parts"] if part["outcome"] == "passed"}


def environment(on_cpu) -> dict:
    """Return the environment of the parts, which import this checkout; `on_cpu` they see no GPU."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = child_environment() | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    return environ | ({"GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1"} | ON_THE_CPU if on_cpu else {})


def files_of(out) -> Path:
    """Return the folder of what the parts print and write, beside their record."""
    return out.with_name(f"{out.stem}-parts")


class Record:
    """The record of some parts in a file, which always is complete JSON."""

    def __init__(self, out, facts, parts):
        self.out, self.files, self.begin = out, files_of(out), time.monotonic()
        self.files.mkdir(parents=True, exist_ok=True)
        self.parts = {
            part.name: {"part": part.name, "outcome": "not started", "limit": part.limit} for part in parts
        }
        self.content = facts | {"seconds": 0, "finished": False, "parts": list(self.parts.values())}
        self.save()

    def save(self):
        """Write the file anew, in one move."""
        self.content["seconds"] = round(time.monotonic() - self.begin, 1)
        new = self.out.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(new, self.out)

    def run(self, part, seconds, environ):
        """Run a part for at most so many seconds; note its rows as they come, how it ended, and its last lines."""
        entry, log, rows = (
            self.parts[part.name],
            *(self.files / f"{part.name}.{end}" for end in ("log", "jsonl")),
        )
        begin, status = time.monotonic(), None
        entry["outcome"] = "running"
        command = [sys.executable, *(word.replace("{rows}", str(rows)) for word in part.arguments)]
        try:
            with log.open("wb") as output:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
                process = subprocess.Popen(
                    command, cwd=part.folder, env=environ, preexec_fn=be_killed_with_parent, **streams
                )
            while (status := process.poll()) is None and time.monotonic() < begin + seconds:
                self.note(entry, begin, rows)
                time.sleep(0.2)
            entry["outcome"] = "timed out" if status is None else "failed" if status else "passed"
        except BaseException:  # Ctrl-C, or the signal by which a batch system or timeout ends this program
            entry["outcome"] = "interrupted"
            raise
        finally:
            end_children()
            entry |= {
                "exit_status": status,
                "output": log.read_text(errors="replace").splitlines()[-LINES:],
            }
            self.note(entry, begin, rows)

    def note(self, entry, begin, rows):
        """Take over the rows that are complete, and save."""
        entry["seconds"] = round(time.monotonic() - begin, 1)
        summary = rows.with_suffix("") / "summary.json"
        entry["rows"] = json.loads(summary.read_text())["rows"] if summary.exists() else read_rows(rows)
        self.save()


def read_rows(file) -> list:
    """Return the rows of a part's file; the last line may still be being written."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and line != END_OF_TESTS]


def append(rows, path):
    """Append rows to a file, a line of JSON each."""
    with open(path, "a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def record(parts, out, facts, environ, seconds=SECONDS, before=None) -> bool:
    """Run the parts one after the other and write the record to `out`; return whether all passed.

    `before` is a file with the rows of a part "tests" that ran before.
    """
    adopt_orphans()
    clean_up_on_signals()
    written = Record(out, facts, parts)
    for part in parts:
        entry, left = written.parts[part.name], seconds - (time.monotonic() - written.begin)
        if part.name == "tests" and before and before.exists():
            outcome = "passed" if END_OF_TESTS in before.read_text() else "cut"
            entry |= {"outcome": outcome, "taken_from": before.name, "rows": read_rows(before)}
        elif left < LEAST:
            entry["outcome"] = "no time left"
        else:
            written.run(part, min(part.limit, left), environ)
        if outcomes := {row["outcome"] for row in entry.get("rows", []) if "outcome" in row}:  # of tests
            entry["outcome"] = (
                "failed" if "failed" in outcomes or "passed" not in outcomes else entry["outcome"]
            )
        print(f"{part.name}: {entry['outcome']}, {entry.get('seconds', 0):.0f} s", flush=True)
    written.content["finished"] = True
    written.save()
    return all(entry["outcome"] == "passed" for entry in written.parts.values())


def read_arguments(arguments):
    """Read the command line."""
    parser = Parser(prog="record.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="the record, a JSON file; must not exist yet"
    )
    parser.add_argument(
        "--on", choices=["gpu", "cpu"], default="gpu", help="cpu: all in small, to test this program"
    )
    names = [part.name for part in list_parts(False, Path(), 0)]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names)
    )
    parser.add_argument(
        "--missing", action="store_true", help="only what such a GPU has passed in no committed record"
    )
    for_all = f"for all parts together ({SECONDS}, and {SECONDS_MORE} more with several GPUs)"
    parser.add_argument("--seconds", type=float, help=for_all)
    parser.add_argument("--commit", help="of this copy of the project, where git does not know it")
    given = parser.parse_args(arguments)
    if given.on == "gpu" and not gpus_here():
        parser.error(
            "--on gpu: nvidia-smi names no GPU here; --on cpu runs everything in small on a CPU core"
        )
    for path in (given.out, files_of(given.out)):
        if path.exists():
            parser.error(f"--out {given.out}: {path} exists; name a new file, or remove what is there")
    return given


def main():
    given = read_arguments(sys.argv[1:])
    on_cpu, out = given.on == "cpu", given.out.absolute()
    files, facts = files_of(out), describe(on_cpu)
    # which write their checkpoints beside them
    shutil.copytree(ROOT / "notebooks" / "scripts", files / "scripts")
    memory = facts.get("memory_mib", "")
    at_once = 4 if memory.isdigit() and int(memory) > ROOMY and facts["cores"] >= 8 else 0
    gpus = 2 if on_cpu else gpus_here()
    names = set(given.only) - (passed_before(facts["device"]) if given.missing else set())
    parts = [part for part in list_parts(on_cpu, files, at_once, gpus) if part.name in names]
    seconds = given.seconds or SECONDS + SECONDS_MORE * (gpus > 1)
    if on_cpu:
        parts = [part._replace(limit=PATIENCE * part.limit) for part in parts]
    facts |= {"commit": given.commit or commit(), "command": shlex.join(sys.argv)}
    try:
        passed = record(parts, out, facts, environment(on_cpu), seconds, out.with_name("gpu.jsonl"))
        sys.exit(not passed)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        print(
            f"the record: {given.out}; to send it: cp {given.out} notebooks/gpu/DATE-GPU.json (notebooks/gpu/README.md)"
        )


if __name__ == "__main__":
    main()
