"""train_ddp.py killed in a save, with a damaged newest checkpoint, at the time limit: it resumes and ends the same."""

import re
import shutil

import pytest
import torch
from test_scripts import SCRIPTS, launch, losses

WITHIN = 1e-3  # of the last loss and the weights: not every kernel adds in the same order each time
KILL = "            state['steps'] == 120 and (output.truncate(1000), os.kill(os.getpid(), 9))\n"
SIGNAL = "        done == 70 and os.kill(os.getpid(), signal.SIGUSR1)\n"
# what happens -> a text of the script, what is put before it, and the first step that the resumed run logs
CASES = {
    "killed-in-a-save": ("            os.fsync(", KILL, 64),
    "damaged": ("            os.fsync(", "", 64),
    "time-limit": ("        optimizer.step()\n", SIGNAL, 80),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run, and its losses."""
    folder = shutil.copytree(SCRIPTS, tmp_path_factory.mktemp("whole") / "scripts")
    return folder, losses(launch(folder, "train_ddp.py", "whole"))


@pytest.mark.parametrize("case", CASES)
def test_train_ddp_resumes_and_ends_as_if_undisturbed(whole, case):
    (folder, expected), (text, before, first) = whole, CASES[case]
    launch(folder, "train_ddp.py", case, changes=[(text, before + text)], fails=case == "killed-in-a-save")
    if case == "damaged":
        content = bytearray((folder / "damaged-120.pt").read_bytes())
        content[len(content) // 2] ^= 255
        (folder / "damaged-120.pt").write_bytes(content)
    printed = launch(folder, "train_ddp.py", case)
    assert ("damaged-120.pt is damaged" in printed) == (case == "damaged")
    assert int(re.search(r"step (\d+):", printed)[1]) == first
    one, other = (
        torch.load(folder / f"{name}-120.pt", map_location="cpu")["model"] for name in ("whole", case)
    )
    apart = max((one[name] - other[name]).abs().max().item() for name in one)
    print(
        f"{case}: weights differ by at most {apart}, last losses {losses(printed)[-1]} and {expected[-1]}"
    )
    assert apart < WITHIN and losses(printed)[-1] == pytest.approx(expected[-1], abs=WITHIN)
