"""A training in this process: check what it needs, join its world, report its errors with the rank."""

import argparse
import os
import time

from mpdemo.errors import Parser, UserError
from mpdemo.options import add_options, options_from
from mpdemo.rules import check_compiler
from mpdemo.settings import Settings, checked
from mpdemo.training.board import check_tensorboard
from mpdemo.world.failures import report
from mpdemo.world.launch import PARENT, end, import_pytorch

MANNERS = 10.0  # s for which the others let rank 0 say what is wrong
PATIENCE = 1800.0  # s for which ranks wait for one that writes a large checkpoint, or lists a large folder of images


def run_script(doc, rung, train):
    """Run a rung's file as a program: options, world, training, exit status. Rank 0 says what is wrong."""
    parser = Parser(prog=f"python -m mpdemo.rungs.{rung}", description=doc)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, Settings)
    try:
        args = parser.parse_args()
        require_rung(args, rung)
        settings = options_from(args, Settings)
        check_tools(settings)
        world_size = world_size_of_launcher()
        settings = checked(settings, world_size)
        if world_size is None and settings.processes > 1:
            raise UserError(
                f"rung {rung} needs {settings.processes} processes, and this is one; start them by torchrun "
                f"--standalone --nproc-per-node {settings.processes} -m mpdemo.rungs.{rung} or python -m mpdemo train"
            )
    except UserError as error:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0" or PARENT in os.environ:
            report(error, None, started_by_parent=False)
        else:
            time.sleep(MANNERS)  # the first that ends lets torchrun end the others, which may have had no time to speak
        end(error.status)
    end(work(settings, train))


def require_rung(args, rung):
    """Refuse another ``--rung`` than the file's own."""
    if getattr(args, "rung", rung) != rung:
        raise UserError(
            f"--rung {args.rung} is not this file's; allowed: {rung}, or python -m mpdemo.rungs.{args.rung}"
        )
    args.rung = rung


def check_tools(settings):
    """Refuse what needs a program or package that is not here."""
    if settings.compile:
        check_compiler()
    if settings.tensorboard:
        check_tensorboard()


def world_size_of_launcher():
    """The world size that torchrun or srun gave this process, None where neither started it."""
    from mpdemo.world.env import read_launcher

    values = read_launcher(os.environ)
    return None if values["launcher"] == "none" else values["world_size"]


def needs_torchvision(settings) -> bool:
    """Whether a training takes its model or its images from torchvision."""
    return settings.dataset != "digits" or settings.model not in ("toy", "convnet", "transformer")


def devices_of_a_process(settings) -> int:
    """How many devices each process drives."""
    return 1 if settings.form == "per-device" else settings.devices


def check_gpus(settings):
    """Refuse more devices than GPUs, or a precision that they lack, before anything is started."""
    import torch

    if not torch.cuda.is_available():
        return
    processes, devices, visible = settings.processes, devices_of_a_process(settings), torch.cuda.device_count()
    if processes * devices > visible:
        each, fewer = (f" with {devices} devices each", "fewer --devices") if devices > 1 else ("", None)
        raise UserError(
            f"{processes} processes{each} need {processes * devices} GPUs, {visible} visible; "
            f"{fewer or f'--processes {visible}'}, or CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    check_precision(settings.precision)


def check_precision(precision):
    """Refuse bf16 on a GPU that has no units for it."""
    import torch

    if (
        precision == "bf16"
        and torch.cuda.is_available()
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        name = torch.cuda.get_device_name()
        raise UserError(f"--precision bf16: {name} has no bf16 units (they came with Ampere); allowed there: fp32")


def work(settings, train) -> int:
    """Call ``train(settings, place)`` in this process's place of the world; return the exit status."""
    import_pytorch(needs_torchvision(settings), with_optimizers=True)
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    from mpdemo.world.devices import claim_cores
    from mpdemo.world.env import process_group, where_am_i

    place = None
    try:
        devices = devices_of_a_process(settings)
        place = where_am_i(devices=devices)
        check_precision(settings.precision)
        claim_cores(place, devices)
        with process_group(place, timeout=PATIENCE):
            return train(settings, place)
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun reads it and names the rank
            ErrorHandler().record_exception(error)
        report(error, place, PARENT in os.environ)
        # here: tearing down a broken process group may hang, and the others are waiting for this end
        end(error.status if isinstance(error, UserError) else 1)
