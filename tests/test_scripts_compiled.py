"""The scripts to take home with torch.compile: the gradients of eager mode, and a signal in the middle of compiling."""

import re
import shutil
import signal
from pathlib import Path

import pytest
from home_scripts import SCRIPTS, change, launch, shorten
from worker_jobs import signal_while_compiling

GRADIENTS = Path(__file__).parent / "programs" / "compiled_gradients.py"
TOLERANCE = 1e-4  # of a gradient, relative


@pytest.fixture
def small(tmp_path):
    """A copy of the folder with a short text."""
    small = Path(shutil.copytree(SCRIPTS, tmp_path / "scripts"))
    shorten(small)
    return small


def compare_gradients(folder, script, *backend):
    """Compute a batch's gradients on two ranks, eager and compiled; all must be equal, and none 0."""
    shutil.copy(GRADIENTS, folder)
    printed = launch(folder, GRADIENTS.name, script, *backend, processes=2, seconds=300)
    differences = re.findall(r"^(\S+) norm ([\d.e+-]+), differs by ([\d.e+-]+)$", printed, re.M)
    assert len(differences) > 10 and all(float(norm) > 0 and float(by) < TOLERANCE for _, norm, by in differences)


def test_compiled_gradients_are_those_of_eager_mode_with_tensor_parallelism(small):
    """The embedding's was exactly 0: a compiled block passes none back through a tensor that is still on its way."""
    compare_gradients(small, "train_fsdp_tp", "aot_eager")


@pytest.mark.nightly
def test_compiled_gradients_are_those_of_eager_mode_also_of_adapters(small):
    compare_gradients(small, "train_fsdp_tp")
    compare_gradients(small, "train_fsdp")
    launch(small, "train_fsdp.py", processes=2)
    compare_gradients(small, "finetune_lora")


@pytest.mark.nightly
def test_a_signal_during_a_compilation_does_not_reach_the_compiler(small, tmp_path):
    """torchrun and Slurm signal all processes; a training whose compiler has died would wait for it."""
    script = small / "train_fsdp.py"
    script.write_text(script.read_text().replace("BF16 = COMPILE =", "COMPILE = True\nBF16 ="))
    change(small / "job.py", [("LOOK = 10", "LOOK = 1")])
    status, printed = signal_while_compiling(signal.SIGTERM, small, tmp_path / "compiled", script.name)
    assert status == 0 and list(small.glob("train_fsdp-[12]/.metadata")), printed
