"""``python -m mpdemo train``: start one training, with as many processes as its rung wants.

Every rung on one machine (``--processes`` starts torchrun for you)::

    python -m mpdemo train --rung single         --model convnet --epochs 4 --out runs/single
    python -m mpdemo train --rung data_parallel  --model convnet --epochs 4 --devices 2
    python -m mpdemo train --rung ddp            --model resnet50 --dataset folder --data PATH --processes 2
    python -m mpdemo train --rung model_parallel --model resnet50 --cut layer2.3 --processes 2
    python -m mpdemo train --rung model_parallel --model resnet50 --form one-process --devices 2
    python -m mpdemo train --rung pipeline       --model transformer --microbatches 8 --schedule 1f1b --processes 2
    python -m mpdemo train --rung pipeline       --model resnet50 --form one-process --microbatches 8 --devices 2

The same by hand, and on several nodes of a cluster::

    torchrun --standalone --nproc-per-node 2 -m mpdemo train --rung ddp --model convnet
    srun --ntasks-per-node 4 python -m mpdemo train --rung ddp --model resnet50   # MASTER_ADDR, MASTER_PORT exported
"""

import argparse
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from mpdemo import arguments
from mpdemo.errors import UserError
from mpdemo.failures import first_failure, read_message, report
from mpdemo.settings import checked

PARENT = "MPDEMO_STARTED_BY_PARENT"  # set for processes that `start` launched: it speaks for them


def add_arguments(parser):
    """Add the options of ``train``; the launch lines stand below them in the help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = __doc__.split("\n\n", 1)[1]
    arguments.add_arguments(parser)


def main(args) -> int:
    """Check the settings, then train here or start the processes that do."""
    settings = arguments.from_args(args)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        import_pytorch()
        inside = world_size_of_launcher()
        if inside is not None:
            return work(checked(settings, inside))
    settings = checked(settings)
    if settings.form == "one-process":
        return work(settings)
    import_pytorch()
    check_gpus(settings.processes)
    return start(["-m", "mpdemo", "train", *settings.arguments()], settings.processes)


def world_size_of_launcher():
    """The world size that torchrun or srun gave this process, None where neither started it."""
    from mpdemo.env import read_launcher

    values = read_launcher(os.environ)
    return None if values["launcher"] == "none" else values["world_size"]


def check_gpus(processes):
    """Refuse more processes than GPUs, where there are GPUs, before anything is started."""
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else None
    if visible is not None and processes > visible:
        raise UserError(
            f"{processes} processes need {processes} GPUs, {visible} visible; "
            f"--processes {visible}, or CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )


def work(settings) -> int:
    """Train in this process; its error, if any, is reported with its rank."""
    prepare_signals()
    import_pytorch()
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    from mpdemo.env import claim_cores, process_group, where_am_i
    from mpdemo.train import train

    world = None
    try:
        world = where_am_i()
        claim_cores(world, 1 if settings.form == "per-device" else settings.devices)
        with process_group(world):
            return train(settings, world)
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun reads it and names the rank
            ErrorHandler().record_exception(error)
        report(error, world, PARENT in os.environ)
        sys.stdout.flush()
        sys.stderr.flush()
        # not sys.exit: tearing down a broken process group may hang, and the others are waiting for this end
        os._exit(2 if isinstance(error, UserError) else 1)


def prepare_signals():
    """Keep SIGUSR1, which asks for a checkpoint and an end, until the training can obey: by default it kills.

    A process started by a parent ends without words when the parent is interrupted or killed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if PARENT in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG, the signal when the parent dies


def import_pytorch():
    """Import torch and torchvision; explain the error of two that do not fit together.

    Raises
    ------
    UserError
        With the remedy.
    """
    try:
        import torch  # noqa: F401
        import torchvision  # noqa: F401
    except (RuntimeError, ImportError, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"torch and torchvision do not fit together or are not installed ({first}); "
            "install both from the same index: pip install --force-reinstall torch torchvision"
        ) from None


def start(command, processes) -> int:
    """Run ``python COMMAND`` in `processes` processes under torchrun on this machine; return the exit status.

    When one of them fails, torchrun ends the others; the rank and its error are said in one line. SIGUSR1 is passed
    on to the processes, which write a checkpoint and end with exit status 3.
    """
    import_pytorch()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ |= {PARENT: "1", "OMP_NUM_THREADS": "1"}
    signal.signal(signal.SIGUSR1, pass_on)
    logging.disable(logging.ERROR)  # what torchrun says of a failed process is said below, in one line
    try:
        run(parse_args(["--standalone", "--nproc-per-node", str(processes), *command]))
    except ChildFailedError as failed:
        rank, failure = first_failure(failed.failures)
        message = read_message(failure)
        if failure.exitcode == 2:
            raise UserError(message.removeprefix("UserError: ")) from None
        if failure.exitcode == 3:
            return 3
        print(f"mpdemo: rank {rank} of {processes} failed: {message}", file=sys.stderr)
        return 1
    except SignalException as stopped:
        print(f"mpdemo: {stopped.sigval.name}: all {processes} processes ended", file=sys.stderr)
        return 128 + stopped.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def pass_on(number, frame):
    """Hand a signal on to this process's children. torchrun would, but kills them 30 s later."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            os.kill(int(child), number)
