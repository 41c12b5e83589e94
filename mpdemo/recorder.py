"""Record what every rank of a pipeline computes when, with a clock that all ranks share.

`Recorder.attach` reads the clock before and after the three methods through which every schedule of
``torch.distributed.pipelining`` computes a microbatch; a reading costs about a microsecond and waits for nothing.
`mpdemo.timeline.read` reads the files, `mpdemo.notebook.plots.timeline` draws them.
Taught in notebooks/05_pipeline.ipynb.
"""

import json
import socket
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import torch
import torch.distributed

from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects
from mpdemo.world.devices import identity

CLOCK_ROUNDS = 9  # barriers by which two machines compare their clocks
COMPUTING = {  # methods of a ``PipelineStage``, and the kind of operation that they are
    "forward_one_chunk": lambda kwargs: "F",
    "backward_one_chunk": lambda kwargs: "B" if kwargs.get("full_backward", True) else "I",
    "backward_weight_one_chunk": lambda kwargs: "W",
}


class Recorder:
    """Record the steps of one rank, on its device's clock (`mpdemo.world.clock`)."""

    def __init__(self, rank, device, alone=False):
        self.rank, self.device = rank, device
        self.alone = alone  # no other rank records these steps; else all compare their clocks in the first one
        self.offset = None  # s, this process's clock minus rank 0's
        self._steps = []  # (begin, end, operations) as readings of the clock
        self._operations = None  # of the step under way

    def watch(self, part):
        """Record a `Part` of a cut model: its pipeline's stages, or the passes and messages of a stage without one."""
        part.recorder = self
        model, number = part.model, next(iter(part.stages))
        passes = ExitStack()  # of a stage that no pipeline drives: a forward pass through the model, and `backward`
        model.register_forward_pre_hook(lambda *_: passes.enter_context(self.operation("F", number)))
        model.register_forward_hook(lambda *_: passes.close())
        for holder, name, kind in ((torch.Tensor, "backward", "B"), (torch.distributed, "all_reduce", "A")):
            self._record(holder, name, lambda args, kwargs, kind=kind: (kind, number))

    def attach(self, stage):
        """Record a ``PipelineStage``: what it computes, and when it sends to another stage."""
        for name, kind in COMPUTING.items():
            self._record(stage, name, lambda args, kwargs, kind=kind: (kind(kwargs), stage.stage_index, args[0]))
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            self._note_sends(stage, name)

    def _record(self, holder, name, describe):
        """Replace a function by one whose calls are recorded; `describe` returns the arguments of `operation`."""
        function = getattr(holder, name)

        def recorded(*args, **kwargs):
            with self.operation(*describe(args, kwargs)):
                return function(*args, **kwargs)

        setattr(holder, name, recorded)

    def _note_sends(self, stage, name):
        function = getattr(stage, name)

        def noted(chunk):
            sends = function(chunk)
            if sends:
                now = clock.read(self.device)
                self.add("send", now, now, stage.stage_index, chunk)
            return sends

        setattr(stage, name, noted)

    def begin_step(self):
        """Record what follows as one step. In the first one the ranks compare clocks: all must come here."""
        if self.offset is None:
            self._set_zero()
        self._begin, self._operations = clock.read(self.device), []

    @property
    def under_way(self) -> bool:
        """Whether a step is being recorded."""
        return self._operations is not None

    def end_step(self):
        """End the step under way."""
        self._steps.append((self._begin, clock.read(self.device), self._operations))
        self._operations = None

    @contextmanager
    def operation(self, kind, stage, microbatch=0, **more):
        """Record a ``with`` block as one operation of the step under way; outside of a step nothing is recorded."""
        if not self.under_way:
            yield
            return
        start, begin = clock.read(self.device), time.thread_time()
        yield
        on_core = time.thread_time() - begin  # s that this thread had a core: less than it took where cores are shared
        self.add(kind, start, clock.read(self.device), stage, microbatch, on_core=on_core, **more)

    def add(self, kind, start, end, stage=0, microbatch=0, **more):
        """Record an operation between two readings of the clock; `rank` where this process drives several devices."""
        if self.under_way:
            row = {"kind": kind, "stage": stage, "microbatch": microbatch, "start": start, "end": end}
            self._operations.append(row | more)

    def latest(self, kind):
        """Return the last operation `kind` of the step under way, None before the first one."""
        return next((row for row in reversed(self._operations or ()) if row["kind"] == kind), None)

    @property
    def steps(self) -> list[dict]:
        """The recorded steps: ``start``, ``end`` and ``events``, in seconds on rank 0's clock."""
        seconds = self._seconds
        return [
            {
                "start": seconds(begin),
                "end": seconds(end),
                "events": [
                    {"rank": self.rank, **row, "start": seconds(row["start"]), "end": seconds(row["end"])}
                    for row in operations
                ],
            }
            for begin, end, operations in self._steps
        ]

    def save(self, folder):
        """Write ``timeline-rank0.json`` (for rank 0) into `folder`."""
        path = Path(folder) / f"timeline-rank{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"rank": self.rank, "device": str(self.device), "host": socket.gethostname(), "steps": self.steps}
        path.write_text(json.dumps(content))

    def _set_zero(self):
        """Compare clocks with rank 0, and note which host time this device's clock begins at."""
        self.offset = 0.0 if self.alone else clock_offset()
        clock.wait(self.device)
        on_cpu = self.device.type != "cuda"
        self._zero, self._zero_time = (0.0, 0.0) if on_cpu else (clock.read(self.device), time.perf_counter())

    def _seconds(self, reading):
        """Return a reading in seconds on rank 0's clock."""
        return self._zero_time + clock.seconds(self._zero, reading) - self.offset


def clock_offset(machine=None):
    """Return this process's ``perf_counter`` minus rank 0's, in seconds. All ranks must call it.

    Processes of one machine read the same clock: exactly 0. Between machines all ranks leave a barrier at nearly the
    same moment; the median of several is good to about the time of a barrier, 0.1 ms.
    """
    machines, offsets = gather_objects(machine or identity()), []
    for _ in range(CLOCK_ROUNDS if len(set(machines)) > 1 else 0):
        torch.distributed.barrier()
        now = gather_objects(time.perf_counter())
        offsets.append(now[torch.distributed.get_rank()] - now[0])
    if not offsets or machines[torch.distributed.get_rank()] == machines[0]:
        return 0.0
    return median(offsets)
