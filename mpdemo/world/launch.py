"""Start processes on this machine: torchrun, whatever asks for it, and one line for whatever goes wrong."""

import logging
import os
import signal
import sys
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.world.failures import first_failure, read_message

PARENT = "MPDEMO_STARTED_BY_PARENT"  # set for processes that `start` launched: it speaks for them


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
