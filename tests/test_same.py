"""`python -m mpdemo same`: right scripts pass, each planted fault is found under its name, nothing is left behind."""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from mpdemo.errors import UserError
from mpdemo.paths import root
from mpdemo.same import command, resume
from mpdemo.same.findings import TABLE
from mpdemo.same.watcher import Watcher

SCRIPTS = root() / "tests" / "same"
TAKE_HOME = root() / "notebooks" / "scripts" / "train_ddp.py"
DIGITS = root() / "mpdemo" / "data" / "digits.npz"
LINES = {  # of the base scripts, which faults change
    "sampler": "sampler = DistributedSampler(train, drop_last=True)",
    "loader": "loader = DataLoader(train, part, sampler=sampler, drop_last=True)",
    "set_epoch": "        sampler.set_epoch(epoch)\n",
    "model": "model = DistributedDataParallel(Net())",
    "optimizer": "torch.optim.AdamW(model.parameters(), lr=0.01)",
    "loss": "nn.functional.cross_entropy(model(x), y) / args.accumulate",
    "shown": "shown = mean(total)",
    "norm": "self.norm = nn.LayerNorm(16)",
}
SHORT = """class Short(DistributedSampler):
        def __iter__(self):
            return iter(list(super().__iter__())[: 56 - 8 * self.rank])

    sampler = Short(train, drop_last=True)"""
AUGMENTED = """class Augmented(TensorDataset):
    def __getitem__(self, k):
        return self.tensors[0][k] + 0.1 * torch.randn(8), self.tensors[1][k]


def data():"""


def line(name, new, *more) -> list:
    """Return the changes that put another text in the place of a line."""
    return [(LINES[name], new), *more]


# name: (script, arguments, changes, notes that are expected)
RIGHT = {
    "functions": ("plain.py", [], [], []),
    "accumulation": ("plain.py", ["--accumulate", "2"], [], []),
    "no seed": ("plain.py", [], [("    torch.manual_seed(rank)\n", "")], []),
    "batch of one process as an argument": (
        "plain.py",
        ["--batch-size", "{16}"],
        [("args.batch_size // world //", "args.batch_size //")],
        [],
    ),
    "FSDP2 as a class": ("sharded.py", ["--accumulate", "2"], [], []),
    "HSDP": ("sharded.py", ["--how", "hsdp", "--accumulate", "2"], [], []),
    "tensor parallel": ("sharded.py", ["--how", "tensor"], [], []),
    "a library's loop": ("loop.py", [], [], ["dropout"]),
    "BatchNorm": ("plain.py", [], line("norm", "self.norm = nn.BatchNorm1d(16)"), ["BatchNorm"]),
    "augmentation": (
        "plain.py",
        [],
        [("def data():", AUGMENTED), ("random_split(TensorDataset(x", "random_split(Augmented(x")],
        ["random augmentation"],
    ),
    "Lightning": ("lit.py", [], [], []),
    "another order": (
        "plain.py",
        [],
        line("loader", LINES["loader"].replace("=sampler", "=sampler if world > 1 else None, shuffle=world == 1")),
        ["another order"],
    ),
    "no DataLoader": (
        "plain.py",
        [],
        line("loader", "loader = [(x[rank::world], y[rank::world]) for x, y in DataLoader(list(train), 16)]"),
        [],
    ),
}
FAULTS = {
    "no sampler": ("plain.py", [], line("loader", "loader = DataLoader(train, part, shuffle=True)")),
    "no set_epoch": ("plain.py", [], line("set_epoch", "")),
    "another order per rank": ("plain.py", [], line("sampler", "sampler = DistributedSampler(train, seed=rank)")),
    "another order per rank, trained and validated": (
        "plain.py",
        [],
        [("manual_seed(1)", "manual_seed(1 + dist.get_rank())")],
    ),
    "another order per rank, trained and validated (no seed)": (
        "plain.py",
        [],
        [(", generator=torch.Generator().manual_seed(1)", ""), ("    torch.manual_seed(rank)\n", "")],
    ),
    "batch not divided": ("plain.py", [], [("args.batch_size // world //", "args.batch_size //")]),
    "unequal steps": ("plain.py", [], line("sampler", SHORT)),
    "wrapper missing": (
        "plain.py",
        [],
        line("model", "model = Net()\n    object.__setattr__(model, 'module', model)"),
    ),
    "wrapper bypassed": ("plain.py", [], line("loss", LINES["loss"].replace("model(x)", "model.module(x)"))),
    "gradients summed": ("plain.py", [], line("loss", LINES["loss"] + " * world")),
    "gradients divided twice": ("plain.py", [], line("loss", LINES["loss"] + " / world")),
    "accumulation saves nothing": ("plain.py", ["--accumulate", "2"], [("require_backward_grad_sync = last", "x = 1")]),
    "accumulation saves nothing (FSDP2)": (
        "sharded.py",
        ["--accumulate", "2"],
        [("self.model.set_requires_gradient_sync(last)", "pass")],
    ),
    "accumulation saves nothing (HSDP)": (
        "sharded.py",
        ["--how", "hsdp", "--accumulate", "2"],
        [("self.model.set_requires_all_reduce(last)", "pass")],
    ),
    "mean of means": (
        "loop.py",
        [],
        [('reduction="sum"', 'reduction="mean"'), ("model(**batch) / terms * dist.get_world_size()", "model(**batch)")],
    ),
    "loss of one rank": ("plain.py", [], line("shown", "shown = total")),
    "loss summed": ("plain.py", [], [("return value / dist.get_world_size()", "return value")]),
    "not finite": ("plain.py", [], line("loss", LINES["loss"] + " / 0")),
    "same file from every rank": (
        "plain.py",
        [],
        line("shown", LINES["shown"] + "\n        print(shown, file=open('log.txt', 'a'))"),
    ),
    "parameters without gradient": (
        "plain.py",
        [],
        line(
            "model",
            "model = DistributedDataParallel(Net(), find_unused_parameters=True)",
            ("self.out =", "self.more = nn.Linear(2, 2)\n        self.out ="),
        ),  # fmt: skip
    ),
    "parameters in no optimizer": (
        "plain.py",
        [],
        line("optimizer", LINES["optimizer"].replace("model.", "model.module.out.")),
    ),
    "every gradient zero": ("plain.py", [], line("loss", LINES["loss"] + " * 0")),
    "weights differ": ("plain.py", [], line("model", LINES["model"] + "\n    nn.init.normal_(model.module.out.bias)")),
    "first weights differ": ("plain.py", [], [("torch.manual_seed(rank)", "torch.manual_seed(world)")]),
    "learning rate changes": ("plain.py", [], line("optimizer", LINES["optimizer"].replace("0.01", "0.01 * world"))),
    "fails with several": (
        "plain.py",
        [],
        line("shown", LINES["shown"] + "\n        assert world == 1, 'only one process'"),
    ),
}
RESUMES = {  # name: (changes, what the notes say)
    "": ([], "stopped in step"),
    "order restarts": ([('= state["epoch"], state["batch"]', '= state["epoch"], 0')], ""),
    "step counted twice": ([('= state["epoch"], state["batch"]', '= state["epoch"], max(0, state["batch"] - 1)')], ""),
    "learning rate not restored": ([('        optimizer.load_state_dict(state["optimizer"])\n', "")], ""),
    "scheduler not restored": ([('        schedule.load_state_dict(state["schedule"])\n', "")], ""),
    "weights not restored": ([('        model.module.load_state_dict(state["model"])\n', "")], ""),
    "random state not restored": (
        [
            ('        torch.set_rng_state(state["chance"])\n', ""),
            ("self.norm(self.inside(x)).relu()", "nn.functional.dropout(self.norm(self.inside(x)).relu(), 0.1)"),
        ],
        "",
    ),
    "does not resume": ([('if os.path.exists("last.pt")', "if False")], ""),
    "no checkpoint": ([("if dist.get_rank() == 0", "if False")], ""),
    "printed loss differs": ([(" and not skip", "")], ""),
    "another world size not readable": (
        [
            ("state |= dict(", "state |= dict(world=dist.get_world_size(), "),
            ('state = torch.load("last.pt")', 'state = torch.load("last.pt")\n        assert state["world"] == world'),
            ("    signal.signal", "    # signal.signal"),
        ],
        "does not handle SIGTERM",
    ),
}


@pytest.fixture(scope="module")
def watcher():
    """One watcher for all scripts, which imports PyTorch once."""
    with Watcher(arguments(SCRIPTS / "plain.py")) as watcher:
        yield watcher


def arguments(*words):
    """Return the command's options for a script."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--timeout", "60", *map(str, words)])
    command.checked(args)
    return args


@pytest.fixture
def judge(watcher, tmp_path, monkeypatch):
    """Plant changes in a script; return the verdict on it."""
    folder = tmp_path / "not" / "too" / "near" / "project"  # what lies beside the folders above it is linked
    folder.mkdir(parents=True)
    shutil.copy(TAKE_HOME.with_name("digits.npz"), folder)
    monkeypatch.chdir(folder)

    def verdict(script, words, changes, resumed=False):
        text = (SCRIPTS / script).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / "train.py").write_text(text)
        watcher.aim(arguments("train.py", *words))
        found = resume.verdict(watcher, 2, 1) if resumed else command.verdicts_of(watcher, [1, 2])[0]
        command.show(found)
        assert sorted(path.name for path in folder.iterdir()) == ["digits.npz", "train.py"]
        return found

    return verdict


def names(verdict) -> list:
    """Return the names of what was found."""
    return [finding.name for finding in verdict["findings"]]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_the_same_training(judge, name):
    script, words, changes, notes = RIGHT[name]
    if script == "lit.py":
        pytest.importorskip("lightning")
    found = judge(script, words, changes)
    assert names(found) == []
    assert all(note in str(found["notes"]) for note in notes)
    if name == "tensor parallel":
        assert found["table"]["messages per step"] == ["0", "1"]  # of DTensors


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_under_its_name(judge, name):
    assert names(judge(*FAULTS[name])) == re.sub(r" \(.*\)", "", name).split(", ")


@pytest.mark.parametrize("name", RESUMES)
def test_the_first_difference_after_a_resume_is_named(judge, name):
    changes, note = RESUMES[name]
    found = judge("plain.py", [], changes, resumed=True)
    assert names(found) == ([name] if name else [])
    assert note in str(found["notes"])


def test_the_script_with_accelerate_is_the_same_training_in_another_order(judge, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SCRIPTS", TAKE_HOME.parent)
    found = judge("train_accelerate.py", [], [])
    assert names(found) == [] and "another order" in str(found["notes"])


NO_WRAPPER = """nn.ModuleDict({"module": make_model()})
    model.forward = model["module"].forward"""
FORGOTTEN = {  # of the script to take home: what is found without a line of it
    "no sampler": [("sampler=sampler,", "shuffle=True,")],
    "no set_epoch": [("        sampler.set_epoch(epoch)", "        pass")],
    "another order per rank, trained and validated": [(", torch.Generator().manual_seed(0))", ")")],
    "batch not divided": [("BATCH // world", "BATCH")],
    "wrapper missing": [("DistributedDataParallel(make_model().to(device))", NO_WRAPPER)],
    "loss summed": [(" / world / len(loader)", " / len(loader)")],
    "loss of one rank": [("        dist.all_reduce(totals)", "        # ")],
    "same file from every rank": [("        if rank == 0:\n", "        open('log', 'a')\n        if rank == 0:\n")],
}


@pytest.mark.parametrize("name", ["", *FORGOTTEN])
def test_each_line_of_the_script_to_take_home_is_missed(judge, name):
    assert names(judge(TAKE_HOME, [], FORGOTTEN.get(name, []))) == (name.split(", ") if name else [])


def test_a_sharded_checkpoint_is_read_by_another_number_of_processes(judge):
    assert names(judge(TAKE_HOME.with_name("train_fsdp.py"), [], [], resumed=True)) == []


def test_the_script_to_take_home_resumes_and_without_its_optimizer_does_not(judge):
    assert names(judge(TAKE_HOME, [], [], resumed=True)) == []
    without = [('        optimizer.load_state_dict(state["optimizer"])\n', "")]
    assert names(judge(TAKE_HOME, [], without, resumed=True)) == ["optimizer not restored"]


WRITES = """    assert open("notes.txt").read() == "mine\\n"
    dist.barrier()
    if rank == 0:
        os.makedirs("out/new", exist_ok=True)
        os.rmdir("out/old")
        for name in ("notes.txt", "out/log.txt", "out/new/log.txt"):
            open(name, "a").write("x")
"""


def test_what_lies_in_the_readers_folder_is_read_and_never_changed(judge, watcher, tmp_path, monkeypatch):
    """Relative paths work; a checkpoint of before is not read; a written file is a copy; absolute paths are refused."""
    folder = tmp_path / "reader"
    (folder / "out" / "old").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine\n")
    (folder / "out" / "log.txt").write_text("mine\n")
    (folder / "last.pt").write_bytes((SCRIPTS / "plain.py").read_bytes())  # to load it would fail
    script, place = (SCRIPTS / "plain.py").read_text(), "    optimizer = "
    assert script.count(place) == 1
    (folder / "train.py").write_text(script.replace(place, WRITES + place))
    before = state(folder)
    monkeypatch.chdir(folder)
    watcher.aim(arguments("train.py"))
    assert names(command.verdicts_of(watcher, [1, 2])[0]) == []
    assert state(folder) == before
    (folder / "train.py").write_text(script.replace('"last.tmp"', f'"{folder}/out/last.tmp"'))
    with pytest.raises(UserError, match="let it write to a relative path"):
        command.verdicts_of(watcher, [1, 2])
    assert not (folder / "out" / "last.tmp").exists()


def state(folder) -> dict:
    """Return each file of a folder with its content and time."""
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


BAD = {  # arguments: what the line says
    "": "no script given",
    "-- nothing.py": "script 'nothing.py' is no file",
    "--processes 1 -- train.py": "two numbers or more",
    "--processes 1,x -- train.py": "two numbers or more",
    "--processes 1,999 -- train.py": "this machine has",
    "--batches 0 -- train.py": "--batches 0 is not allowed",
    "--without drop -- train.py": "allowed: dropout, batchnorm, augmentation",
    "--json no/folder.json -- train.py": "its folder does not exist",
    "--python nothing -- train.py": "--python nothing: no such program",
    "--python /bin/true -- train.py": "does not load PyTorch",
    "--site nowhere -- train.py": "no site 'nowhere'",
    "--site generic --resume -- train.py": "does not go with --resume",
    "--site generic --processes 1,3 -- train.py": "3 do not divide over two nodes",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_before_the_script_starts(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(UserError, match=BAD[words]) as refusal:
        command.main(parser.parse_args(words.split()))
    assert "\n" not in str(refusal.value) and [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("fault", ["", "no sampler"])
def test_jobs_run_a_script_on_two_nodes(cluster, tmp_path, monkeypatch, capsys, fault):
    monkeypatch.setenv("MPDEMO_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copy(TAKE_HOME.with_name("digits.npz"), tmp_path)
    text = TAKE_HOME.read_text()
    for old, new in FORGOTTEN[fault] if fault else []:
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    status = command.main(parser.parse_args(["--site", "throwaway", "--json", "verdict.json", "--", "train.py"]))
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert [found["name"] for found in verdict["worlds"][0]["findings"]] == [fault] * bool(fault)
    assert status == bool(fault) and "submitted same_2 to cluster" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.npz", "train.py", "verdict.json"]


REFUSED = {  # script: what the line says
    "raise ValueError('my own')": "fails with 1 process: ValueError: my own",
    "import sys; sys.exit('bye')": "fails with 1 process: bye",
    "print('nothing')": "no optimizer step seen",
    "import time; time.sleep(99)": "no optimizer step seen within 2 s",
    "import torch.multiprocessing as mp; mp.spawn(print, nprocs=2)": "starts its own processes",
}


@pytest.mark.parametrize("script", REFUSED)
def test_a_script_that_does_not_train_is_refused_in_one_line(watcher, tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script)
    watcher.aim(arguments("--timeout", "2", "train.py"))
    with pytest.raises(UserError, match=REFUSED[script]) as refusal:
        command.verdicts_of(watcher, [1, 2])
    assert "\n" not in str(refusal.value)


def test_the_command_ends_with_its_verdict_and_leaves_no_process(run_mpdemo, tmp_path):
    """Killed, too: the watcher ends with its owner, and the ranks with it."""
    file, words = tmp_path / "verdict.json", ("same", "--json")
    done = run_mpdemo(*words, str(file), "--batches", "2", "--", str(SCRIPTS / "sharded.py"))
    assert done.returncode == 0, done.stderr
    assert "the same training" in done.stdout and json.loads(file.read_text())["same"]
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)")
    started = subprocess.Popen([sys.executable, "-m", "mpdemo", "same", "--", str(script)], cwd=root())
    family = []
    end = time.monotonic() + 60
    while len(family) < 3 and time.monotonic() < end:
        family = psutil.Process(started.pid).children(recursive=True)
        time.sleep(0.1)
    started.kill()
    started.wait()
    assert len(family) == 3
    assert psutil.wait_procs(family, timeout=20)[1] == []


def test_each_finding_has_its_section_in_a_notebook():
    for name, row in TABLE.items():
        number, section = re.fullmatch(r"notebook (\d\d), section (\d)", row["section"]).groups()
        (file,) = (root() / "notebooks").glob(f"{number}_*.ipynb")
        cells = nbformat.read(file, 4).cells
        assert any(re.search(rf"(?m)^## {section}\. ", cell.source) for cell in cells), name
