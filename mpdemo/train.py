"""``mpdemo train``: one training, in this process or in as many as its strategy wants.

On one machine (``--processes`` does torchrun's work), the same by hand, and on several nodes of a cluster::

    mpdemo train --rung ddp --model convnet --epochs 4 --processes 2 --out runs/ddp
    torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.ddp --model convnet
    srun --ntasks-per-node 4 mpdemo train --rung ddp --model resnet50   # MASTER_ADDR, MASTER_PORT exported

A rung is a script in mpdemo/rungs; ``python -m mpdemo.rungs.pipeline --help`` shows the launch lines of that one.
"""

from mpdemo.errors import UserError
from mpdemo.options import add_options
from mpdemo.settings import Settings
from mpdemo.training.process import check_precision, needs_torchvision, run_process, settings_of
from mpdemo.world.launch import import_pytorch, start
from mpdemo.world.processes import check_room, prepare_signals


def add_arguments(parser):
    """Add the options of ``train``; the launch lines stand below them in the help."""
    parser.epilog = __doc__.split("\n\n", 1)[1]
    add_options(parser, Settings)


def main(args) -> int:
    """Check the settings, then train: in this process, or in as many as the rung wants."""
    prepare_signals()
    settings, world_size = settings_of(args)
    alone = world_size is not None or settings.form == "one-process"
    if not alone:
        check_room(settings.processes, settings.oversubscribe)
    import_pytorch(needs_torchvision(settings))
    if not alone:
        check_gpus(settings)
    from mpdemo.run import train  # here, once: the processes that are started have it then

    if alone:
        run_process(settings, train)  # it ends this process
    return start(["-m", f"mpdemo.rungs.{settings.rung}", *settings.arguments()], settings.processes)


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
