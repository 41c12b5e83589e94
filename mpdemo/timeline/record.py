"""Record what every rank of a pipeline computes when, with a clock that all ranks share.

`Recorder.attach` puts two clock readings around the three methods through which every schedule of
``torch.distributed.pipelining`` computes a microbatch; nothing else changes. A reading costs about a microsecond.
`mpdemo.timeline.read` reads the files, `mpdemo.notebook.plots.timeline` draws them.
Taught in notebooks/05_pipeline.ipynb.
"""

import json
import socket
import time
from contextlib import contextmanager
from pathlib import Path

CLOCK_ROUNDS = 9  # barriers by which two machines compare their clocks


class Recorder:
    """Record the steps of one rank.

    Parameters
    ----------
    rank : int
        This process's rank.
    device : torch.device
        On a GPU kernels run after the call that launches them has returned, so the readings are CUDA events, taken
        on the stream; on a CPU they are readings of ``time.perf_counter``.
    group : torch.distributed.ProcessGroup, optional
        The ranks that share a clock; all processes by default.
    """

    def __init__(self, rank, device, group=None):
        self.rank, self.device, self.group = rank, device, group
        self.steps = []
        self.offset = None  # s, this process's clock minus rank 0's
        self._marks = None  # of the step under way: kind, stage, microbatch, start, end

    def attach(self, stage):
        """Record a ``PipelineStage``; its borders say which operations wait for another rank."""
        methods = {
            "forward_one_chunk": lambda kwargs: "F",
            "backward_one_chunk": lambda kwargs: "B" if kwargs.get("full_backward", True) else "I",
            "backward_weight_one_chunk": lambda kwargs: "W",
        }
        for name, kind in methods.items():
            setattr(stage, name, self._timed(getattr(stage, name), stage, kind))
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            setattr(stage, name, self._noted(getattr(stage, name), stage))

    def loss(self, loss_fn):
        """Return `loss_fn` wrapped so that its time counts as part of the last stage's forward."""

        def timed(*args, **kwargs):
            result = loss_fn(*args, **kwargs)
            if self._marks and self._marks[-1]["kind"] == "F":
                self._marks[-1]["end"] = self._read()
            return result

        return timed

    def start_step(self):
        """Begin to record; on the first call the ranks compare clocks, so all of them must come here."""
        if self.offset is None:
            self.offset = clock_offset(self.group)
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        self._began, self._zero, self._marks = time.perf_counter(), self._read(), []

    def end_step(self):
        """Stop recording this step and keep its rows."""
        marks, self._marks = self._marks, None
        end = self._read()
        if self.device.type == "cuda":
            end.synchronize()
        events = [
            {"rank": self.rank, **mark, "start": self._seconds(mark["start"]), "end": self._seconds(mark["end"])}
            for mark in marks
        ]
        self.steps.append({"start": self._began - self.offset, "end": self._seconds(end), "events": events})

    @contextmanager
    def step(self):
        """Record what happens in a ``with`` block as one step."""
        self.start_step()
        try:
            yield self
        finally:
            self.end_step()

    def save(self, folder):
        """Write ``timeline-rank0.json`` (for rank 0) into `folder`; return its path."""
        path = Path(folder) / f"timeline-rank{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"rank": self.rank, "device": str(self.device), "host": socket.gethostname(), "steps": self.steps}
        path.write_text(json.dumps(content))
        return path

    def _timed(self, method, stage, kind):
        def timed(chunk, *args, **kwargs):
            if self._marks is None:
                return method(chunk, *args, **kwargs)
            mark = {"kind": kind(kwargs), "stage": stage.stage_index, "microbatch": chunk, "start": self._read()}
            result = method(chunk, *args, **kwargs)
            mark["end"] = self._read()
            self._marks.append(mark)
            return result

        return timed

    def _noted(self, method, stage):
        def noted(chunk):
            operations = method(chunk)
            if operations and self._marks is not None:
                now = self._read()
                sent = {"kind": "send", "stage": stage.stage_index, "microbatch": chunk, "start": now, "end": now}
                self._marks.append(sent)
            return operations

        return noted

    def _read(self):
        """Return the time now: a number on a CPU, an event on the current stream on a GPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, reading):
        """Return a reading in seconds on rank 0's clock."""
        if self.device.type == "cuda":
            reading = self._began + self._zero.elapsed_time(reading) / 1000  # elapsed_time gives milliseconds
        return reading - self.offset


def clock_offset(group=None, machine=None):
    """Return this process's ``perf_counter`` minus rank 0's, in seconds. All ranks of the group must call it.

    Processes of one machine read the same clock: exactly 0. Between machines all ranks leave a barrier at nearly the
    same moment; the median of several is good to about the time of a barrier, 0.1 ms.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        All processes by default.
    machine : str, optional
        What tells this machine from others; the identity of its last boot by default.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return 0.0
    machines = [None] * dist.get_world_size(group)
    dist.all_gather_object(machines, machine or _machine(), group=group)
    offsets = []
    for _ in range(CLOCK_ROUNDS if len(set(machines)) > 1 else 0):
        dist.barrier(group=group)
        now = [None] * len(machines)
        dist.all_gather_object(now, time.perf_counter(), group=group)
        offsets.append(now[dist.get_rank(group)] - now[0])
    if not offsets or machines[dist.get_rank(group)] == machines[0]:
        return 0.0
    return float(torch.tensor(offsets, dtype=torch.float64).median())


def _machine():
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()
