"""Trace three training steps of the GPT, eager and compiled, and of ResNet-50 in NHWC and NCHW: files beside the rows.

python tests/gpu/trace.py ROWS
"""

import sys
from pathlib import Path

from record import append
from throughput import DEVICE, ON_GPU, Images, Language, fits, release, training
from torch.profiler import ProfilerActivity, profile

from mpdemo.world import clock

MOST = 5 * 2**20  # bytes of a trace; a larger one is removed
CASES = (Images(), ("channels_last",)), (Images(), ()), (Language(), ()), (Language(), ("compile",))


def traced(step, file):
    """Trace three steps to a file, after two to warm up."""
    step(), step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(3):
            step()
        clock.wait(DEVICE)
    profiler.export_chrome_trace(str(file))


def main(rows):
    """Trace each case with its largest batch, halved until it fits."""
    for case, options in CASES:
        count = case.last
        while not fits(case, count):
            count //= 2
        release()
        name = "-".join((case.name, *options))
        file = rows.with_name(f"trace-{name}.json.gz")
        traced(training(case, options, count), file)
        bytes_ = file.stat().st_size
        if bytes_ > MOST:
            file.unlink()
        append(
            [{"trace": file.name, "case": name, "batch": count, "bytes": bytes_, "kept": bytes_ <= MOST}],
            rows,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
