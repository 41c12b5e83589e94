"""``mpdemo env``: every trouble is named with its remedy, also where PyTorch cannot be imported."""

import subprocess
import sys
from pathlib import Path

import pytest
import setup_system


@pytest.fixture
def quick_torch(tmp_path):
    """A stand-in that loads at once, for the tests of everything else."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    (folder / "torchvision.py").write_text("__version__ = '99'\n")
    (folder / "torch.py").write_text(
        "import types; __version__ = '99'; cuda = types.SimpleNamespace(device_count=lambda: 0)\n"
        "yes = lambda: True\n"
        "distributed = types.SimpleNamespace(is_available=yes, is_gloo_available=yes, is_nccl_available=yes)\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_a_sound_environment_is_all_ok(run_mpdemo):
    done = run_mpdemo("env", "--site", "generic")
    assert done.returncode == 0, done.stdout
    assert "[FAIL]" not in done.stdout
    for word in ("Python", "PyTorch", "devices", "Slurm", "site generic", "runs"):
        assert word in done.stdout


@pytest.mark.parametrize(
    "module, error, remedy",
    [
        ("torchvision", "RuntimeError('operator torchvision::nms does not exist')", "from the same index"),
        ("torch", "ModuleNotFoundError(\"No module named 'torch'\")", "pip install torch torchvision"),
        ("torch", "OSError('libcudart.so.12: cannot open shared object file')", "load its module"),
        ("torch", "ImportError('something new')", "reinstall both"),
    ],
)
def test_a_broken_pytorch_is_named_with_its_remedy(run_mpdemo, tmp_path, module, error, remedy):
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(f"raise {error}\n")
    done = run_mpdemo("env", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "[FAIL] PyTorch does not load" in done.stdout
    assert remedy in done.stdout
    assert "[OK]   runs are written" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_pytorch_that_is_too_old_is_refused(run_mpdemo, quick_torch):
    module = Path(quick_torch["PYTHONPATH"]) / "torch.py"
    module.write_text(module.read_text().replace("'99'", "'1.8.0+cu111'"))
    done = run_mpdemo("env", **quick_torch)
    assert (
        "[FAIL] PyTorch 1.8.0+cu111, torchvision 99: torch 1.8.0+cu111 is too old; allowed: >=2.11"
        in done.stdout
    )


def test_on_the_cluster(run_mpdemo, cluster, quick_torch):
    done = run_mpdemo("env", **quick_torch)
    assert done.returncode == 0, done.stdout
    assert "cluster throwaway, 4 nodes" in done.stdout and "site throwaway" in done.stdout
    done = run_mpdemo("env", "--site", "nowhere")
    assert done.returncode == 2
    assert "generic, jeanzay, jeanzay_a100, jupiter, " in done.stderr and "there are: " in done.stderr


def test_a_controller_that_is_down_and_files_that_are_not_there(
    run_mpdemo, slurm_programs, tmp_path, quick_torch
):
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=gone\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nNodeName=n1\nMessageTimeout=1\n"
    )
    done = run_mpdemo("env", SLURM_CONF=str(conf), MPDEMO_DATA="/nowhere", **quick_torch)
    assert done.returncode == 1 and "[FAIL] Slurm:" in done.stdout
    assert "[FAIL] data: MPDEMO_DATA=/nowhere" in done.stdout
    done = run_mpdemo("env", SLURM_CONF="/nowhere/slurm.conf", **quick_torch)
    assert done.returncode == 1
    assert (
        "[FAIL] Slurm: SLURM_CONF = '/nowhere/slurm.conf': no such file; do: unset SLURM_CONF"
        in done.stdout
    )


def test_missing_packages_are_named_with_the_line_that_installs_them(tmp_path):
    code = "import setup_system, os; os.getuid = lambda: 1000; setup_system.find = lambda name: None; "
    code += "raise SystemExit(setup_system.main())"
    folder = setup_system.__file__.rsplit("/", 1)[0]
    for ci, status in (("true", 1), ("", 0)):
        env = {"CI": ci, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == status
        assert "apt-get install --no-install-recommends slurm-wlm munge iproute2" in done.stdout
