"""Trace three steps of the GPT of throughput.py, and the memory of one of them, to files beside argv[1], the rows.

The trace opens in https://ui.perfetto.dev, the snapshot in https://docs.pytorch.org/memory_viz. Neither is kept above
16 MiB.
"""

import json
import sys
from pathlib import Path

import torch
from throughput import DEVICE, ON_GPU, Language, training
from torch.profiler import ProfilerActivity, profile

from mpdemo.training.private_torch import record_memory, save_memory
from mpdemo.world import clock

MOST = 16 * 2**20  # bytes of a file
BATCH = 2


def kept(file) -> dict:
    """Say how large a file is, and remove one that is too large."""
    size = file.stat().st_size
    if size > MOST:
        file.unlink()
    return {"file": file.name, "bytes": size, "kept": size <= MOST}


def main():
    rows = Path(sys.argv[1])
    trace, snapshot = rows.with_name("trace.json.gz"), rows.with_name("memory.pickle")
    step = training(Language(), (), BATCH)
    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]) as profiler:
        for _ in range(3):
            step()
        clock.wait(DEVICE)
    profiler.export_chrome_trace(str(trace))
    found = [{"trace": kept(trace), "steps": 3}]
    if ON_GPU:
        record_memory()
        step()
        save_memory(snapshot)
        found.append({"snapshot": kept(snapshot), "peak_mib": torch.cuda.max_memory_allocated() / 2**20})
    with rows.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()
