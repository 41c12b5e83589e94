"""What several test files share: a throw-away Slurm cluster, and a project folder of their own."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace

import pytest
from xdist.scheduler import LoadFileScheduling

from mpdemo import paths
from mpdemo.__main__ import main
from mpdemo.errors import UserError
from mpdemo.tools.cluster import Cluster

sys.path.insert(0, str(Path(__file__).parent))
import setup_system  # noqa: E402
import visible  # noqa: E402

pytest_plugins = ["skips", "jpegs", "slowest", "ending"]
# a machine with one core runs them all, slowly
os.environ.setdefault("PYTHONWARNINGS", "ignore:This DataLoader will create")  # more workers than cores
os.environ.setdefault("MPDEMO_CORES", str(max(2, len(os.sched_getaffinity(0)))))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores
SLURM = ("slurm-wlm", "munge")  # Debian's packages
SHARED_CLUSTER = pytest.StashKey()
visible.hide_gpus()


class NotebooksApart(LoadFileScheduling):
    """Keep a file's tests in one worker, since they share fixtures; but each notebook's run is a unit of its own.

    All of them in one worker would take longest of all. Not by ``--dist loadgroup``: with pytest 9.2, xdist 3.8 loses
    the groups without a word.
    """

    def _split_scope(self, nodeid):
        return nodeid if "the_saved_outputs[" in nodeid else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config, log):
    return NotebooksApart(config, log)


def pytest_configure_node(node):
    """Give every worker of xdist the one cluster that they share; it lives in the process that started them."""
    stash, only_gpu = node.config.stash, all(name.startswith("tests/gpu") for name in node.config.args)
    if only_gpu or setup_system.missing(*SLURM):
        return
    if SHARED_CLUSTER not in stash:
        stash[SHARED_CLUSTER] = Cluster.up(nodes=4)
    shared = stash[SHARED_CLUSTER]
    node.workerinput["cluster"] = {"environ": shared.environ, "network": shared.network}


def pytest_unconfigure(config):
    if shared := config.stash.get(SHARED_CLUSTER, None):
        shared.down()


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest, so that all workers are busy to the end."""
    longest = ["jobs_slurm", "scripts", "notebooks", "same", "exercises", "plan_own_models"]
    longest += ["plan_choose", "train_gpt"]
    order = {f"test_{name}.py": place for place, name in enumerate(longest)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def need(*packages):
    """Skip the test if Debian packages are missing, and print the line that installs them; in CI it fails."""
    absent = setup_system.missing(*packages)
    if absent:
        line = f"missing {', '.join(absent)}; enable with: {setup_system.install_line(absent)}"
        (pytest.fail if setup_system.in_ci() else pytest.skip)(line)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder():
    """This run's own folder for temporary files; at its end nothing of the package may be left there."""
    folder = tempfile.mkdtemp(prefix="tests-")
    # after multiprocessing's own folder in it
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    yield
    left = sorted(path.name for path in Path(folder).glob("mpdemo-*"))
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def slurm_programs():
    """Only where Debian's Slurm is installed."""
    need(*SLURM)


@pytest.fixture(scope="session")
def shared_cluster(slurm_programs, pytestconfig):
    """Four nodes for the whole test run. Ask for `cluster` instead: it also points the clients at them.

    Other workers' jobs may run or wait there. A test that breaks something, fills the nodes or looks at the queue
    starts a cluster of its own.
    """
    shared = getattr(pytestconfig, "workerinput", {}).get("cluster")
    if shared:
        yield SimpleNamespace(**shared)
        return
    with Cluster.up(nodes=4) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster, monkeypatch):
    """A real Slurm in reach, with four nodes."""
    monkeypatch.setenv("SLURM_CONF", shared_cluster.environ["SLURM_CONF"])
    return shared_cluster


@pytest.fixture
def process_group():
    """A group of this process alone."""
    import torch.distributed as dist  # not every worker needs it

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def gpu_autocast(monkeypatch):
    """Autocast for CUDA that believes in a GPU, so that fake tensors get the types it gives there."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)


@pytest.fixture
def no_slurm(monkeypatch):
    """No Slurm in reach: sbatch is not found."""
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **options: None if name == "sbatch" else which(name, **options)
    )
    monkeypatch.delenv("SLURM_CONF", raising=False)


@pytest.fixture
def no_cluster(monkeypatch):
    """No throw-away Slurm: its programs are missing."""

    def up(**_):
        raise UserError("no throw-away cluster without slurmd")

    monkeypatch.setattr(Cluster, "up", up)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project with the site files, in which a test's jobs and scripts are written."""
    shutil.copytree(paths.root() / "slurm" / "sites", tmp_path / "slurm" / "sites")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.delenv("MPDEMO_SITE", raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def run_once():
    """Run Python in the project's root, for at most `timeout` seconds; returns the completed process."""

    def run(*words, timeout=800, **environment):
        command, env = [sys.executable, *words], os.environ | environment
        return subprocess.run(
            command, cwd=paths.root(), env=env, capture_output=True, text=True, timeout=timeout
        )

    return run


@pytest.fixture
def run_mpdemo(run_once):
    """Run ``python -m mpdemo`` as a user does."""
    return functools.partial(run_once, "-m", "mpdemo", timeout=120)


@pytest.fixture
def call_mpdemo(capfd):
    """Run a command of ``python -m mpdemo`` in this process, which has imported all; returns the completed process."""

    def call(*words):
        capfd.readouterr()  # of what came before
        try:
            status = main([*map(str, words)])
        except SystemExit as end:
            status = end.code
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return call
