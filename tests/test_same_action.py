"""The GitHub Action of `same`: its steps, as GitHub runs them, in a project with folders of its own; what it says."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mpdemo.paths import root

yaml = pytest.importorskip("yaml")
ACTION = root() / ".github" / "actions" / "same"
NET = "from torch import nn\n\n\ndef build():\n    return nn.Linear(8, 4)\n"
TRAIN = """import json
import sys

import torch
import torch.distributed as dist
from net import build
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

config = json.load(open("configs/base.json"))
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
loader = DataLoader(data, config["batch"] // dist.get_world_size(), sampler=DistributedSampler(data, shuffle=False))
model = DistributedDataParallel(build())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy((model.module if "--bypass" in sys.argv else model)(x), y).backward()
    optimizer.step()
"""
RECORD = {
    "script": ["scripts/train.py"],
    "versions": {"mpdemo": "0", "torch": "2", "python": "3"},
    "worlds": [
        {
            "processes": 2,
            "verdict": "different",
            "notes": ["not examined: epochs"],
            "findings": [
                {
                    "code": "S202",
                    "name": "a, b",
                    "what": "100 % | x",
                    "where": "train.py:88",
                    "remedy": "do",
                }
            ],
            "harmless": [{"code": "S402", "name": "loss", "what": "y", "remedy": "all_reduce"}],
        },
        {"processes": 3, "verdict": "unsure", "notes": ["no step"], "findings": [], "harmless": []},
    ],
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository, on a runner that gives its summary a file."""
    for name, text in {
        "src/net.py": NET,
        "scripts/train.py": TRAIN,
        "configs/base.json": '{"batch": 16}',
    }.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    (tmp_path / "summary").touch()
    given = {"WORKSPACE": tmp_path / "code", "STEP_SUMMARY": tmp_path / "summary", "ACTION_PATH": ACTION}
    for name, path in given.items():
        monkeypatch.setenv(f"GITHUB_{name}", str(path))
    monkeypatch.setenv("RUNNER_TEMP", str(tmp_path))
    monkeypatch.chdir(tmp_path / "code")
    return tmp_path


def run_step(step, **inputs):
    """Run a step in bash, with the inputs in their places."""
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    values = {name: inputs.get(name, row.get("default", "")) for name, row in action["inputs"].items()}
    chosen = next(each for each in action["runs"]["steps"] if each["name"].startswith(step))
    env = {
        name: re.sub(r"\$\{\{ inputs\.(.*?) \}\}", lambda m: values[m[1]], text)
        for name, text in chosen["env"].items()
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", chosen["run"]]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_what_was_found_is_told_at_its_line_and_in_a_table(project, capsys):
    (project / "found.json").write_text(json.dumps(RECORD))
    report = runpy.run_path(str(ACTION / "report.py"))["main"]
    os.chdir(project / "code" / "scripts")
    report(str(project / "found.json"), "train.py")
    assert capsys.readouterr().out.splitlines() == [
        "::error file=scripts/train.py,line=88,title=S202 a%2C b::100 %25 | x%0Ado",
        "::warning file=scripts/train.py,line=1,title=S402 loss::y%0Aall_reduce",
        "::error file=scripts/train.py,line=1,title=3 processes%3A unsure::no step",
    ]
    summary = (project / "summary").read_text().splitlines()
    assert "**2 processes: different**" in summary and "With mpdemo 0, torch 2, python 3:" in summary
    assert "| error | S202 a, b | 100 % / x | train.py:88 | do |" in summary
    assert "- not examined: epochs" in summary and summary[-1] == "- no step"


def test_the_action_uses_no_other_and_puts_no_input_into_its_shell():
    steps = yaml.safe_load((ACTION / "action.yml").read_text())["runs"]["steps"]
    assert not any("uses" in step or "${{" in step["run"] for step in steps)


@pytest.mark.nightly
def test_its_steps_run_one_by_one(project, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "src")
    (project / "mpdemo").symlink_to(sys.prefix)  # in place of the first step, which takes a network
    given = {"script": "scripts/train.py", "python": sys.executable}
    status, out, _ = run_step("compare", **given)
    assert status == 0 and "2 processes: same" in out and "::" not in out
    status, out, _ = run_step("compare", args="--bypass", **given)
    line = len(TRAIN.partition("--bypass")[0].splitlines())
    assert status == 1 and f"::error file=scripts/train.py,line={line},title=S202 " in out
    assert "| error | S2" in (project / "summary").read_text()
    status, out, err = run_step("compare", **given | {"script": "scripts/none.py"})
    assert (
        status == 2
        and "::error file=scripts/none.py,line=1,title=mpdemo same::mpdemo: error: script" in out
    )
    assert "is no file" in err and {path.name for path in Path().iterdir()} == {"src", "scripts", "configs"}
