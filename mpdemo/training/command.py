"""``mpdemo train``, which starts a rung's file, and what that file does before its training.

On one machine (``--processes`` does torchrun's work), the same by hand, and on several nodes of a cluster::

    mpdemo train --rung ddp --model convnet --epochs 4 --processes 2 --out runs/ddp
    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.ddp --model convnet
    srun --ntasks-per-node 4 mpdemo train --rung ddp --model resnet50   # MASTER_ADDR, MASTER_PORT exported

A rung is a script in mpdemo/rungs; ``python -m mpdemo.rungs.pipeline --help`` shows the launch lines of that one.
"""

import argparse
import os
import runpy
import sys
import time
from importlib import import_module

from mpdemo.errors import Parser, UserError
from mpdemo.options import add_options, options_from
from mpdemo.settings import Settings, checked
from mpdemo.settings.rules import check_compiler
from mpdemo.world.launch import ERRORS, end, import_pytorch, report, start
from mpdemo.world.processes import check_room, prepare_signals

MANNERS = 10.0  # s for which the others wait while rank 0 reports: torchrun ends all ranks as soon as one has failed
PATIENCE = 1800.0  # s for which ranks wait for one that writes a large checkpoint, or lists a large folder of images


def add_arguments(parser):
    """Add the options of ``train``; the launch lines stand below them in the help."""
    parser.epilog = __doc__.split("\n\n", 1)[1]
    add_options(parser, Settings)


def main(args) -> int:
    """Check the settings, then run the rung's file: in this process, or in as many as it wants."""
    prepare_signals()
    settings, world_size = settings_of(args)
    rung = f"mpdemo.rungs.{settings.rung}"
    if world_size is not None or settings.form == "one-process":
        import_pytorch(needs_torchvision(settings))
        sys.argv[1:] = settings.arguments()
        runpy.run_module(rung, run_name="__main__", alter_sys=True)  # it ends this process
    check_room(settings.processes, settings.oversubscribe)
    import_pytorch(needs_torchvision(settings))
    check_gpus(settings)
    import_module("mpdemo.run")  # once, not in each process
    return start(["-m", rung, *settings.arguments()], settings.processes)


def run_script(doc, rung, train):
    """Run a rung's file as a program: read its options, join the world, call ``train(settings, place)``, end."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"python -m mpdemo.rungs.{rung}", description=doc, formatter_class=layout)
    add_options(parser, Settings)
    args, settings, place = parser.parse_args(), None, None
    try:
        if getattr(args, "rung", rung) != rung:
            raise UserError(f"--rung {args.rung} is not this file's; start python -m mpdemo.rungs.{args.rung}")
        args.rung = rung
        settings, world_size = settings_of(args)
        if world_size is None and settings.processes > 1:
            raise UserError(
                f"rung {rung} needs {settings.processes} processes, and this is one; start them by torchrun "
                f"--standalone --nproc-per-node {settings.processes} -m mpdemo.rungs.{rung} or mpdemo train"
            )
        import_pytorch(needs_torchvision(settings))
        from mpdemo.world.env import claim_cores, process_group, where_am_i

        place = where_am_i(devices=devices_of_a_process(settings))
        check_precision(settings.precision)
        claim_cores(place, devices_of_a_process(settings))
        with process_group(place, timeout=PATIENCE):
            status = train(settings, place)
    except Exception as error:
        status = error.status if isinstance(error, UserError) else 1
        first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
        if settings or first or ERRORS in os.environ:
            report(error, place)
        else:
            time.sleep(MANNERS)
    end(status)  # tearing down a broken process group may hang, and the others are waiting for this end


def settings_of(args) -> tuple:
    """Return the checked settings of the options, and the world size of the launcher, None where there is none."""
    settings, world_size = options_from(args, Settings), None
    if settings.compile:
        check_compiler()
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        import_pytorch()
        from mpdemo.world.env import read_launcher

        launcher = read_launcher(os.environ)
        world_size = None if launcher["launcher"] == "none" else launcher["world_size"]
    return checked(settings, world_size), world_size


def needs_torchvision(settings) -> bool:
    """Whether a training run takes its model or its images from torchvision."""
    return settings.dataset != "digits" or settings.model not in ("toy", "convnet", "transformer")


def devices_of_a_process(settings) -> int:
    """How many devices each process drives."""
    return 1 if settings.form == "per-device" else settings.devices


def check_gpus(settings):
    """Refuse more devices than GPUs, or a precision that they lack, before anything is started."""
    import torch

    processes, visible = settings.processes, torch.cuda.device_count()
    if torch.cuda.is_available() and processes > visible:
        raise UserError(
            f"{processes} processes need {processes} GPUs, {visible} visible; start fewer, or set "
            "CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    check_precision(settings.precision)


def check_precision(precision):
    """Refuse bf16 on a GPU that has no units for it."""
    import torch

    on_gpu = precision == "bf16" and torch.cuda.is_available()
    if on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise UserError(f"--precision bf16: {name} has no bf16 units (they came with Ampere); allowed there: fp32")
