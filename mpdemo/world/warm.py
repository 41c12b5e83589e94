"""A process that has imported PyTorch and forks: the processes of a job then start in 0.1 s, not in 2 to 4 s.

It belongs to one kernel (or other Python), which starts it with its first local job, and ends with it. It imports
PyTorch alone and never uses it: no threads, no GPU, nothing that a forked process could not inherit. What it forks is
a supervisor (`mpdemo.world.supervisor`), whose ranks are then forked from that.
"""

import atexit
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path

from mpdemo.world import supervisor

# PyTorch and Python read these when they start: where one has changed, another server is needed.
READ_AT_START = ("OMP", "MKL", "KMP", "TORCH", "PYTORCH", "PYTHON", "LD_")
SOURCE = str(Path(__file__).resolve().parents[2])
SERVE = "import sys; sys.path.insert(0, sys.argv.pop()); from mpdemo.world.warm import serve; sys.path.pop(0); serve()"
LOCK = threading.Lock()
SERVERS = {}  # the one server of this process: the variables that it was started with -> connection, process


def supervise(order, pipe, log) -> int:
    """Let the server fork a job's supervisor; return its number."""
    environment = json.loads(order.read_text())["environment"]
    with LOCK:
        try:
            return _ask(_server(environment), order, pipe, log)
        except OSError:  # it was killed: try a new one, once
            SERVERS.clear()
            return _ask(_server(environment), order, pipe, log)


def _ask(server, order, pipe, log) -> int:
    socket.send_fds(server, [str(order).encode()], [pipe, log])
    answer = server.recv(64)
    if not answer:
        raise OSError("the process that starts jobs has ended")
    return int(answer)


def _server(environment) -> socket.socket:
    """Return the connection to the server, started where there is none that suits the environment."""
    started_with = tuple(sorted(row for row in environment.items() if row[0].startswith(READ_AT_START)))
    if started_with not in SERVERS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-c", SERVE, SOURCE]
        with theirs:
            nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(command, stdin=theirs, **nowhere, env=environment, start_new_session=True)
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
        import torch  # noqa: F401
    except Exception:  # each job starts a Python of its own, which says why
        program = None
    while True:
        order, descriptors, _, _ = socket.recv_fds(connection, 4096, 2)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            _become_supervisor(connection, program, Path(os.fsdecode(order)), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def _become_supervisor(connection, program, order, pipe, log):
    """In a forked child: take the job's streams, and supervise it."""
    try:
        os.setsid()
        connection.close()
        for descriptor, stream in ((pipe, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, stream)
        os.closerange(3, 256)
        supervisor.supervise(json.loads(order.read_text()) | {"run_program": program})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def run_program(command):
    """Run ``python -u COMMAND`` in this forked process: a module, a file or a text; then end the process."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv[:] = command[1:] if command[0] == "-m" else command
    try:
        status = _run(command)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _run(command) -> int:
    """Run the program as Python would; return its exit status."""
    status = 0
    try:
        if command[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.modules.pop(command[1], None)  # the process that was forked may have it
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            sys.path.insert(0, "")
            sys.argv[:] = ["-c", *command[2:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(command[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.path.insert(0, str(Path(command[0]).parent.resolve()))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = _status_of(end)
    except BaseException as error:
        place = error.__traceback__
        while place.tb_next and place.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            place = place.tb_next  # the program's own lines are enough
        sys.excepthook(type(error), error.with_traceback(place), place)
        status = 1
    threading._shutdown()  # waits for the program's own threads, as the end of Python does
    atexit._run_exitfuncs()
    return status


def _status_of(end) -> int:
    """Return the exit status of a SystemExit, whose text is printed."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 255
    print(end.code, file=sys.stderr)
    return 1
