"""``python -m mpdemo train``: start one training, with as many processes as its rung wants.

Every rung on one machine (``--processes`` starts torchrun for you)::

    python -m mpdemo train --rung single         --model convnet --epochs 4 --out runs/single
    python -m mpdemo train --rung data_parallel  --model convnet --epochs 4 --devices 2
    python -m mpdemo train --rung ddp            --model resnet50 --dataset folder --data PATH --processes 2
    python -m mpdemo train --rung model_parallel --model resnet50 --cut layer2.3 --processes 2
    python -m mpdemo train --rung model_parallel --model resnet50 --form one-process --devices 2
    python -m mpdemo train --rung pipeline       --model transformer --microbatches 8 --schedule 1f1b --processes 2
    python -m mpdemo train --rung pipeline       --model resnet50 --form one-process --microbatches 8 --devices 2
    python -m mpdemo train --rung hybrid         --model transformer --processes 4 --replicas 2
    python -m mpdemo train --rung hybrid         --model resnet50 --form one-process --devices 2 --replicas 2
    python -m mpdemo train --rung hybrid         --model transformer --processes 4 --replicas 2 --sharded
    python -m mpdemo train --rung fsdp           --model transformer --processes 2 --reshard never
    python -m mpdemo train --rung tensor         --model transformer --processes 2 --sequence-parallel
    python -m mpdemo train --rung tensor         --model transformer --processes 4 --replicas 2

The same by hand, and on several nodes of a cluster::

    torchrun --standalone --nproc-per-node 2 -m mpdemo train --rung ddp --model convnet
    srun --ntasks-per-node 4 python -m mpdemo train --rung ddp --model resnet50   # MASTER_ADDR, MASTER_PORT exported
"""

import argparse
import os

from mpdemo.errors import UserError
from mpdemo.options import add_options, options_from
from mpdemo.savings import check_compiler
from mpdemo.settings import Settings, checked
from mpdemo.training.tensorboard_log import check_tensorboard
from mpdemo.world.failures import report
from mpdemo.world.launch import PARENT, end, import_pytorch, prepare_signals, start
from mpdemo.world.processes import check_room

PATIENCE = 1800.0  # s for which ranks wait for one that writes a large checkpoint, or lists a large folder of images


def add_arguments(parser):
    """Add the options of ``train``; the launch lines stand below them in the help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = __doc__.split("\n\n", 1)[1]
    add_options(parser, Settings)


def main(args) -> int:
    """Check the settings, then train here or start the processes that do."""
    settings = options_from(args, Settings)
    if settings.compile:
        check_compiler()
    if settings.tensorboard:
        check_tensorboard()
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        prepare_signals()
        import_pytorch(needs_torchvision(settings))
        world_size = world_size_of_launcher()
        if world_size is not None:
            return work(checked(settings, world_size))
    settings = checked(settings)
    if settings.processes == 1 and settings.form == "one-process":
        prepare_signals()
        return work(settings)
    check_room(settings.processes, settings.oversubscribe)
    import_pytorch(needs_torchvision(settings))
    check_gpus(settings.processes, devices_of_a_process(settings))
    check_precision(settings.precision)
    return start(["-m", "mpdemo", "train", *settings.arguments()], settings.processes)


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


def check_gpus(processes, devices=1):
    """Refuse more devices than GPUs, where there are GPUs, before anything is started."""
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else None
    if visible is not None and processes * devices > visible:
        each, fewer = (f" with {devices} devices each", "fewer --replicas or --devices") if devices > 1 else ("", None)
        raise UserError(
            f"{processes} processes{each} need {processes * devices} GPUs, {visible} visible; "
            f"{fewer or f'--processes {visible}'}, or CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )


def check_precision(precision):
    """Refuse fp16 on a CPU before anything is started."""
    import torch

    from mpdemo.parallel.savings import precision_of

    precision_of(precision, "cuda" if torch.cuda.is_available() else "cpu")


def work(settings) -> int:
    """Train in this process; its error, if any, is reported with its rank."""
    import_pytorch(needs_torchvision(settings), with_optimizers=True)
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    from mpdemo.training.loop import train
    from mpdemo.world.cores import claim_cores
    from mpdemo.world.env import process_group, where_am_i

    world = None
    try:
        devices = devices_of_a_process(settings)
        world = where_am_i(devices=devices)
        claim_cores(world, devices)
        with process_group(world, timeout=PATIENCE):
            return train(settings, world)
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun reads it and names the rank
            ErrorHandler().record_exception(error)
        report(error, world, PARENT in os.environ)
        # here: tearing down a broken process group may hang, and the others are waiting for this end
        end(error.status if isinstance(error, UserError) else 1)
