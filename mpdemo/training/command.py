"""``python -m mpdemo train``: start one training, with as many processes as its rung wants.

Every rung on one machine (``--processes`` starts torchrun for you)::

    python -m mpdemo train --rung single         --model convnet --epochs 4 --out runs/single
    python -m mpdemo train --rung data_parallel  --model convnet --epochs 4 --devices 2
    python -m mpdemo train --rung ddp            --model resnet50 --dataset folder --data PATH --processes 2
    python -m mpdemo train --rung model_parallel --model resnet50 --cut layer2.3 --processes 2
    python -m mpdemo train --rung model_parallel --model resnet50 --form one-process --devices 2
    python -m mpdemo train --rung pipeline       --model transformer --microbatches 8 --schedule 1F1B --processes 2
    python -m mpdemo train --rung pipeline       --model resnet50 --form one-process --microbatches 8 --devices 2
    python -m mpdemo train --rung hybrid         --model transformer --processes 4 --replicas 2
    python -m mpdemo train --rung hybrid         --model transformer --processes 4 --replicas 2 --sharded
    python -m mpdemo train --rung fsdp           --model transformer --processes 2 --reshard never
    python -m mpdemo train --rung tensor         --model transformer --processes 2 --sequence-parallel
    python -m mpdemo train --rung tensor         --model transformer --processes 4 --replicas 2

A rung is a script in mpdemo/rungs. The same by hand, and on several nodes of a cluster::

    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.ddp --model convnet
    srun --ntasks-per-node 4 python -m mpdemo train --rung ddp --model resnet50   # MASTER_ADDR, MASTER_PORT exported
"""

import argparse
import os
from importlib import import_module

from mpdemo.options import add_options, options_from
from mpdemo.settings import Settings, checked
from mpdemo.training.script import check_gpus, check_tools, needs_torchvision, work, world_size_of_launcher
from mpdemo.world.launch import import_pytorch, prepare_signals, start
from mpdemo.world.processes import check_room


def add_arguments(parser):
    """Add the options of ``train``; the launch lines stand below them in the help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = __doc__.split("\n\n", 1)[1]
    add_options(parser, Settings)


def main(args) -> int:
    """Check the settings, then train here or start the processes that do."""
    settings = options_from(args, Settings)
    check_tools(settings)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        prepare_signals()
        import_pytorch(needs_torchvision(settings))
        world_size = world_size_of_launcher()
        if world_size is not None:
            return work(checked(settings, world_size), train)
    settings = checked(settings)
    if settings.processes == 1 and settings.form == "one-process":
        prepare_signals()
        return work(settings, train)
    check_room(settings.processes, settings.oversubscribe)
    import_pytorch(needs_torchvision(settings))
    check_gpus(settings)
    return start(["-m", f"mpdemo.rungs.{settings.rung}", *settings.arguments()], settings.processes)


def train(settings, place) -> int:
    """Train in this process, by the rung's file; return the exit status."""
    return import_module("mpdemo.run").train(settings, place)
