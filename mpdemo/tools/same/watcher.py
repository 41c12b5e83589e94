"""Runs the reader's script in worlds of processes, each in a folder of links to the reader's files."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.tools.same.worlds import World
from mpdemo.tools.terminal import Progress
from mpdemo.world import family

LEVELS = 3  # above the reader's folder: a relative path reaches what lies there
IMPORT = 600.0  # seconds for `import torch`: from a network file system it may take minutes


class Watcher:
    """A process of the reader's Python that runs scripts; a context manager, after which nothing runs or is left."""

    def __init__(self, args):
        self.home = Path(tempfile.mkdtemp(prefix="mpdemo-same-")).resolve()
        self.runs, self.server = 0, None
        self.aim(args)

    def aim(self, args):
        """Take the script of these arguments, and the current folder as the reader's."""
        self.args, self.hidden, self.real = args, set(), Path.cwd().resolve()
        self.needed, self.begin, self.climbs = set(), args.script, False
        self.script = Path(args.script[0]).resolve()

    def __enter__(self):
        dropped = ("SLURM_", "TORCHELASTIC_", "PYTHONSAFEPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        kept |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.home / "tmp")}
        if self.args.device == "cpu":
            kept["CUDA_VISIBLE_DEVICES"] = ""
        if paths := kept.get("PYTHONPATH"):  # the server has another current folder
            kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        (self.home / "tmp").mkdir()
        self.pipe, theirs = Pipe()
        words = map(str, (theirs.fileno(), self.home, family.__file__))
        command = [self.args.python, "-m", "mpdemo_watcher.serve", *words]
        try:
            with open(self.home / "errors", "w") as errors, theirs:
                self.server = subprocess.Popen(
                    command,
                    env=kept,
                    cwd=Path(__file__).parent,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                )
            self.versions = self.answer(IMPORT, "loading PyTorch")  # of the reader's environment
        except BaseException as error:
            last = (self.home / "errors").read_text().strip().splitlines()[-1:] or ["no answer"]
            self.__exit__()
            if not isinstance(error, UserError):
                raise
            what = f"{command[0]} does not load PyTorch ({last[0]}); give --python of your environment"
            raise UserError(what) from None
        return self

    def __exit__(self, *_):
        if self.server:
            self.pipe.close()
            if self.ended() is None:
                os.killpg(self.server.pid, signal.SIGKILL)
                self.server.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def answer(self, seconds, doing):
        """Return the server's next answer; meanwhile a terminal shows what is done, in one line."""
        start, found = time.monotonic(), None
        with Progress() as progress, contextlib.suppress(EOFError, OSError):
            while found is None and time.monotonic() < start + seconds:
                if self.pipe.poll(0.5):
                    found = self.pipe.recv()
                else:
                    progress(f"{doing}, {time.monotonic() - start:.0f} s")
        if found is None:
            if number := self.ended():
                what = f"{signal.Signals(abs(number)).name} has ended the process that starts the ranks"
                raise UserError(f"{what}: the script kills its parent, or the memory is full")
            raise UserError("the watcher gave no answer; try again")
        return found

    def ended(self) -> int | None:
        """Wait for the end of the server; return the signal that ended it, 0 without one, None if it runs on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.server.wait(10)
        return None

    def run(self, processes, without=(), stop=None, folder=None, epochs=2, **given) -> World:
        """Run the script once; a folder of an earlier run holds what that run wrote.

        `given` may hold `replay`, the samples of each batch of a loader by their numbers, on which one process shall
        train; `forced`, files with the weights that each step begins with; `plain`, to run the script unwatched; with
        `beyond` the run ends when it has made twice the steps to its first file, and so many more.
        """
        self.runs += 1
        run, notes = folder or self.home / str(self.runs), self.home / f"notes{self.runs}"
        notes.mkdir()
        if not folder:
            self.mirror(Path("/"), run)
        words = self.args.script if folder else self.begin

        def number(found):
            return str(processes if found[1] == "n" else int(found[1]) // processes)

        order = {
            "processes": processes,
            "command": [re.sub(r"\{(n|\d+)\}", number, word) for word in words],
            "epochs": epochs,
            "batches": self.args.batches,
            "cwd": f"{run}{self.real}",
            "folder": str(run),
            "real": str(self.real),
            "notes": str(notes),
            "without": sorted(without),
            "limit": self.args.timeout,
            "device": self.args.device,
            "devices": processes,  # that a script sees with --device cpu
            "climbs": self.climbs,  # weights that are changed before an optimizer steps are no step
            "stop": stop,  # a signal, and the step after which it is sent
            "seed": 1000 if folder else 0,  # a script that is started again draws other numbers
            "replay": {},
            **dict.fromkeys(("forced", "beyond", "plain"), 0),
            **given,
        }
        self.pipe.send(order)
        return World(notes, order, self.answer(100 * self.args.timeout, f"processes: {processes}"))

    def run_new(self, processes, **options) -> World:
        """Run the script as if it had never run: without what an earlier run of it has left in the reader's folder.

        What it can't begin without is not hidden.
        """
        world = self.run(processes, **options)
        # the first change of weights was none, as where SAM climbs
        if world.names("by hand") and world.ranks[0].of("start")[1:]:
            self.climbs = True
            world = self.run(processes, **options)
        found = {note["name"] for note in world.of("file") if note["new"]}
        found |= set() if world.steps else world.names("read")
        before = {path for name in found for path in self.of_before(name)} - self.hidden - self.needed
        if not before:
            return world
        self.hidden |= before
        again = self.run(processes, **options)
        if world.error or not again.error:
            return again
        self.hidden -= before
        self.needed |= before
        return world

    def of_before(self, name):
        """Yield what lies in the reader's folder in the place of a file that the script writes, and its neighbours."""
        path = top = Path(os.path.normpath(self.real / name))
        if path.is_relative_to(self.real):
            top = self.real / path.relative_to(self.real).parts[0]
        others = (top, *top.rglob("*"))
        yield from (other for other in others if other.suffix == path.suffix and other.is_file())

    def mirror(self, real, place):
        """Make a folder of links to the reader's files, and real folders down to the script: its own ``..`` work."""
        place.mkdir()
        own = self.real, self.script.parent
        ways = {path for leaf in (*own, *self.hidden) for path in (leaf, *leaf.parents)}
        found = {path for path in ways if path.parent == real != path}
        near = any(real.is_relative_to(parent) for parent in (self.real, *self.real.parents[:LEVELS]))
        with contextlib.suppress(PermissionError):
            if near or real in own:
                found |= set(real.iterdir())
        for path in found - self.hidden:
            if path in ways:
                self.mirror(path, place / path.name)
            elif path.suffix == ".py" and path.is_file() and real in own:
                shutil.copy(path, place)  # so that what it resolves from __file__ lies here
            else:
                (place / path.name).symlink_to(path)
        if not any(place.iterdir()) and any(hidden.is_relative_to(real) for hidden in self.hidden):
            place.rmdir()
