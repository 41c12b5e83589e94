"""Start processes on this machine under torchrun; report what goes wrong in one line; end with the parent.

    python -m mpdemo.world.launch 2 -m mpdemo.labs.hello

As a program it is a process of its own that calls `start`.
"""

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import tempfile

import psutil

from mpdemo.errors import UserError
from mpdemo.world.failures import first_failure, read_message
from mpdemo.world.versions import check_version

PARENT = "MPDEMO_STARTED_BY_PARENT"  # tells the processes that `start` launched its number; it prints their errors
PYTHONS = ("py", "Py", "pt_", "torchrun")  # how the name of a torchrun's process begins
ADDRESSES = 4_000_000  # KiB that importing PyTorch maps; with less it aborts without a word that names the limit
PR_SET_PDEATHSIG = 1  # prctl: the signal that a process gets when its parent dies


def import_pytorch(with_torchvision=False, with_optimizers=False):
    """Import torch; explain the error where it is missing, too old, or does not fit torchvision."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] // 1024
    if 0 <= limit < ADDRESSES:
        raise UserError(f"ulimit -v {limit} is too small for PyTorch; do: ulimit -v unlimited, or {ADDRESSES} at least")
    gc.disable()  # the search for garbage would take a fifth of the imports, and find none
    try:
        import torch

        check_version("torch", torch.__version__)  # first: an old one may lack what follows
        if with_optimizers:
            import torch._dynamo
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


def prepare_signals():
    """Hold SIGUSR1 back until the training can obey it, and end with the parent. Call this before PyTorch's import.

    SIGUSR1 asks for a checkpoint and an end; by default it kills. A process that `start` or a torchrun launched ends
    silently when its parent is killed, also where the parent was gone before this call.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if PARENT in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


def end_with_parent():
    """End when the launcher is killed: torchrun would leave its processes behind. Nothing to do under srun or alone."""
    if PARENT not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    be_killed_with_parent()
    if _parent_is_gone():
        os._exit(1)


def be_killed_with_parent():
    """Ask the system to kill this process when its parent ends, also after an exec (``preexec_fn`` of a child)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _parent_is_gone() -> bool:
    """Whether this process was left to one that takes in orphans. In a container process 1 may be torchrun itself."""
    if PARENT in os.environ:
        return os.getppid() != int(os.environ[PARENT])
    try:
        parent = psutil.Process(os.getppid())
        return parent.name() == "systemd" or (parent.pid == 1 and not parent.name().startswith(PYTHONS))
    except psutil.NoSuchProcess:
        return True


def end(status=0):
    """End this process with an exit status, when all that it wrote is closed.

    Python would first take PyTorch's modules apart, which takes a second of a core in each process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def free_port() -> int:
    """Return a port of 127.0.0.1 that no process has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun_arguments(command, processes) -> list[str]:
    """Return torchrun's arguments for ``python COMMAND`` in `processes` processes of this machine.

    The rendezvous is static: the dynamic one prints tracebacks when a training ends, though all is well.
    """
    launcher = [f"--nproc-per-node={processes}", "--nnodes=1", "--node-rank=0"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [*launcher, *([] if is_program(command) else ["--no-python", sys.executable]), *for_torchrun(command)]


def is_program(command) -> bool:
    """Whether torchrun starts a command as it is: a module or a file, not an option of Python such as ``-c``."""
    return command[0] == "-m" or command[0].endswith(".py")


def for_torchrun(command) -> list[str]:
    """Return a command as torchrun passes it on unchanged: it reads ``$$`` and ``${local_rank}`` as its own."""
    return [argument.replace("$", "$$") for argument in command]


def start(command, processes) -> int:
    """Run ``python COMMAND`` in `processes` processes under torchrun on this machine; return the exit status.

    When one of them fails, torchrun ends the others; the rank and its error are reported in one line. SIGUSR1 is
    passed on to the processes, which write a checkpoint and end with exit status 3.
    """
    import_pytorch()
    os.environ |= {PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"}
    logging.disable(logging.ERROR)  # what torchrun logs of a failed process is reported below, in one line
    try:
        with tempfile.TemporaryDirectory(prefix="mpdemo-") as logs:  # torchrun would leave one of its own
            arguments = torchrun_arguments(["-m", "mpdemo.world.rank", *command], processes)
            return run_torchrun([f"--log-dir={logs}", *arguments], processes)
    finally:
        logging.disable(logging.NOTSET)


def run_torchrun(arguments, processes) -> int:
    """Run torchrun in this process, and report the rank that failed; return the exit status."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    signal.signal(signal.SIGUSR1, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # in a job's shell it was held back (prepare_signals)
    try:
        run(parse_args(arguments))
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
    return 0


def pass_on(number, frame):
    """Pass a signal on to this process's children. torchrun would, but kills them 30 s later."""
    for child in psutil.Process().children():
        child.send_signal(number)


if __name__ == "__main__":
    try:
        sys.exit(start(sys.argv[2:], int(sys.argv[1])))
    except UserError as error:
        print(f"mpdemo: {error}", file=sys.stderr)
        sys.exit(error.status)
