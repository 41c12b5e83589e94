"""What a process of a training run does around its loop: check the settings, join the world, train, end by a status."""

import argparse
import os
import time

from mpdemo.errors import UserError
from mpdemo.options import Parser, add_options, options_from
from mpdemo.settings import Settings, checked
from mpdemo.settings.rules import check_compiler
from mpdemo.world.launch import ERRORS, end, import_pytorch, report

MANNERS = 10.0  # s for which the others wait while rank 0 reports: torchrun ends all ranks as soon as one has failed
PATIENCE = 1800.0  # s for which ranks wait for one that writes a large checkpoint, or lists a large folder of images


def run_script(doc, rung, train):
    """Run a rung's file as a program: read its options, then `run_process`."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"python -m mpdemo.rungs.{rung}", description=doc, formatter_class=layout)
    add_options(parser, Settings)
    args = parser.parse_args()
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
    except Exception as error:
        if ERRORS in os.environ or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            report(error, None)
        else:
            time.sleep(MANNERS)
        end(status_of(error))
    run_process(settings, train)


def run_process(settings, train):
    """Join the world, call ``train(settings, place)`` and end this process by the status that it returns."""
    from mpdemo.world.env import claim_cores, process_group, where_am_i

    place = None
    try:
        place = where_am_i(devices=devices_of_a_process(settings))
        check_precision(settings.precision)
        claim_cores(place, devices_of_a_process(settings))
        with process_group(place, timeout=PATIENCE):
            status = train(settings, place)
    except Exception as error:
        status = status_of(error)
        report(error, place)
    end(status)  # tearing down a broken process group may hang, and the others are waiting for this end


def status_of(error) -> int:
    """Return the exit status that tells an error."""
    return error.status if isinstance(error, UserError) else 1


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


def check_precision(precision):
    """Refuse bf16 on a GPU that has no units for it."""
    import torch

    on_gpu = precision == "bf16" and torch.cuda.is_available()
    if on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise UserError(f"--precision bf16: {name} has no bf16 units (they came with Ampere); allowed there: fp32")
