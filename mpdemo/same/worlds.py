"""Starts the reader's script in worlds of processes, each in a folder of its own, and reads what the watcher noted."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from mpdemo.errors import UserError

IMPORT = 60.0  # seconds for `import torch`, also from a slow disk


class Rank:
    """What one rank did, by kind of note."""

    def __init__(self, folder, rank):
        file = folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        self.notes = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut
        self.steps = self.of("step")
        self.out, self.err = ((folder / f"{rank}.{name}").read_text(errors="replace") for name in ("out", "err"))

    def of(self, kind) -> list:
        """Return the notes of a kind."""
        return [note for note in self.notes if note["kind"] == kind]

    def names(self, kind) -> list:
        """Return the names in the notes of a kind."""
        return [note["name"] for note in self.of(kind)]

    def passes(self, loader) -> list:
        """Return the passes over the data of a loader."""
        return [note for note in self.of("pass") if note["loader"] == loader]

    def printed(self) -> list:
        """Return the losses that were printed, as (name, number, half of its last digit)."""
        lines = [line for line in self.out.splitlines() if "\r" not in line and "it/s" not in line]
        pattern = r"(?i)(\w*loss\w*)[\"']?\s*[:=]?\s*(?:tensor\()?([-+]?\d+\.(\d+)(?:e[-+]?\d+)?)"
        found = [match for line in lines for match in re.finditer(pattern, line)]
        return [(name, float(value), 0.6 * 10.0 ** -len(digits)) for name, value, digits in (m.groups() for m in found)]


class World:
    """What the ranks of a run did together."""

    def __init__(self, folder, order, answer):
        self.processes, self.how, self.cut, self.limit = (
            order["processes"],
            answer["how"],
            order["batches"],
            order["limit"],
        )
        self.folder, processes = Path(order["folder"]), order["processes"]
        self.statuses = {int(rank): status for rank, status in answer["statuses"].items()}
        self.ranks = [Rank(folder, rank) for rank in range(processes)]
        meshes = [tuple(rank.names("tensor")[0]) if rank.names("tensor") else (k,) for k, rank in enumerate(self.ranks)]
        self.replicas = [rank for k, rank in enumerate(self.ranks) if k == min(meshes[k])]  # ranks of a mesh share data
        self.steps = self.ranks[0].steps
        loaders = Counter(step["loader"] for step in self.steps if step["optimizer"] == 0)
        self.loader = loaders.most_common(1)[0][0] if loaders else None

    def names(self, kind) -> set:
        """Return the names in all ranks' notes of a kind."""
        return {name if isinstance(name, str) else tuple(name) for rank in self.ranks for name in rank.names(kind)}

    @property
    def error(self) -> str:
        """The last line of the first failed rank's error output, or an empty text."""
        failed = next((rank for rank, status in self.statuses.items() if status), None)
        if failed is None:
            return ""
        lines = [line for line in self.ranks[failed].err.splitlines() if line.strip() and line[0] not in " ["]
        return lines[-1] if lines else f"exit status {self.statuses[failed]}"

    def batches(self) -> list:
        """Return the batches that all replicas train on together: a list of passes, of batches, of samples."""
        passes = [[note["batches"][: self.cut] for note in rank.passes(self.loader)] for rank in self.replicas]
        return [[sum(parts, []) for parts in zip(*ranks, strict=False)] for ranks in zip(*passes, strict=False)]


class Watcher:
    """A process of the reader's Python that runs scripts; a context manager, after which nothing runs or is left."""

    def __init__(self, args):
        self.home, self.runs = Path(tempfile.mkdtemp(prefix="mpdemo-same-")), 0
        self.aim(args)

    def aim(self, args):
        """Take the script of these arguments, and the current folder as the reader's."""
        self.args, self.hidden = args, set()
        self.real, self.script = Path.cwd().resolve(), Path(args.script[0]).resolve()

    def __enter__(self):
        dropped = ("SLURM_", "TORCHELASTIC_", "PYTHONSAFEPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        kept |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.home / "tmp")}
        (self.home / "tmp").mkdir()
        command = [self.args.python, "-m", "mpdemo_watcher.serve", str(self.home)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with open(self.home / "errors", "w") as errors:
            self.server = subprocess.Popen(
                command, **pipes, stderr=errors, env=kept, cwd=Path(__file__).parent, start_new_session=True
            )
        try:
            self.answer(IMPORT)
        except UserError:
            last = (self.home / "errors").read_text().strip().splitlines()[-1:] or ["no answer"]
            self.__exit__()
            what = f"{command[0]} does not load PyTorch ({last[0]}); give --python of your environment"
            raise UserError(what) from None
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.server.stdin.close()
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def answer(self, seconds) -> dict:
        """Return the server's next answer."""
        end = time.monotonic() + seconds
        text = b""
        while not text.endswith(b"\n"):
            ready = select.select([self.server.stdout], [], [], max(0, end - time.monotonic()))[0]
            part = os.read(self.server.stdout.fileno(), 65536) if ready else b""
            if not part:
                raise UserError("the watcher gave no answer; try again")
            text += part
        return json.loads(text)

    def run(self, processes, without=(), replay=None, stop=None, folder=None, epochs=2) -> World:
        """Run the script once; a folder of an earlier run holds what that run wrote."""
        self.runs += 1
        run = folder or self.home / str(self.runs)
        notes = self.home / f"notes{self.runs}"
        notes.mkdir()
        if not folder:
            self.mirror(Path("/"), run)
        words = [re.sub(r"\{(\d+)\}", lambda m: str(int(m[1]) // processes), word) for word in self.args.script]
        order = {
            "processes": processes,
            "command": [word.replace("{n}", str(processes)) for word in words],
            "cwd": str(run / self.real.relative_to("/")),
            "folder": str(run),
            "real": str(self.real),
            "notes": str(notes),
            "temporary": [str(self.home / "tmp")],
            "batches": self.args.batches,
            "epochs": epochs,
            "without": sorted(without),
            "replay": replay or {},
            "stop": stop,
            "limit": self.args.timeout,
            "waited_for": True,
        }
        self.server.stdin.write((json.dumps(order) + "\n").encode())
        self.server.stdin.flush()
        return World(notes, order, self.answer(100 * self.args.timeout))

    def run_new(self, processes, **options) -> World:
        """Run the script as if it had never run: without what an earlier run of it has left in the reader's folder."""
        world = self.run(processes, **options)
        found = world.names("file") | (set() if world.steps else world.names("read"))
        before = {path for name in found for path in self.of_before(name)} - self.hidden
        if not before:
            return world
        self.hidden |= before
        return self.run(processes, **options)

    def of_before(self, name):
        """Yield what lies in the reader's folder in the place of a file that the script writes, and its neighbours."""
        path = Path(os.path.normpath(self.real / name))
        if path.parent == self.real or not path.is_relative_to(self.real):
            yield from [path] if path.exists() else []
        else:
            top = self.real / path.relative_to(self.real).parts[0]
            yield from (other for other in top.rglob("*") if other.suffix == path.suffix and other.is_file())

    def mirror(self, real, place):
        """Make a folder of links to the reader's files, and real folders down to the script: its own ``..`` work."""
        place.mkdir()
        with contextlib.suppress(PermissionError):
            for path in sorted(real.iterdir()):
                if path in self.hidden:
                    continue
                if any(other.is_relative_to(path) for other in (self.real, self.script.parent, *self.hidden)):
                    self.mirror(path, place / path.name)
                elif path.suffix == ".py" and real in (self.real, self.script.parent):
                    shutil.copy(path, place)  # so that what it resolves from __file__ lies here
                else:
                    (place / path.name).symlink_to(path)
        if not any(place.iterdir()) and any(hidden.is_relative_to(real) for hidden in self.hidden):
            place.rmdir()
