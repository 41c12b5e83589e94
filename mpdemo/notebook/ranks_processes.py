"""The processes of `start_ranks`, from the kernel's side: ipyparallel's controller and one engine per rank.

They end with the kernel, however that ends (`ranks_engine.main`). Nothing is written to ``~/.ipython``: their files
lie in a temporary folder, which is removed once all ranks have joined.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import ipyparallel
import psutil
from traitlets.config import Config

from mpdemo.errors import UserError
from mpdemo.notebook import ranks_engine
from mpdemo.paths import source
from mpdemo.world.launch import PARENT, free_port
from mpdemo.world.processes import end_processes, is_running, start_time

START_LIMIT = 60.0  # s
HEARTBEAT = ["--HeartMonitor.period=300", "--HeartMonitor.max_heartmonitor_misses=1000"]  # ms; ranks register faster
QUIET = ["--log-level=ERROR"]


@dataclass
class Rank:
    """One rank: ipyparallel's view of it, its process (number and start time), the files with its output and stack."""

    view: ipyparallel.DirectView
    pid: int
    started: float
    output: TextIO
    stack: TextIO
    process: psutil.Process

    @property
    def alive(self) -> bool:
        return is_running(self.pid, self.started)

    def last_words(self) -> str:
        """How the process ended."""
        with contextlib.suppress(psutil.Error):
            status = self.process.wait(timeout=1)
            if status is not None and status < 0:
                return f"its process was killed ({signal.Signals(-status).name})"
            if status is not None:
                return f"its process exited with status {status}"
        return "its process ended"

    def read_stack(self) -> str:
        """Ask the process for the stack of its threads; return "" if it does not answer within 1 s."""
        self.stack.seek(0, os.SEEK_END)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, ranks_engine.STACK_SIGNAL)
        report, deadline = "", time.monotonic() + 1
        while time.monotonic() < deadline:
            time.sleep(0.05)
            more = self.stack.read()
            if report and not more:
                break
            report += more
        return report


class RankProcesses:
    """The living ranks of one process group, and ipyparallel's controller."""

    def __init__(self, world_size):
        self.folder = Path(tempfile.mkdtemp(prefix="mpdemo-ranks-"))
        self.client, self.ranks = None, []
        self.cluster = _cluster(self.folder)
        try:
            self._start(world_size)
        except BaseException as error:
            reason = self._reason() or f"{type(error).__name__}: {error}"
            self.stop()
            if not isinstance(error, Exception):  # an interrupt
                raise
            raise UserError(f"the ranks did not start: {reason}") from None
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, world_size):
        """Start controller and engines; let each engine join the process group as one rank."""
        self.cluster.start_cluster_sync(n=world_size)
        self.client = self.cluster.connect_client_sync()
        self.client.wait_for_engines(world_size, timeout=START_LIMIT, interactive=False)
        port, joined = free_port(), []
        for rank, number in enumerate(self.client.ids):
            files = [str(self.folder / f"{name}-{rank}") for name in ("output", "stack")]
            view = self.client[number]
            joined.append((view, files, view.apply_async(ranks_engine.join, rank, world_size, port, *files)))
        processes = {launcher.pid: launcher.process for launcher in self._launchers()}
        for view, files, answer in joined:
            pid = answer.get(timeout=START_LIMIT)
            output, stack = (open(file, encoding="utf-8", errors="replace") for file in files)  # noqa: SIM115
            self.ranks.append(Rank(view, pid, start_time(pid), output, stack, processes[pid]))

    def _launchers(self) -> list:
        """ipyparallel's launchers: of the controller and of each engine, as far as they were started."""
        engines = self.cluster.engine_set.launchers.values() if self.cluster.engine_set else []
        return [launcher for launcher in (self.cluster.controller, *engines) if launcher and launcher.pid > 0]

    def _reason(self) -> str:
        """The last line that a controller or engine wrote before it failed."""
        texts = [launcher.get_output().strip() for launcher in self._launchers()]
        return next((text.splitlines()[-1] for text in texts if text), "")

    def stop(self):
        """End all processes, at once: a rank that waits in gloo obeys no other signal than SIGKILL."""
        if self.client:
            self.client.close(linger=0)
        pids = [launcher.pid for launcher in self._launchers()]
        for pid in list(pids):
            with contextlib.suppress(psutil.NoSuchProcess):
                pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        end_processes([(pid, start_time(pid)) for pid in pids], signal.SIGKILL)
        for rank in self.ranks:
            rank.output.close()
            rank.stack.close()
        self.ranks = []


def _cluster(folder) -> ipyparallel.Cluster:
    """Describe a cluster of processes on this machine whose files lie in `folder`."""
    config = Config()
    module = [sys.executable, "-m", ranks_engine.__name__]
    path = os.pathsep.join(filter(None, [str(source()), os.environ.get("PYTHONPATH")]))
    environment = {"IPYTHONDIR": str(folder), "PYTHONPATH": path, PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"}
    engine_args = ["--IPEngine.enable_nanny=False", "--HistoryManager.enabled=False", *QUIET]
    config.LocalControllerLauncher.controller_cmd = [*module, "controller"]
    config.LocalEngineLauncher.engine_cmd = [*module, "engine"]
    config.LocalEngineLauncher.engine_args = engine_args
    config.LocalEngineSetLauncher.delay = 0.0
    config.LocalProcessLauncher.environment = environment
    return ipyparallel.Cluster(
        config=config,
        profile_dir=str(folder),
        load_profile=False,
        cluster_file="",
        controller_args=["--IPController.use_threads=True", *HEARTBEAT, *QUIET],
        delay=0,
        shutdown_atexit=False,
        log_level=logging.CRITICAL,
    )
