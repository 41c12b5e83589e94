"""Trace training steps to files beside argv[2], the rows.

    python tests/gpu/trace.py steps ROWS     three steps: the GPT eager and compiled, ResNet-50 in NHWC and NCHW
    python tests/gpu/trace.py player ROWS    one step, of the GPT and of its halves on two streams, for a step player

For the player, a mark is where a block's forward or backward pass begins, and a kernel belongs to the mark after which
it was launched. On a CPU, operators stand for kernels.
"""

import json
import sys
from bisect import bisect
from pathlib import Path

import torch
from gpt import GPT, Block, End
from record import append
from throughput import DEVICE, ON_GPU, Images, Language, fits, release, training
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from mpdemo.predict.counting import size
from mpdemo.world import clock

MOST = 5 * 2**20  # bytes of a trace; a larger one is removed
CASES = (Images(), ("channels_last",)), (Images(), ()), (Language(), ()), (Language(), ("compile",))
MICROBATCHES = 4
STREAM = torch.cuda.Stream() if ON_GPU else None  # of the second stage
KERNELS, ALLOCATOR = ("kernel", 1) if ON_GPU else ("cpu_op", 0)  # the profiler's words and numbers


def traced(step, steps, file, **options):
    """Trace some steps to a file, after two to warm up."""
    step(), step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities, **options) as profiler:
        for _ in range(steps):
            step()
        clock.wait(DEVICE)
    profiler.export_chrome_trace(str(file))


def three_steps(rows):
    """Trace each case with its largest batch, halved until it fits."""
    for case, options in CASES:
        count = case.last
        while not fits(case, count):
            count //= 2
        release()
        name = "-".join((case.name, *options))
        file = rows.with_name(f"trace-{name}.json.gz")
        traced(training(case, options, count), 3, file, record_shapes=True)
        bytes_ = file.stat().st_size
        if bytes_ > MOST:
            file.unlink()
        append(
            [{"trace": file.name, "case": name, "batch": count, "bytes": bytes_, "kept": bytes_ <= MOST}],
            rows,
        )


class Halves(GPT):
    """The GPT in two stages, the second on a stream of its own, and the batch in microbatches, as in GPipe."""

    def forward(self, tokens, targets):
        middle, losses = len(self.blocks) // 2, []
        for part, target in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            x = self.tokens(part) + self.positions.weight
            for block in self.blocks[:middle]:
                x = block(x)
            if ON_GPU:
                STREAM.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(STREAM):
                for block in self.blocks[middle:]:
                    x = block(x)
                losses.append(self.end(x, target))
        if ON_GPU:
            torch.cuda.current_stream().wait_stream(STREAM)
        return sum(losses) / MICROBATCHES  # one backward pass for all: several would wait for each other


def for_player(rows):
    """Record a step of each case: marks, kernels and memory, in microseconds since the first mark."""
    numbers, case, count = {}, Language(), 2 * MICROBATCHES  # numbers: module -> its place in the model

    def mark(kind, module):
        if isinstance(module, (Block, End)):
            with record_function(f"{kind}|{numbers.setdefault(module, len(numbers))}"):
                pass

    register_module_forward_pre_hook(lambda module, _: mark("F", module))
    register_module_forward_hook(lambda module, _, y: y.register_hook(lambda _: mark("B", module)) and None)
    for name, build in (("gpt", case.build), ("two_stages", lambda _: Halves(**case.size))):
        numbers.clear(), release()
        case.build, file = build, rows.with_name(f"player-{name}.json")
        step = training(case, (), count)
        traced(step, 1, file, profile_memory=True)
        weights = [p for group in step.optimizer.param_groups for p in group["params"]]
        held = {"weights": size(weights), "optimizer": size(step.optimizer.state_dict())}
        found = compact(json.loads(file.read_text()), {p.grad.data_ptr() for p in weights})
        content = {"case": name, "batch": count, **case.size, "held": held, **found}
        file.write_text(json.dumps(content, separators=(",", ":")))
        append([{"player": file.name, "kernels": len(found["kernels"]), "streams": found["streams"]}], rows)


def compact(trace, gradients) -> dict:
    """Return what a trace has of a step.

    A kernel is (place of its name, of its stream and of its mark, begin, duration); a change of memory (time at the
    host, place of its address, bytes), the last of which at each address of `gradients` is a gradient.
    """
    events = sorted(
        (event for event in trace["traceEvents"] if "ts" in event), key=lambda event: event["ts"]
    )
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    times, found = [event["ts"] for event in marks], {"kernels": [], "memory": []}
    launched = {
        e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    names, streams, places = {}, {}, {}
    for event in events:
        at, args = round(event["ts"] - times[0], 1), event.get("args", {})
        if event.get("cat") == KERNELS:
            place = [
                seen.setdefault(event[key], len(seen)) for seen, key in ((names, "name"), (streams, "tid"))
            ]
            mark = bisect(times, launched.get(args.get("correlation"), event["ts"])) - 1
            found["kernels"].append([*place, mark, at, round(event["dur"], 1)])
        elif event["name"] == "[memory]" and args["Device Type"] == ALLOCATOR:
            found["memory"].append([at, places.setdefault(args["Addr"], len(places)), args["Bytes"]])
    found["marks"] = [[event["name"], round(event["ts"] - times[0], 1)] for event in marks]
    found["gradients"] = sorted(places[address] for address in gradients & places.keys())
    return found | {"names": list(names), "streams": list(streams)}


if __name__ == "__main__":
    {"steps": three_steps, "player": for_player}[sys.argv[1]](Path(sys.argv[2]))
