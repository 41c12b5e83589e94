"""The throw-away Slurm cluster: real daemons, real jobs, and nothing left behind."""

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from worker_jobs import spec, until

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import load_site, submit
from mpdemo.tools.cluster import Cluster, isolation
from mpdemo.tools.cluster.daemons import Daemons, sweep
from mpdemo.world.processes import start_time


def slurm(cluster, *command):
    done = subprocess.run(
        command, env=os.environ | cluster.environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def processes_of(folder):
    """Number and name of the living processes that know a cluster's configuration, or have a file of it open."""
    return [
        (process.pid, process.info["name"])
        for process in psutil.process_iter(["name", "environ"])
        if str(folder) in f"{process.info['environ']} {open_files(process.pid)}" and start_time(process.pid)
    ]


def open_files(pid) -> list:
    """What a process has open, removed files too, which psutil leaves out."""
    with contextlib.suppress(OSError):
        return [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    return []


def test_nodes_have_what_was_asked(slurm_programs, tmp_path):
    with Cluster.up(nodes=2, cpus=8, gpus=2) as cluster:
        rows = slurm(cluster, "sinfo", "-h", "-N", "-o", "%N %P %c %G %T").splitlines()
        assert rows == ["node1 debug* 8 gpu:2 idle", "node2 debug* 8 gpu:2 idle"]
        command = ["srun", "-N2", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
        assert slurm(cluster, *command).split() == ["0,1", "0,1"]
        assert processes_of(cluster.folder)
    assert not cluster.folder.exists()
    assert processes_of(cluster.folder) == []


def test_a_slow_network_between_the_nodes(slurm_programs):
    """As root, where the kernel can; elsewhere a refusal that leaves nothing behind (see `temporary_folder`)."""
    try:
        cluster = Cluster.up(nodes=2, mbit=8)
    except UserError as refused:
        assert "--mbit 8" in str(refused)
        return
    with cluster:
        cluster.kill_node("node2")
        cluster.start_node("node2")
        for index in (1, 2):
            assert "tbf" in isolation.execute("tc", "qdisc", "show", "dev", f"{cluster.bridge}n{index}")


@pytest.mark.nightly
def test_a_preempted_job_says_so(slurm_programs, project, monkeypatch):
    site = dataclasses.replace(load_site("throwaway"), cores_per_node=4, gpus_per_node=0)
    with Cluster.up(nodes=1, cpus=4, gpus=0, network="none", urgent=True) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
        job = submit(spec("sleep", cpus_per_process=4), site)
        until(lambda: job.state == "running" and (job.out / "pids-0").exists())
        slurm(cluster, "sbatch", "-p", "urgent", "-c", "4", "-o", "/dev/null", "--wrap=true")
        assert job.wait(60) == "cancelled"
        assert job.reason == "a more urgent job took its nodes"


def test_localhost_is_another_machine_on_each_node(cluster):
    """With one shared network, MASTER_ADDR=localhost on two nodes passes wrongly."""
    assert cluster.network == isolation.choose()
    listen = "import socket,time; s=socket.socket(); s.bind(('', 23456)); s.listen()"
    listen += "; print('listens', flush=True); time.sleep(60)"
    call = "import socket; s=socket.socket(); s.settimeout(1); print('answer', s.connect_ex(('{}', 23456)))"
    command = ["srun", "-w", "node1", "python3", "-c", listen]
    server = subprocess.Popen(command, env=os.environ | cluster.environ, stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "listens\n"
    if cluster.network != "none":
        assert "answer 0" in slurm(cluster, "srun", "-w", "node2", "python3", "-c", call.format("node1"))
    refused = 111 if cluster.network == "namespaces" else 0
    assert f"answer {refused}" in slurm(
        cluster, "srun", "-w", "node2", "python3", "-c", call.format("localhost")
    )
    server.terminate()
    server.wait(30)


def test_run_gives_the_commands_status_and_cleans_up(slurm_programs, run_mpdemo):
    show = "echo $SLURM_CONF; sinfo -h -o '%P %D %c %G'; exit 7"
    done = run_mpdemo("cluster", "run", "--nodes", "1", "--", "sh", "-c", show)
    conf, row = done.stdout.splitlines()
    assert done.returncode == 7 and not Path(conf).exists()
    assert row == "debug* 1 96 gpu:4"
    assert "cluster of 1 nodes in " in done.stderr


ASKED = [pytest.param(sign, marks=pytest.mark.nightly) for sign in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("sign", [*ASKED, signal.SIGKILL])
def test_no_daemon_outlives_a_killed_run(slurm_programs, sign):
    command = [sys.executable, "-m", "mpdemo", "cluster", "run", "--nodes", "2", "--"]
    command += ["sh", "-c", "echo $SLURM_CONF; sleep 60"]
    # under nohup it would be ignored
    heed = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(command, cwd=paths.root(), preexec_fn=heed, **pipes)
    folder = Path(process.stdout.readline().strip()).parent
    network = re.search(r"NodeAddr=10\.(\d+)\.", (folder / "slurm.conf").read_text())
    bridge = f"{isolation.PREFIX}{network[1]}:" if network else "no-such-bridge"
    os.kill(process.pid, sign)
    process.wait(20)
    until(lambda: not folder.exists(), 20)  # after SIGKILL, the guard still works
    assert {name for _, name in processes_of(folder)} <= {"sh", "sleep"}
    assert bridge not in subprocess.check_output(["ip", "-o", "link"], text=True)
    for pid, _ in processes_of(folder):  # the command itself, which was not asked to end
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["t" * 100, "my files"])
def test_a_folder_that_slurm_cannot_use_is_refused(slurm_programs, tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with pytest.raises(UserError, match="Slurm cannot work in .*; do: another TMPDIR"):
        Cluster.up()
    assert os.listdir(tmp_path / name) == []


def test_a_command_that_does_not_end_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "PATIENCE", 0.1)
    with pytest.raises(UserError, match="sleep 5: .* timed out after 0.1 seconds"):
        isolation.execute("sleep", "5")
    with pytest.raises(UserError, match="sleep took over 0.1 s on the cluster in .*; do: "):
        Daemons(tmp_path, [], "none", 0).client("sleep", "5", seconds=0.1)


AS_ORDINARY_USER = """
import os, pwd, sys
import mpdemo.tools.cluster.command
from mpdemo.__main__ import main
if os.getuid() == 0:  # only now: root alone may be allowed to read the installed packages
    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_an_ordinary_user_can_have_a_cluster(slurm_programs):
    """As root, become nobody; else this is the ordinary user, who can read a copy of the project."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        shutil.copytree(
            paths.root() / "mpdemo", f"{home}/project/mpdemo", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copytree(paths.root() / "slurm", f"{home}/project/slurm")
        os.mkdir(f"{home}/tmp")
        for folder in (home, f"{home}/tmp"):
            os.chmod(folder, 0o777)
        command = [sys.executable, "-c", AS_ORDINARY_USER]
        command += [
            "cluster",
            "run",
            "--nodes",
            "2",
            "--",
            "srun",
            "-N2",
            "--qos=any",
            "--account=any",
            "whoami",
        ]
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "HOME": home, "TMPDIR": f"{home}/tmp"}
        done = subprocess.run(
            command, env=env, cwd=f"{home}/project", capture_output=True, text=True, timeout=60
        )
        users = set(done.stdout.split())
        assert len(users) == 1 and "root" not in users, done.stderr
        assert os.listdir(f"{home}/tmp") == []


def test_strays_of_a_cluster_are_ended(tmp_path):
    """What no daemon ends: a waiting client, and a process that left its job. Others are left alone."""
    own, job = Daemons(tmp_path, [], "none", 0).environ, {"SLURM_CLUSTER_NAME": "throwaway"}
    (tmp_path / "srun").symlink_to("/bin/sleep")
    strays = [
        subprocess.Popen([tmp_path / "srun", "60"], env=own),
        subprocess.Popen(["sleep", "60"], env=own | job),
    ]
    others = [
        subprocess.Popen(["sleep", "60"], env=env)
        for env in (own, job, job | {"SLURM_CONF": "/other.conf"})
    ]
    try:
        sweep(tmp_path)
        assert all(stray.wait(10) is not None for stray in strays)
        assert [other.poll() for other in others] == [None] * 3
    finally:
        for process in strays + others:
            process.kill()
            process.wait()
