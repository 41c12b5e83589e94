"""Runs the reader's script in worlds of processes, each in a folder of links to the reader's files."""

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
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, submit
from mpdemo.paths import root
from mpdemo.same.worlds import World

LEVELS = 3  # above the reader's folder: a relative path reaches what lies there
IMPORT = 60.0  # seconds for `import torch`, also from a slow disk


class Watcher:
    """A process of the reader's Python that runs scripts; a context manager, after which nothing runs or is left."""

    def __init__(self, args):
        shared = root() / "runs" if args.site else None  # with the nodes of a job
        folders = [shared, root() / "slurm/sites", root() / "slurm"] if shared else []
        self.made = [folder for folder in folders if not folder.exists()]  # by this run: `submit` makes the others
        if shared:
            shared.mkdir(exist_ok=True)
        self.home, self.runs, self.server = Path(tempfile.mkdtemp(prefix="mpdemo-same-", dir=shared)), 0, None
        self.aim(args)

    def aim(self, args):
        """Take the script of these arguments, and the current folder as the reader's."""
        self.args, self.hidden = args, set()
        self.real, self.script = Path.cwd().resolve(), Path(args.script[0]).resolve()
        if not any(self.script.is_relative_to(parent) for parent in (self.real, *self.real.parents[:LEVELS])):
            args.script[0] = str(self.script)

    def __enter__(self):
        dropped = ("SLURM_", "TORCHELASTIC_", "PYTHONSAFEPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        kept |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.home / "tmp")}
        (self.home / "tmp").mkdir()
        if self.args.site:
            return self
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
        if self.server:
            with contextlib.suppress(OSError):
                self.server.stdin.close()
            try:
                self.server.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.server.pid, signal.SIGKILL)
                self.server.wait()
        shutil.rmtree(self.home, ignore_errors=True)
        for folder in self.made:
            with contextlib.suppress(OSError):  # something else lies there now
                folder.rmdir()

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
            "seed": 1000 if folder else 0,  # a script that is started again draws other numbers
            "limit": self.args.timeout,
            "in_job": bool(self.args.site),
        }
        if self.args.site:
            return World(notes, order, self.by_job(order))
        self.server.stdin.write((json.dumps(order) + "\n").encode())
        self.server.stdin.flush()
        return World(notes, order, self.answer(100 * self.args.timeout))

    def by_job(self, order) -> dict:
        """Run a world by a job of the site, on two nodes where it has several processes; return how it ended."""
        file, processes = self.home / f"order{self.runs}.json", order["processes"]
        file.write_text(json.dumps(order))
        out = self.home.relative_to(root()) / f"job{self.runs}"
        command = str(Path(__file__).parent / "mpdemo_watcher" / "in_job.py"), str(file)
        nodes = min(2, processes)
        spec = JobSpec(f"same_{processes}", command, str(out), nodes, processes // nodes, launcher="torchrun")
        job, how = submit(spec, self.args.site), "ended"
        try:
            job.wait(5 * self.args.timeout)
        except (TimeoutError, KeyboardInterrupt) as error:
            job.cancel()
            if isinstance(error, KeyboardInterrupt):
                raise
            how = "silent"
        notes, statuses = Path(order["notes"]), {}
        for rank in range(processes):
            ended, seen = (notes / f"{rank}.{ending}" for ending in ("status", "end"))
            if ended.exists() or not seen.exists():
                statuses[rank] = int(ended.read_text()) if ended.exists() else 1
        if not any(notes.iterdir()):
            raise UserError(f"job {job.id} started no process; the end of its log: {job.log()[-300:].strip()!r}")
        return {"how": "failed" if any(statuses.values()) and how == "ended" else how, "statuses": statuses}

    def run_new(self, processes, **options) -> World:
        """Run the script as if it had never run: without what an earlier run of it has left in the reader's folder."""
        world = self.run(processes, **options)
        found = world.names("new") | (set() if world.steps else world.names("read"))
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
        wanted = (self.real, self.script.parent, *self.hidden)
        near = any(real.is_relative_to(parent) for parent in (self.real, *self.real.parents[:LEVELS]))
        with contextlib.suppress(PermissionError):
            below = [child for child in (self.real, *self.real.parents) if child.parent == real != child]
            for path in sorted(real.iterdir()) if near else below:
                if path in self.hidden:
                    continue
                if any(other.is_relative_to(path) for other in wanted):
                    self.mirror(path, place / path.name)
                elif path.suffix == ".py" and real in wanted[:2]:
                    shutil.copy(path, place)  # so that what it resolves from __file__ lies here
                else:
                    (place / path.name).symlink_to(path)
        if not any(place.iterdir()) and any(hidden.is_relative_to(real) for hidden in self.hidden):
            place.rmdir()
