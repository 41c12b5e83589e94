"""A process that has imported PyTorch and forks: the processes of a job then start in 0.1 s, not in 2 to 4 s.

It belongs to one kernel (or other Python), which starts it with its first local job or ranks, and ends with it. It
imports PyTorch alone and never uses it: no threads, no GPU, nothing that a forked process could not inherit. What it
forks is a supervisor (`mpdemo.world.supervisor`), whose ranks are then forked from that.
"""

import atexit
import contextlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

from mpdemo import paths
from mpdemo.front_end import waiting_for
from mpdemo.world import supervisor

# PyTorch and Python read these when they start: where one has changed, another server is needed.
READ_AT_START = ("OMP", "MKL", "KMP", "TORCH", "PYTORCH", "PYTHON", "LD_")
# the same for jobs and cells, which so share a server
OF_RANKS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
SERVE = "import sys; sys.path.insert(0, sys.argv.pop()); from mpdemo.world.warm import serve; sys.path.pop(0); serve()"
IMPORT_SECONDS = 300.0  # limit for the import of PyTorch, for which the first order waits
LOCK = threading.Lock()
# the one server of this process: the variables that it was started with -> connection, process
SERVERS = {}


def supervise(order, log, inputs=()) -> tuple:
    """Let the server fork an order's supervisor and ranks; return its number, and a pipe whose end ends the job."""
    watched, pipe = os.pipe()
    owner = open(pipe, "wb")  # noqa: SIM115
    try:
        with (
            open(watched) as owned,
            open(log, "wb") as file,
            LOCK,
            waiting_for(lambda: "the import of PyTorch"),
        ):
            return _ask(order, [owned.fileno(), file.fileno(), *inputs]), owner
    except (
        BaseException
    ):  # also an interrupt: an answer that comes later would be taken for that to the next order
        for server, process in SERVERS.values():
            server.close()
            process.kill()
            process.wait()
        SERVERS.clear()
        owner.close()
        raise


def _ask(order, descriptors) -> int:
    file = Path(order["scratch"], "order.json")  # it may be too long for a message
    file.write_text(json.dumps(order))
    for _ in range(2):  # a server that was killed is replaced
        server = _server(order)
        with contextlib.suppress(ConnectionError):
            socket.send_fds(server, [bytes(file)], descriptors)
            if answer := server.recv(64):
                return int(answer)
        SERVERS.clear()
    raise OSError("the process that starts jobs has ended")


def _server(order) -> socket.socket:
    """Return the connection to the server, started where there is none that suits the order."""
    environment = order["environment"]
    started_with = tuple(sorted(row for row in environment.items() if row[0].startswith(READ_AT_START)))
    if started_with not in SERVERS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(IMPORT_SECONDS)
        command = [sys.executable, "-P", "-c", SERVE, str(paths.source())]
        with theirs:
            nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            # the order's own ends with its job
            environment = environment | {"TMPDIR": tempfile.gettempdir()}
            process = subprocess.Popen(
                command, stdin=theirs, **nowhere, env=environment, start_new_session=True
            )
        SERVERS.clear()  # the connection to another one is closed, so it ends
        SERVERS[started_with] = ours, process
    return SERVERS[started_with][0]


def serve():
    """Import PyTorch, then fork a supervisor for each order, until the owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects what ends
    connection = socket.socket(fileno=os.dup(0))
    program = run_program
    try:
        import torch.distributed.checkpoint
        import torch.distributed.fsdp
        import torch.distributed.pipelining  # noqa: F401 - with torch._dynamo, which every optimizer imports
    except Exception:  # each job starts a Python of its own, which says why
        program = None
    tempfile.tempdir = None  # PyTorch has asked for it; each rank finds its own
    while True:
        order, descriptors, _, _ = socket.recv_fds(connection, 4096, 250)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            _become_supervisor(connection, program, Path(os.fsdecode(order)), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def _become_supervisor(connection, program, order, pipe, log, *inputs):
    """In a forked child: take the job's streams, supervise it, and write down how it ended."""
    try:
        os.setsid()
        connection.close()
        for descriptor, stream in ((pipe, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, stream)
        job = json.loads(order.read_text())
        end = supervisor.supervise(job | {"run_program": program, "inputs": inputs, "owner": [0]})
        status, scratch = Path(job["status"]), Path(job["scratch"])
        if end["how"] == "orphaned" or scratch not in status.parents:
            shutil.rmtree(scratch, ignore_errors=True)  # a process that was killed leaves files there
        if status.parent.exists():
            status.with_suffix(".part").write_text(json.dumps(end))
            status.with_suffix(".part").replace(status)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def run_program(command):
    """Run ``python COMMAND`` in this forked process, a module, a file or a text; end the process as Python would."""
    for stream in (sys.stdout, sys.stderr):
        # a line is one write: ranks share the log
        stream.reconfigure(line_buffering=True, write_through=False)
    if "numpy" in sys.modules:  # Python's own random numbers differ after a fork
        sys.modules["numpy"].random.seed()
    status = 0
    try:
        _run(*command)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        place = error.__traceback__
        while place.tb_next and place.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            place = place.tb_next  # the program's own lines are enough
        sys.excepthook(type(error), error.with_traceback(place), place)
        status = 1
    try:
        threading._shutdown()  # waits for the program's own threads, as the end of Python does
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 255)


def _run(program, *arguments):
    sys.argv[:] = [program, *arguments]
    if program == "-c":
        sys.path.insert(0, "")
        sys.argv[1:] = arguments[1:]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif program == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = arguments
        sys.modules.pop(arguments[0], None)  # the process that was forked may have it
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).parent.resolve()))
        runpy.run_path(program, run_name="__main__")
