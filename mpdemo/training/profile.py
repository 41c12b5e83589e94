"""PyTorch's profiler for ``train --profile N``: what each rank did in N steps, as a trace.

Taught in notebooks/09_scaling.ipynb. Source: https://docs.pytorch.org/docs/stable/profiler.html.
"""

import torch
from torch.profiler import ProfilerActivity

from mpdemo.training.private_torch import record_memory, save_memory


def start_profiler(run):
    """Start the profiler: it leaves out two steps, records as many as the settings ask for, writes a trace per rank."""
    on_gpu = run.device.type == "cuda"

    def write(recorded):
        recorded.export_chrome_trace(str(run.folder / f"trace-rank{run.rank}.json.gz"))
        if on_gpu:
            save_memory(run.folder / f"memory-rank{run.rank}.pickle")

    kinds = [ProfilerActivity.CPU]
    if on_gpu:
        kinds.append(ProfilerActivity.CUDA)
        record_memory()
    run.folder.mkdir(parents=True, exist_ok=True)  # rank 0 may not have made it yet
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=run.s.profile, repeat=1)
    profiler = torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=write)
    profiler.start()
    return profiler
