"""Compare what one GPU holds in a step with what the plan says: rows of JSON to argv[1]; a failure above five percent.

A stage of a cut model is measured alone: it lies on the GPU, and the other stage on the CPU. cuBLAS's workspaces are no
tensors, and the plan does not count them, so they are made small.
"""

import gc
import os
import sys
from functools import partial
from pathlib import Path

import torch
from record import append

from mpdemo import data
from mpdemo.measure.compare import model_and_batch
from mpdemo.measure.trial import Trial
from mpdemo.predict.counting import peak_of_a_step
from mpdemo.settings import Settings
from mpdemo.settings.cuts import block_names, resolve_cut
from mpdemo.tools.plan import own, own_scaling
from mpdemo.tools.plan.loading import of_course
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.request import PlanRequest
from mpdemo.tools.plan.roof import roof
from mpdemo.tools.plan.split import stage_slices
from mpdemo.training import setup
from mpdemo.world.env import World, where_am_i

sys.path.append(str(Path(__file__).parents[1]))
from programs import gpt_step  # noqa: E402

RESNET = {"rung": "single", "model": "resnet101", "norm": "batch", "image_size": 224, "optimizer": "sgd"}
COURSE = {"rung": "single", "model": "transformer", "optimizer": "adamw", "batch_size": 512}
GPT = {"batch": 512, "bf16": True}  # of scripts/gpt.py
GPTS = [GPT, GPT | {"recompute": True}]
LARGE = [RESNET | {"batch_size": 64}]
CUT = {"rung": "pipeline", "form": "one-process", "devices": 2}
STAGES = [
    COURSE | CUT | {"microbatches": 4},
    RESNET | CUT | {"microbatches": 16, "batch_size": 128, "cut": "layer2.3"},
]
# KiB; without it, 64 to 92 MiB more were measured on an H100 in cases with matrix products
WORKSPACE = ":16:8"
WITHIN = 0.05


def planned(s, number) -> float:
    """Return the bytes that a plan gives checked settings: on one device, or on a stage of a cut model."""
    facts = data.load(s.dataset, s.data, s.image_size, s.seed)
    images = {
        "channels": facts.channels,
        "image_size": s.image_size,
        "classes": facts.classes,
        "norm": s.norm,
    }
    shape = facts.channels, s.image_size, s.image_size
    model = OwnModel(s.model, shape, function=partial(of_course, s.model, **images))
    optimizer = {"sgd": "momentum"}.get(s.optimizer, s.optimizer)  # this course's SGD has momentum
    request, parts = PlanRequest(model, s.batch_size, optimizer=optimizer), s.microbatches
    if s.rung == "single":
        return own.replicated(request, parts=(parts,)).memory
    size = s.batch_size // parts
    chain = own_scaling.chain(own.steps_of(request, size, held=True), size, roof("h100"))
    slices = stage_slices(resolve_cut(block_names(s.model), s.cut, s.devices), len(chain))
    received = [0, parts * chain[slices[0][1] - 1].crossing]
    # all are in flight
    return own.stage_peaks(request, chain, slices, [parts] * s.devices, received)[number]


def row(settings, world, number=0):
    """What is counted and what is predicted of one device."""
    gc.collect()  # the trial before
    trial = Trial(Settings(**settings), world, *model_and_batch(Settings(**settings)))
    counted = dict(zip(trial.devices, peak_of_a_step(trial), strict=False))[world.device]
    return {
        "case": settings | {"stage": number},
        "counted": sum(counted),
        "predicted": planned(trial.s, number),
    }


def row_of_gpt(way, device):
    """The row of the GPT to take home, in bf16."""
    gc.collect()
    counted = sum(peak_of_a_step(gpt_step.Steps(device, **way))[0])
    return {
        "case": {"model": "gpt"} | way,
        "counted": counted,
        "predicted": gpt_step.planned(**way, on=device.type),
    }


def row_of_stage(settings, gpu, number):
    """The row of one of two stages: it lies on the GPU, and the other one on the CPU."""
    devices = [torch.device("cpu")] * 2
    devices[number] = gpu.device
    setup.local_devices = lambda world, count: devices
    return row(settings, World(device=devices[number]), number)


def main():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE  # read when the first matrix product is computed
    gpu = where_am_i()
    # half a ResNet-101 on the CPU takes minutes with one
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    on_gpu = gpu.device.type == "cuda"
    rows = [row(settings, gpu) for settings in [COURSE, *LARGE * on_gpu]]
    rows += [row_of_gpt(way, gpu.device) for way in GPTS]
    rows += [row_of_stage(settings, gpu, number) for settings in STAGES if on_gpu for number in range(2)]
    append(rows, sys.argv[1])
    off = [each for each in rows if abs(each["predicted"] / each["counted"] - 1) > WITHIN]
    sys.exit(f"more than {WITHIN:.0%} from the plan: {off}" if off else 0)


if __name__ == "__main__":
    main()
