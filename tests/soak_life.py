"""One training by a script to take home, which is killed at random on this machine: see soak_scripts.py."""

import contextlib
import shutil
import signal
import subprocess
import threading
import time

import psutil
from home_scripts import KINDS, MESHES, UPDATE, Training, content, damage, environment, losses, told
from worker_jobs import until

CASES = {name: [1, 2, 3] for name in KINDS} | {"train_single": [1]}  # on so many processes
CASES["train_gpt"] = list(MESHES)
LOCAL = ("rank", "launcher", "save", "stop", "disk", "blind", "damaged", "number")
TOLERANCE = 2e-6  # of a loss printed with 6 digits, on another number of processes
BOUND = 480  # s that a run may take, beside other work; longer is a hang


def slowed(seconds) -> tuple:
    """Return a change: each step takes so many seconds more."""
    return (UPDATE, f"{UPDATE}        __import__('time').sleep({seconds})\n")


class References:
    """The trainings that nobody troubles, each made once."""

    def __init__(self, folder):
        self.folder, self.made, self.lock = folder, {}, threading.Lock()

    def get(self, name, processes) -> tuple:
        """Return a training, what it prints on so many processes, and its last checkpoint."""
        with self.lock:
            if name not in self.made:
                self.made[name] = training = Training.anew(name, self.folder / name)
                if name == "finetune_lora":  # of a model that train_fsdp.py made
                    Training("train_fsdp", training.folder).run("base", seconds=BOUND)
            training, key = self.made[name], f"whole{processes}"
            if (name, key) not in self.made:
                printed = training.run(key, processes=processes, seconds=BOUND)
                self.made[name, key] = printed, content(training.saved(key)[-1])
        return training, *self.made[name, key]


class Life:
    """One training, with troubles on the way."""

    cases, kinds = list(CASES), LOCAL

    def __init__(self, number, dice, counts, references):
        self.dice, self.counts = dice, counts
        self.name = dice.choice(self.cases)
        self.processes = self.first = dice.choice(CASES[self.name]) if self.kinds == LOCAL else 2
        self.training, self.printed, self.last = references.get(self.name, self.processes)
        self.training = self.training.copied(references.folder / f"life{number}")
        self.whole, self.rows, self.log = told(self.printed), {}, self.training.folder / "log.txt"
        self.troubles = dice.sample(self.kinds, k=dice.randint(2, 4))
        self.what = f"life {number} ({self.name} on {self.processes}: {', '.join(self.troubles)})"

    def live(self):
        """Make one trouble after the other; then run to the end, and compare."""
        for kind in self.troubles:
            if getattr(self, kind)():
                self.counts[f"trouble: {kind}"] += 1
        self.counts["resumed"] += bool(self.training.saved("a"))
        if self.finish(self.start()) != 0:
            raise RuntimeError(f"it does not resume: {self.log.read_text()[-1500:]}")
        self.compare()

    def compare(self):
        """Hold the whole life against the training that nobody troubled."""
        self.counts["lives"] += 1
        if self.processes == self.first:
            # DDP orders its bucket anew after a run's first step, so in the step after a resume three or more
            # numbers are added in another order than without one: weights differ by 1e-8.
            bits = self.name != "train_ddp" or self.processes < 3
            equal = self.rows == self.whole and (
                not bits or content(self.training.saved("a")[-1]) == self.last
            )
        else:
            mine, others = losses("\n".join(map(": ".join, self.rows.items()))), losses(self.printed)
            near = all(abs(one - other) <= TOLERANCE for one, other in zip(mine, others, strict=True))
            equal = self.rows.keys() == self.whole.keys() and near
            self.counts["on another number of processes"] += 1
        if equal:
            shutil.rmtree(self.training.folder)
        else:
            self.fault("unequal", self.rows.items() - self.whole.items())

    def start(self, *changes, name="a", prefix=()):
        """Start it in the background, a little slower than it is."""
        self.training.change(slowed(0.1), *changes)
        self.counts["runs"] += 1
        command = [*prefix, *self.training.command(name, self.processes)]
        with self.log.open("w") as log:
            return subprocess.Popen(
                command, cwd=self.training.folder, env=environment(), stdout=log, stderr=log
            )

    def finish(self, process) -> int:
        """Wait for the end of a run, after which no process may be left; return its status."""
        end = time.monotonic() + BOUND
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        if process.poll() is None:
            self.fault("hangs", self.log.read_text()[-1500:])
        _, left = psutil.wait_procs(self.living(), timeout=20)
        if left and process.poll() is not None:
            self.fault("left behind", left)
        for one in left:
            one.kill()
        self.note(told(self.log.read_text()))
        return process.wait()

    def living(self) -> list:
        """Return the processes that work in this life's folder."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = (
                    process.cwd() == str(self.training.folder) and process.status() != psutil.STATUS_ZOMBIE
                )
                living += [process] if own else []
        return living

    def note(self, rows):
        """Take over what was said of steps and epochs; a step that was made again must have said the same."""
        if self.processes == self.first and not rows.items() <= self.whole.items():
            self.fault("unequal", rows.items() - self.whole.items())
        self.rows |= rows

    def moment(self, process):
        """Wait for some of a run's first seconds, or for some of its steps."""
        if self.dice.random() < 0.3:
            time.sleep(self.dice.uniform(0, 8))
            return
        step = f"step {self.dice.randint(1, len(self.whole) - 3)}:"
        until(lambda: process.poll() is not None or step in self.log.read_text(), BOUND)

    def fault(self, kind, what):
        self.counts[kind] += 1
        print(f"{kind}: {self.what}: {what}; see {self.training.folder}", flush=True)

    # the troubles: each returns whether it could be made

    def rank(self):
        return self.kill(lambda launcher: self.dice.choice(launcher.children() or [launcher]).kill())

    def launcher(self):
        return self.kill(lambda launcher: launcher.kill())

    def kill(self, how):
        """Kill something at a random moment."""
        self.moment(process := self.start())
        killed = process.poll() is None
        with contextlib.suppress(psutil.NoSuchProcess):
            how(psutil.Process(process.pid))
        self.finish(process)
        return killed

    def stop(self):
        """Send what a batch system sends; the last step that was told of must have been saved."""
        self.moment(process := self.start())
        running = process.poll() is None
        process.send_signal(signal.SIGTERM)
        self.finish(process)
        steps = [int(name.split()[1]) for name in told(self.log.read_text()) if name.startswith("step")]
        if steps and steps[-1] not in self.training.steps("a"):
            self.fault("lost", f"step {steps[-1]} is not in {self.training.steps('a')}")
        return running

    def save(self):
        """Kill a rank while it saves."""
        unit, last = self.training.unit, max([0, *self.training.steps("a")])
        after = range(last // unit * unit + unit, len(self.whole) - 2, unit)
        if not after:
            return False
        moments, by_all = (
            ["die_in_the_middle_of_a_file", "die_before_the_name"],
            self.training.kind.looks == "job.py",
        )
        moment = self.dice.choice(moments)
        rank = self.dice.randrange(self.processes) if by_all and moment == moments[0] else 0
        if self.finish(self.start(self.training.at(self.dice.choice(after), rank, moment))) == 0:
            self.fault("lost", "a rank that was killed is not noticed")
        return True

    def disk(self):
        """Let it run on a full disk; what is there must stay."""
        kept, (prefix, name) = self.training.data("a"), self.training.full_disk()
        status = self.finish(self.start(name=name, prefix=prefix))
        there = [*self.training.folder.glob("a-*"), *self.training.folder.glob("a-*/*")]
        # a damaged one has another name by now
        if not {*kept.values()} <= {file.read_bytes() for file in there if file.is_file()}:
            self.fault("lost", f"not the same checkpoints: {self.training.steps('a')}")
        return status != 0

    def blind(self):
        """Let one rank look for checkpoints elsewhere; nothing may happen to those of the others."""
        if self.processes == 1 or not (kept := self.training.data("a")):
            return False
        rank = self.dice.randrange(self.processes)
        status = self.finish(self.start(self.training.blind(rank)))
        if status == 0 or told(self.log.read_text()) or self.training.data("a") != kept:
            self.fault("lost", f"rank {rank} was blind: status {status}, {self.training.steps('a')}")
        return True

    def damaged(self):
        """Damage the newest checkpoint, if there is one before it."""
        if len(self.training.saved("a")) < 2:
            return False
        damage(self.training.saved("a")[-1], self.dice.choice(["truncated", "flipped", "missing"]))
        return True

    def number(self):
        """Go on with another number of processes."""
        others = [number for number in CASES[self.name] if number != self.processes]
        self.processes = self.dice.choice(others) if others else self.processes
        return bool(others)
