"""Record what every rank of a cut model computes when, in all steps of a run, with a clock that all ranks share.

The clock is read before and after each pass through a stage, or the three methods through which every schedule of
``torch.distributed.pipelining`` computes a microbatch; a reading costs about a microsecond and waits for nothing. The
same operations are marked for torch.profiler, which records single steps of any strategy, messages and memory included
(`mpdemo.measure.trial.record`). `mpdemo.measure.timeline` reads the files. Taught in notebooks/31_microbatches.ipynb.
"""

import json
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed
from torch.profiler import record_function

from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects
from mpdemo.world.devices import identity

CLOCK_ROUNDS = 9  # barriers by which two machines compare their clocks
COMPUTING = {  # methods of a ``PipelineStage``, and the kind of operation that they are
    "forward_one_chunk": "F",
    "backward_one_chunk": "B",
    "backward_weight_one_chunk": "W",
}


def mark(**fields):
    """Return a context that torch.profiler records under the fields of an event: ``mpdemo: kind=F layer=3``."""
    return record_function("mpdemo: " + " ".join(f"{name}={value}" for name, value in fields.items()))


class Recorder:
    """Record the steps of one rank, on its device's clock (`mpdemo.world.clock`)."""

    def __init__(self, rank, device):
        self.rank, self.device = rank, device
        self._zero = None  # a reading of the device's clock, and the time on rank 0's clock at that moment
        self._steps = []  # as `steps`, but with readings of the device's clock
        self._operations = None  # of the step under way
        self._calls = []  # (holder, name, describe) of the functions whose calls are recorded

    def watch(self, local):
        """Record the `LocalStages` of a pipeline, or the passes and messages of a stage without one."""
        local.recorder = self
        number = next(iter(local.stages))
        around(local.model, lambda: self.operation("F", number))
        for holder, name, kind in ((torch.Tensor, "backward", "B"), (torch.distributed, "all_reduce", "A")):
            self.watch_calls(holder, name, lambda *_, kind=kind, **__: {"kind": kind, "stage": number})

    def attach(self, stage):
        """Record what a ``PipelineStage`` computes."""
        for name, kind in COMPUTING.items():
            self.watch_calls(stage, name, partial(operation_of, stage.stage_index, kind))

    def watch_calls(self, holder, name, describe):
        """Record a function's calls during a step; `describe` gets their arguments and returns those of `operation`."""
        self._calls.append((holder, name, describe))

    def _recorded(self, function, describe):
        def recorded(*args, **kwargs):
            with self.operation(**describe(*args, **kwargs)):
                return function(*args, **kwargs)

        return recorded

    @contextmanager
    def step(self):
        """Record a ``with`` block as one step. In the first one the ranks compare clocks: all must come here."""
        if self._zero is None:
            offset = clock_offset()
            clock.wait(self.device)
            self._zero = clock.read(self.device), time.perf_counter() - offset
        with ExitStack() as replaced:
            for holder, name, describe in self._calls:
                recorded = self._recorded(getattr(holder, name), describe)
                replaced.enter_context(patch.object(holder, name, recorded))
            begin = clock.read(self.device)
            self._operations = []
            try:
                yield
                end = clock.read(self.device)
                self._steps.append({"start": begin, "end": end, "events": self._operations})
            finally:
                self._operations = None

    @contextmanager
    def operation(self, kind, stage=0, microbatch=0):
        """Record a ``with`` block as one operation of the step under way; outside of a step nothing is recorded."""
        if self._operations is None:
            yield
            return
        row = {"kind": kind, "stage": stage, "microbatch": microbatch}
        with mark(**row):
            start, begin = clock.read(self.device), time.thread_time()
            yield
            # s that this thread had a core: less where cores are shared
            on_core = time.thread_time() - begin
            end = clock.read(self.device)
        self._operations.append(
            {"rank": self.rank} | row | {"start": start, "end": end, "on_core": on_core}
        )

    @property
    def steps(self) -> list[dict]:
        """The recorded steps: ``start``, ``end`` and ``events``, in seconds on rank 0's clock."""

        def seconds(row):
            zero, time_at_zero = self._zero
            return row | {edge: time_at_zero + clock.seconds(zero, row[edge]) for edge in ("start", "end")}

        return [
            seconds(step) | {"events": [seconds(row) for row in step["events"]]} for step in self._steps
        ]

    def save(self, folder):
        """Write ``timeline-rank0.json`` (for rank 0) into `folder`."""
        path = Path(folder) / f"timeline-rank{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rank": self.rank, "steps": self.steps}))


def around(module, enter):
    """Let each forward pass of a module run in the context that `enter` returns; return handles that end this."""
    under_way = ExitStack()
    before = module.register_forward_pre_hook(lambda *_: under_way.enter_context(enter()) and None)
    return before, module.register_forward_hook(lambda *_: under_way.close())


def operation_of(stage, kind, microbatch, *args, full_backward=True, **kwargs) -> dict:
    """Describe a call of a ``PipelineStage``: a backward pass that is not full computes the inputs' gradients alone."""
    return {"kind": kind if full_backward or kind != "B" else "I", "stage": stage, "microbatch": microbatch}


def clock_offset(machine=None):
    """Return this process's ``perf_counter`` minus rank 0's, in seconds. All ranks must call it.

    Processes of one machine read the same clock: exactly 0. Between machines all ranks leave a barrier at nearly the
    same moment; the median of several is good to about the time of a barrier, 0.1 ms.
    """
    machines = gather_objects(machine or identity())
    if len(set(machines)) == 1:
        return 0.0
    rank = torch.distributed.get_rank()
    offsets = []
    for _ in range(CLOCK_ROUNDS):
        torch.distributed.barrier()
        now = gather_objects(time.perf_counter())
        offsets.append(now[rank] - now[0])
    return 0.0 if machines[rank] == machines[0] else median(offsets)
