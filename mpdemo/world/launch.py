"""Start the processes of a training run on this machine, say in one line what went wrong, and leave none behind."""

import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from packaging.version import Version

from mpdemo.errors import UserError
from mpdemo.world import supervisor, warm

OLDEST = {"torch": "2.11", "torchvision": "0.26"}  # as in pyproject.toml
ADDRESSES = 4_000_000  # KiB that importing PyTorch maps; with less it aborts without a word that names the limit
AFTER_THE_LOST = 1.0  # s that who lost a rank waits: its sockets close before its own end can be seen
ERRORS = "MPDEMO_ERRORS"  # the folder where a rank that `start` began leaves its line; the first one is printed
# CUDA does not survive a fork: where there is a GPU, each rank starts a Python of its own
FORKS = not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))


def import_pytorch(with_torchvision=False):
    """Import torch; explain the error where it is missing, too old, or does not fit torchvision."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] // 1024
    if 0 <= limit < ADDRESSES:
        raise UserError(f"ulimit -v {limit} is too small for PyTorch; do: ulimit -v unlimited, or {ADDRESSES} at least")
    if ERRORS in os.environ:  # this process was begun by one that did it
        return
    gc.disable()  # the search for garbage would take a fifth of the imports, and find none
    try:
        import torch

        check_version("torch", torch.__version__)  # first: an old one may lack what follows
        import torch._dynamo  # an optimizer would in its first step

        if with_torchvision:
            import torchvision
    except (RuntimeError, ImportError, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"torch and torchvision do not fit together or are not installed ({first}); "
            "install both from the same index: pip install --force-reinstall torch torchvision"
        ) from None
    finally:
        gc.enable()
    if with_torchvision:
        check_version("torchvision", torchvision.__version__)


def check_version(package, version):
    """Refuse a version older than the course needs."""
    if Version(Version(version).base_version) < Version(OLDEST[package]):  # without the local part of 2.11.0+cu126
        raise UserError(
            f"{package} {version} is too old; allowed: >={OLDEST[package]}; "
            f"load a newer module (setup in the site file), or pip install --upgrade {package}"
        )


def end(status=0):
    """End this process with an exit status; Python would first spend a second on taking PyTorch's modules apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def report(error, world):
    """Say on stderr why this process ends, or in the file that `start` reads to say it once for all ranks."""
    rank = f"rank {world.rank} of {world.world_size}" if world else "a rank"
    if isinstance(error, UserError):
        line = f"mpdemo: error: {error}"
    elif lost_a_peer(error):
        time.sleep(AFTER_THE_LOST)  # the first rank to end is the one that is named
        line = f"mpdemo: {rank} lost another rank and ends"
    else:
        line = f"mpdemo: {rank} failed: {type(error).__name__}: {error}"
        traceback.print_exception(error)
    if ERRORS in os.environ:
        Path(os.environ[ERRORS], os.environ["RANK"]).write_text(line)
    else:
        print(line, file=sys.stderr)


def lost_a_peer(error) -> bool:
    """Whether an error only reports that another rank is gone, so that it is not this rank's own."""
    # BrokenPipeError says that this process's output is no longer read, as behind ``| head``
    messages = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return not isinstance(error, BrokenPipeError) and any(message in str(error) for message in messages)


def start(command, processes) -> int:
    """Run ``python COMMAND`` in `processes` processes of this machine, as torchrun would; return the exit status."""
    import_pytorch()
    folder = tempfile.mkdtemp(prefix="mpdemo-")  # a TemporaryDirectory would end with the first forked process
    job = {"name": "mpdemo", "command": command, "processes": processes, "torchrun": True, "grace": 5.0, "quiet": True}
    job |= {"cwd": os.getcwd(), "environment": os.environ | {"OMP_NUM_THREADS": "1", ERRORS: folder}}
    try:
        end = supervisor.supervise(job | {"run_program": warm.run_program if FORKS else None})
        rank, status, line = end["rank"], end["exit_status"], Path(folder, str(end["rank"]))
        if number := end["signal"]:
            print(f"mpdemo: {signal.Signals(number).name}: all {processes} processes ended", file=sys.stderr)
            return 128 + number
        if status not in (0, 3):
            how = f"mpdemo: rank {rank} of {processes} ended with exit status {status}"
            print(line.read_text() if line.exists() else how, file=sys.stderr)
        return status if status in (0, 2, 3) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
