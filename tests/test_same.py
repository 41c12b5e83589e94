"""`mpdemo same`: right scripts pass, each planted fault is found under its name, nothing is left behind."""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import home_scripts
import nbformat
import psutil
import pytest
import torch
from torch.nn import functional
from worker_jobs import came

from mpdemo.errors import UserError
from mpdemo.paths import root
from mpdemo.tools.same import NotTheSame, chain, command, inside, resume, verdict
from mpdemo.tools.same.finding import TABLE, Finding, fit
from mpdemo.tools.same.mpdemo_watcher import as_cpu, chance
from mpdemo.tools.same.mpdemo_watcher.rows import rows_of
from mpdemo.tools.same.watcher import Watcher
from mpdemo.tools.same.worlds import Rank

SCRIPTS = root() / "tests" / "same"
TAKE_HOME = root() / "notebooks" / "scripts" / "train_ddp.py"
CASES = tomllib.loads((SCRIPTS / "cases.toml").read_text())
HARMLESS = "random state not restored"  # the same training in expectation
ZOO = SCRIPTS / "zoo"
BUGS = sorted(path.stem for path in ZOO.glob("*.py") if path.stem != "common")
BUGS_BY_DAY = {"clip_gather", "late_adapter", "same_dropout", "tokens_per_rank"}


def each(kind):
    """Return the names of cases, most for the night."""
    nightly = [pytest.mark.nightly]
    return [pytest.param(name, marks=nightly * ("daily" not in case)) for name, case in CASES[kind].items()]


def bugs():
    """Return the names of the public bugs, most for the night."""
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BUGS_BY_DAY)) for name in BUGS]


@pytest.fixture(scope="module")
def watcher():
    """One watcher for all scripts, which imports PyTorch once."""
    with Watcher(arguments(SCRIPTS / "plain.py")) as watcher:
        yield watcher


def parsed(*words):
    """Return the command's options as they are given."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--timeout", "60", *map(str, words)])


def arguments(*words):
    """Return the command's options for a script."""
    args = parsed(*words)
    command.checked(args)
    return args


def planted(script, *changes) -> str:
    """Return the text of a script with what is written instead of what stands there."""
    text = (SCRIPTS / script).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture
def judge(watcher, tmp_path, monkeypatch):
    """Plant changes in a script; return the names of what is found, and the verdict."""
    # what lies beside the folders above it is linked
    folder = tmp_path / "not" / "too" / "near" / "project"
    folder.mkdir(parents=True)
    beside = {"digits.npz", "gpt.py", "job.py", "text.txt"}  # what the scripts to take home read or import
    for name in beside:
        shutil.copy(TAKE_HOME.with_name(name), folder)
    monkeypatch.chdir(folder)

    def judged(case, resumed=False):
        options, _, words = case["script"].rpartition("-- ")
        script, *words = words.split()
        (folder / "train.py").write_text(planted(script, *case.get("changes", [])))
        watcher.aim(arguments(*options.split(), "train.py", *words))
        found = resume.verdict(watcher, 2, 1) if resumed else verdict.verdicts_of(watcher, [1, 2])[0]
        command.show(found)
        assert {path.name for path in folder.iterdir()} == beside | {"train.py"}
        both = [*found["findings"], *found["harmless"]]
        lines = [finding.where for finding in both if finding.where]
        assert all(re.fullmatch(r"train.py:\d+", line) for line in lines)
        if "line" in case:
            (number,) = (int(line.partition(":")[2]) for line in lines)
            assert case["line"] in Path("train.py").read_text().splitlines()[number - 1]
        assert case.get("note", "") in str(found)
        return [finding.name for finding in both], found

    return judged


@pytest.mark.parametrize("name", each("right"))
def test_a_right_script_is_the_same_training(judge, name):
    case = CASES["right"][name]
    if "needs" in case:
        pytest.importorskip(case["needs"])
    names, found = judge(case)
    verdict, table = case.get("verdict", "same"), found["table"]
    assert names == [] and found["verdict"] == verdict
    rows, off = table["rows per step"], table["largest difference of a gradient"][1]
    # each rank has all places of its sequences, where these count as the rows
    places = name == "a batch in the second dimension"
    assert rows[1] == rows[0] * (1 + places) and (off == "-" or verdict == "unsure" or float(off) < 1e-3)
    assert ("by hand" in table["learning rate"]) == (name == "an update by hand")
    if name == "tensor parallel":
        assert table["messages per step"] == ["0", "1"]  # of DTensors


@pytest.mark.parametrize("name", each("fault"))
def test_a_planted_fault_is_found_under_its_name(judge, name):
    assert judge(CASES["fault"][name])[0] == [name.partition(" (")[0]]


@pytest.mark.parametrize("name", each("resume"))
def test_the_first_difference_after_a_resume_is_named(judge, name):
    names, found = judge(CASES["resume"][name], resumed=True)
    assert names == [known for known in TABLE if name.startswith(known)]
    assert found["verdict"] == ("same" if name[:1] in ("", " ") or name == HARMLESS else "different")
    assert ("not a second time" in str(found["notes"])) == (" of a second" in name or " of a first" in name)


ABOUT = re.compile(r'"""[^\n]+\n\n(https://github\.com/\S+) \(\d{4}-\d\d-\d\d\)\nnamed: ([^\n]+)\n"""\n')


def named(name) -> str:
    """Return the expression that the names of what is found in a public bug must match."""
    return ABOUT.match((ZOO / f"{name}.py").read_text())[2]


@pytest.fixture
def bug(watcher, tmp_path, monkeypatch):
    """Run a public bug, or with --fixed its right twin; return the names of what is found, and the verdict."""
    folder = tmp_path / "not" / "too" / "near" / "zoo"
    shutil.copytree(ZOO, folder)
    monkeypatch.chdir(folder)

    def found_in(name, *words):
        watcher.aim(arguments("--timeout", "20", f"{name}.py", *words))
        resumes = name.startswith("resume_")
        found = resume.verdict(watcher, 2, 1) if resumes else verdict.verdicts_of(watcher, [1, 2])[0]
        command.show(found)
        return [finding.name for finding in (*found["findings"], *found["harmless"])], found["verdict"]

    return found_in


@pytest.mark.parametrize("name", bugs())
def test_a_public_bug_is_found_and_named(bug, name):
    names, _ = bug(name)
    assert names and re.search(named(name), names[0])


@pytest.mark.parametrize("name", bugs())
def test_the_right_twin_of_a_public_bug_is_the_same_training(bug, name):
    assert bug(name, "--fixed") == ([], "same")


def test_a_public_bug_has_its_address_and_one_line():
    texts = [(ZOO / f"{name}.py").read_text() for name in BUGS]
    addresses = [ABOUT.match(text)[1] for text in texts]
    assert len(texts) >= 30 and len(set(addresses)) == len(texts)
    assert all(text.count("# fault\n") == 1 and len(text.splitlines()) <= 60 for text in texts)
    assert set(BUGS) >= BUGS_BY_DAY


@pytest.mark.nightly
def test_a_script_that_saves_rarely_runs_until_it_would_have_saved_twice(judge, watcher, monkeypatch):
    """Its epochs have 70 batches, of which the first are not enough."""
    runs, run = [], Watcher.run

    def noted(*args, **options):
        runs.append(run(*args, **options))
        return runs[-1]

    monkeypatch.setattr(Watcher, "run", noted)
    names, found = judge(CASES["rarely"], resumed=True)
    assert names == []
    assert [len(run.steps) for run in runs] == [24, 40, 26, 14, 17, 26, 7, 15, 2]
    assert watcher.args.batches == 8 and found["table"]["SIGTERM"] == [26, 33]


HOME = [
    "train_single.py",
    "train_ddp_small.py",
    "train_ddp.py",
    "train_accelerate.py",
    "train_fsdp.py",
    "finetune_lora.py",
]
HOME += [f"train_gpt.py --{name} {{n}}" for name in ("pp", "replicate", "shard", "cp", "tp")]
HOME += ["experts.py --ep {n}"]
SAVES_NOTHING, NOT_SHARED = "train_accelerate.py", "samples not shared"


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A learner's folder with all scripts, and the model that finetune_lora.py begins with."""
    folder = tmp_path / "not" / "too" / "near" / "home"
    shutil.copytree(TAKE_HOME.parent, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", HOME)
def test_a_script_to_take_home_is_the_same_training_and_resumes(watcher, at_home, script):
    if "lora" in script:
        home_scripts.shorten(at_home)
        home_scripts.launch(at_home, "train_fsdp.py", "--checkpoint", "train_fsdp")
        shutil.copy(TAKE_HOME.with_name("gpt.py"), at_home)
    one = script == "train_single.py"  # which refuses to be started as several
    watcher.aim(arguments("--timeout", "300", *script.split()))
    if not one:
        found = verdict.verdicts_of(watcher, [1, 2])[0]
        command.show(found)
        assert found["verdict"] == "same" and found["findings"] == found["harmless"] == []
    found = resume.verdict(watcher, 1 if one else 2, 1)
    command.show(found)
    names = [finding.name for finding in found["findings"]]
    assert names == (["no checkpoint"] if script == SAVES_NOTHING else [])


@pytest.mark.nightly
@pytest.mark.parametrize(("flag", "old", "new", "name"), [
    # one process clips its gradient, and two, whose gradients are half as large, don't
    ("shard", "ranks * args.cp * args.tp / scored", "args.tp / scored", "gradient scaled"),
    ("cp", "run.done, rank // args.cp, ranks", "run.done, dist.get_rank(), dist.get_world_size()", NOT_SHARED),
    ("tp", "run.done, rank // args.cp, ranks", "run.done, dist.get_rank(), dist.get_world_size()", NOT_SHARED),
])  # fmt: skip
def test_a_mistake_in_a_mesh_is_found(watcher, at_home, flag, old, new, name):
    home_scripts.change(at_home / "train_gpt.py", [(old, new)])
    watcher.aim(arguments("--timeout", "300", "train_gpt.py", f"--{flag}", "{n}"))
    names = [finding.name for finding in verdict.verdicts_of(watcher, [1, 2])[0]["findings"]]
    assert names[:1] == [name]


OF_ONE_RANK, UNTRAINED = ("shown = mean(total)", "shown = total"), ("optimizer.step()", "pass")
STATUS = {  # option: what is changed, exit status, a sentence that is printed
    "": (OF_ONE_RANK, 0, "2 processes: same\n  The training is the same, but:\n  loss of one rank"),
    "--strict": (OF_ONE_RANK, 1, "2 processes: different\n  loss of one rank"),
    "--batches 3": (UNTRAINED, 3, "2 processes: unsure"),  # no step can be seen
}


@pytest.fixture
def shared(watcher, tmp_path, monkeypatch):
    """A folder in which the command uses the watcher that all tests share."""

    def aimed(args):
        watcher.aim(args)
        return contextlib.nullcontext(watcher)

    monkeypatch.setattr(command, "Watcher", aimed)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("option", STATUS)
def test_the_exit_status_tells_three_verdicts(shared, capsys, option):
    change, status, sentence = STATUS[option]
    Path("train.py").write_text(planted("plain.py", change))
    assert command.main(parsed(*option.split(), "--json", "found.json", "train.py")) == status
    assert sentence in capsys.readouterr().out
    found = json.loads(Path("found.json").read_text())
    assert command.VERDICTS[found["verdict"]]["status"] == status and found["format"] == 2
    assert found["versions"]["torch"] == torch.__version__ and found["versions"].keys() == {
        "mpdemo",
        "torch",
        "python",
    }


def test_a_call_returns_what_json_has_or_raises_what_was_found(same, shared):
    """The fixture is the plugin's; its script stands in a folder below."""
    Path("scripts").mkdir()
    script = Path("scripts", "train.py")
    script.write_text(planted("plain.py", ("model(x), y)", "model(x), y) * world")))
    with pytest.raises(
        NotTheSame,
        match=r"(?s)train.py --epochs 2\n2 processes: different\n  gradients summed: .*Remedy: .*S205",
    ) as found:
        same("scripts/train.py", "--epochs", 2)
    assert found.value.record["worlds"][0]["findings"][0]["code"] == "S205"
    with pytest.raises(UserError, match="no option 'time_out'; allowed: .*did you mean 'timeout'"):
        same("scripts/train.py", time_out=60)


def test_rows_are_told_apart_without_numpy(monkeypatch):
    wanted = rows_of((X, X.long()))
    monkeypatch.setattr(torch.Tensor, "numpy", None, raising=False)
    assert rows_of((X, X.long())) == wanted and len(set(wanted)) == 4
    assert rows_of((X[[2, 0]], X.long()[[2, 0]])) == [wanted[2], wanted[0]] and rows_of(()) == []


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
    place = "    optimizer = "
    (folder / "train.py").write_text(planted("plain.py", (place, WRITES + place)))
    before = state(folder)
    monkeypatch.chdir(folder)
    watcher.aim(arguments("train.py"))
    assert verdict.verdicts_of(watcher, [1, 2])[0]["findings"] == []
    assert state(folder) == before
    (folder / "train.py").write_text(planted("plain.py", ('"last.tmp"', f'"{folder}/out/last.tmp"')))
    with pytest.raises(UserError, match="let it write to a relative path"):
        verdict.verdicts_of(watcher, [1, 2])
    assert not (folder / "out" / "last.tmp").exists()


TREES = {  # script: files of the reader, and what an earlier run has left
    "a/b/train.py": (["a/common.py", "a/data/x.npz", "a/b/c/more.txt", "notes.txt"], []),
    "train.py": (
        ["data/x.npz", "out/config.yaml", "out/ckpt/info.txt"],
        ["data/cache.pt", "out/ckpt/m.pt", "old/m.pt"],
    ),
}


@pytest.mark.parametrize("script", TREES)
def test_only_what_an_earlier_run_has_left_is_hidden(watcher, tmp_path, monkeypatch, script):
    files, left = TREES[script]
    for name in (script, *files, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    watcher.aim(arguments(script))
    watcher.hidden = {tmp_path / name for name in left}
    run = watcher.home / f"mirror_{Path(script).parent.name}"
    watcher.mirror(Path("/"), run)
    here = Path(f"{run}{tmp_path}")
    assert [name for name in (script, *files, *left) if (here / name).exists()] == [script, *files]
    assert not (here / "old").exists()


X, ONES = torch.arange(8.0).reshape(4, 2), torch.ones(2)
STATISTICS = {"running_mean": ONES, "running_var": ONES}
NO_STATISTICS = {"running_mean": None, "running_var": None}
CALLS = [  # function, its arguments by place and by name, what is noted, those that let it draw nothing
    ("dropout", (X, 0.5), {}, ["dropout"], {"training": False}),
    ("dropout", (X, 0.5), {"training": False}, [], {}),
    ("dropout", (X, 0.5, False), {}, [], {}),
    ("dropout", (X,), {"p": 0.0}, [], {}),
    ("alpha_dropout", (X, 0.5), {}, [], {}),
    ("alpha_dropout", (X,), {"training": True}, ["dropout"], {"training": False}),
    ("scaled_dot_product_attention", (X, X, X), {"dropout_p": 0.5}, ["dropout"], {"dropout_p": 0.0}),
    ("scaled_dot_product_attention", (X, X, X), {"is_causal": True}, [], {}),
    ("batch_norm", (X,), NO_STATISTICS | {"training": True}, ["batchnorm"], {}),
    ("batch_norm", (X, None, None, None, None, True), {}, ["batchnorm"], {}),
    ("batch_norm", (X,), STATISTICS, [], {}),
]


@pytest.mark.parametrize(("name", "args", "options", "noted", "off"), CALLS)
def test_a_function_is_noted_and_switched_off_where_it_draws_by_chance(
    monkeypatch, name, args, options, noted, off
):
    notes, function = [], getattr(functional, name)
    monkeypatch.setattr(chance, "note_once", lambda _, kind: notes.append(kind))
    monkeypatch.setitem(chance.ORDER, "without", ["dropout", "batchnorm"])
    drawn = chance.switched(function, *chance.SWITCHES[name])(*args, **options)
    assert notes == noted and torch.equal(drawn, function(*args, **options | off))


DRAWS = [  # numbers from 3 to 10
    lambda: torch.randint(3, 10, (4,)),
    lambda: torch.randint(3, 10, size=(4,)),
    lambda: torch.randint(3, high=10, size=(4,)),
    lambda: torch.randint(low=3, high=10, size=(4,)),
    lambda: torch.empty(4, dtype=torch.long).random_(3, to=10),
    lambda: torch.empty(4).uniform_(3, to=10),
    lambda: torch.empty(4).normal_(mean=6.0, std=0.1),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_by_row_is_drawn_as_the_script_asks(monkeypatch, draw):
    monkeypatch.setattr(chance, "note_once", lambda *_: None)

    def drawn(rows):
        monkeypatch.setitem(chance.ORDER, "without", ["draws"])
        monkeypatch.setattr(chance.now, "batch", rows)
        monkeypatch.setattr(chance.now, "draws", 0)
        with chance.Draws():
            return draw().tolist()

    assert drawn(["a", "b", "c", "d"]) == drawn(["d", "c", "b", "a"])[::-1]
    assert all(3 <= number < 10 for number in drawn(["a", "b", "c", "d"]))


def test_a_mean_is_one_also_where_gloo_takes_it_for_a_sum(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    summed, average, ops = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG, []
    reduce = as_cpu.averaging(lambda tensor, op: ops.append(op))
    scatter = as_cpu.averaging(lambda output, input, op: output.copy_(input))
    mean, total = torch.tensor([3.0]), torch.tensor([3.0])
    reduce(mean, op=average)
    reduce(total, summed)
    assert scatter(torch.zeros(1), total, average) == mean == 1.5 and total == 3.0
    assert ops == [summed] * 2


def test_weights_that_are_made_between_two_batches_are_drawn_by_no_row(monkeypatch):
    monkeypatch.setitem(chance.ORDER, "without", ["draws"])
    monkeypatch.setattr(chance.now, "batch", ["a", "b", "c", "d"])
    with chance.Draws():
        assert torch.nn.init.uniform_(torch.empty(4), 3, 10).min() >= 3


def test_batch_norm_becomes_a_norm_of_each_row(monkeypatch):
    """With its running statistics in place of the batch's, a deep model would explode."""
    monkeypatch.setattr(chance, "note_once", lambda *_: None)
    monkeypatch.setitem(chance.ORDER, "without", ["batchnorm"])
    norm = chance.switched(functional.batch_norm, *chance.SWITCHES["batch_norm"])
    x, options = (
        100 * torch.randn(6, 2, 3, 3),
        STATISTICS | {"weight": ONES, "bias": ONES, "training": True},
    )
    assert torch.equal(norm(x, **options)[:2], norm(x[:2], **options))
    assert norm(x, **options).flatten(1).std(1, correction=0).tolist() == pytest.approx([1] * 6, abs=1e-3)
    one = torch.randn(6, 1)
    assert torch.allclose(norm(one, torch.zeros(1), torch.ones(1), training=True), one, rtol=1e-3)


def test_a_printed_loss_is_as_exact_as_its_last_digit(tmp_path):
    (tmp_path / "0.out").write_text("loss: 0.123\ntrain_loss=1.23e-04, loss 1.23e+02\n")
    wanted = [("loss", 0.123, 6e-4), ("train_loss", 1.23e-4, 6e-7), ("loss", 123.0, 0.6)]
    assert Rank(tmp_path, 0).printed() == [
        (name, value, pytest.approx(half)) for name, value, half in wanted
    ]


def state(folder) -> dict:
    """Return each file of a folder with its content and time."""
    return {
        path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")
    }


BAD = {  # arguments: what the line says
    "--": "no script given",
    "-- nothing.py": "script 'nothing.py' is no file",
    "-- /dev/null": "script '/dev/null' is no file",
    "--processes 1 -- train.py": "two numbers or more",
    "--processes 1,x -- train.py": "two numbers or more",
    "--processes 1,3 -- train.py": r"this machine has 2 GPU\(s\); give --device cpu, or 2 or less",
    "--processes 1,999 --device cpu -- train.py": "this machine has .* core",
    "--without drop -- train.py": "allowed: dropout, batchnorm, augmentation, draws",
    "--json no/folder.json -- train.py": r"--json 'no/folder.json' can't be written \(No such file",
    "--json . -- train.py": r"can't be written \(it is no regular file",
    "--json /proc/version -- train.py": r"can't be written \(",
    "--python nothing -- train.py": "--python nothing: no such program",
    "--python /bin/true -- train.py": "does not load PyTorch",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_before_the_script_starts(tmp_path, monkeypatch, words):
    monkeypatch.setattr(command, "gpus_here", lambda: 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    with pytest.raises(UserError, match=BAD[words]) as refusal:
        command.main(parsed(*words.split()))
    assert "\n" not in str(refusal.value) and [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_the_command_alone_says_how_to_begin(capsys):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.main(parser.parse_args([])) == 0
    assert "mpdemo same -- train.py" in capsys.readouterr().out


ALONE = """import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""


def test_no_loss_is_missed_of_steps_behind_the_end_of_the_other_run():
    def world(losses):
        rank = SimpleNamespace(printed=lambda: [("loss", value, 0.1) for value in losses])
        return SimpleNamespace(steps=losses, ranks=[rank])

    whole = world(range(12))
    assert resume.printed(whole, world(range(9, 16)), 9) is None
    assert resume.printed(whole, world([9, 20, 11, 12]), 9).name == "printed loss differs"


def test_a_checkpoint_that_a_script_cannot_begin_without_is_not_hidden(watcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(X, "last.pt")
    Path("train.py").write_text(ALONE + 'torch.load("last.pt")\ntorch.save(model.weight, "last.pt")')
    watcher.aim(arguments("train.py"))
    assert [watcher.run_new(1).error for _ in range(2)] == ["", ""]


def test_a_script_that_is_not_distributed_is_told_so_and_nothing_else(watcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ALONE)
    watcher.aim(arguments("train.py"))
    (found,) = verdict.verdicts_of(watcher, [1, 2])[0]["findings"]
    assert (found.name, found.where) == ("not distributed", "train.py:7")


def test_the_weights_by_which_gradients_make_another_one_are_found():
    """A mean over unequal counts is a weighted mean of the ranks'; what is over the batch is none."""
    a, b = ({name: [1.0, *torch.randn(6).tolist(), ""] for name in "xyz"} for _ in range(2))
    pairs = {name: zip(a[name][1:-1], b[name][1:-1], strict=True) for name in a}
    mean = {name: [1.0, *(0.6 * p + 0.4 * q for p, q in pairs[name]), ""] for name in a}
    weights, left = fit(mean, [a, b])
    assert weights == pytest.approx([0.6, 0.4]) and left < 1e-6
    assert fit(mean | {"x": [1.0, *[9.0] * 6, ""]}, [a, b])[1] > 0.1
    assert fit(a, [a, a])[0] == pytest.approx([0.5, 0.5])  # which of them counts, nobody can say
    assert fit({"x": a["x"]}, [{}, a]) == ([], 1.0)  # a rank without a gradient


WORKER = """from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, k):
        raise KeyError("label")


next(iter(DataLoader(Data(), num_workers=1)))
"""
LOADED = "import torch\ntorch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 2).state_dict())"
REFUSED = {  # script: what the line says
    "raise ValueError('my own')": r"fails with 1 process \(train.py:1\): ValueError: my own$",
    "import sys\nsys.exit('bye')": r"fails with 1 process \(train.py:2\): bye$",
    "import os\nx = ": r"fails with 1 process \(train.py:2\): SyntaxError: invalid syntax$",
    "import of_nobody": r"\(train.py:1\): ModuleNotFoundError: No module named 'of_nobody'$",
    WORKER: r"\(train.py:9\): KeyError: 'label'$",
    LOADED: r"\(train.py:2\): RuntimeError: Error\(s\) in loading .* weight: copying a param with shape",
    "print('nothing')": "no optimizer step seen",
    "import time; time.sleep(99)": "no optimizer step seen within 2 s",
    "import torch.multiprocessing as mp; mp.spawn(print, nprocs=2)": "starts its own processes",
}


@pytest.mark.parametrize("script", REFUSED)
def test_a_script_that_does_not_train_is_refused_in_one_line(watcher, tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script)
    watcher.aim(arguments("--timeout", "2" if "sleep" in script else "60", "train.py"))
    with pytest.raises(UserError, match=REFUSED[script]) as refusal:
        verdict.verdicts_of(watcher, [1, 2])
    assert "\n" not in str(refusal.value)


def test_a_command_that_is_killed_leaves_no_process(tmp_path):
    """Two ranks, their server and the process above it end with their owner."""
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)")
    started = subprocess.Popen([sys.executable, "-m", "mpdemo", "same", "--", str(script)], cwd=root())
    came(lambda: len(psutil.Process(started.pid).children(recursive=True)) >= 4, 60)
    family = psutil.Process(started.pid).children(recursive=True)
    started.kill()
    started.wait()
    assert len(family) == 4
    assert psutil.wait_procs(family, timeout=20)[1] == []


LEAVES = """import os, subprocess
subprocess.Popen(["sleep", "SECONDS"], start_new_session=True)
"""


def sleeping(seconds) -> list:
    """Return the processes that sleep so long."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if seconds in (process.info["cmdline"] or [])
    ]


def test_a_process_that_a_script_detaches_is_ended_before_the_next_run(watcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LEAVES.replace("SECONDS", "97531") + ALONE)
    watcher.aim(arguments("train.py"))
    assert len(watcher.run_new(1).steps) == 3 and not sleeping("97531")


def test_a_script_that_kills_its_parent_is_told_so_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LEAVES.replace("SECONDS", "97532") + "os.kill(os.getppid(), 9)")
    with pytest.raises(
        UserError, match="SIGKILL has ended the process that starts the ranks: the script kills"
    ):
        command.main(parsed("train.py"))
    assert not sleeping("97532")


def test_what_a_script_prints_is_cleaned_where_it_is_told():
    finding = Finding("fails with several", "\x1b[2Jbad\x1b]0;x\x07\u202e\nline", "a\x1b[31m.py:3")
    assert str(finding).startswith("  fails with several: bad") and "Line: a.py:3" in str(finding)
    assert not re.search(r"[\x1b\x07\u202e]", str(finding))


def test_ranks_that_share_one_model_sum_no_gradients():
    names = [
        chain.multiple(times, SimpleNamespace(replicas=range(n)))
        for n, times in ((2, 2.0), (2, 0.5), (1, 1.0))
    ]
    assert names == ["gradients summed", "gradients divided twice", ""]


# gradients in three steps, with one process and with two: whether nothing arrives
CUTS = [
    ((1, 1, 1), (0, 0, 0), True),
    ((0, 1, 1), (0, 0, 0), True),  # behind a layer that begins with zeros
    ((1, 1, 1), (0, 0, 1e-30), False),
    ((0, 0, 0), (0, 0, 0), False),  # frozen or unused
    ((0, 0, 1), (0, 0, 0), False),  # an expert that few steps use
    ((1e-8, 1e-8, 1e-8), (0, 0, 0), False),  # rounding
    ((1, None, None), (0, None, None), False),  # once, of an optimizer of its own
]


@pytest.mark.parametrize(("one", "several", "is_cut"), CUTS)
def test_a_gradient_is_cut_off_if_it_is_zero_in_all_steps_of_all_ranks(one, several, is_cut):
    def world(values):
        rows = [{"a": [1.0]} | ({"b": [b**2]} if b is not None else {}) for b in values]
        return SimpleNamespace(steps=rows, sums=[{"gradients": row} for row in rows])

    assert inside.cut_off(world(one), world(several)) == ["b"] * is_cut


def words(text) -> list:
    """Return the words of a text, with the first three digits of its numbers."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3g}", text).split()


def test_the_page_shows_a_script_and_what_is_printed_of_it(shared, capsys):
    page = (SCRIPTS.parents[1] / "mpdemo" / "tools" / "same" / "README.md").read_text()
    script = re.search(r"(?s)```python\n(import torch\n.*?)```", page)[1]
    printed = re.search(r"(?s)\$ mpdemo same -- train.py\n(.*?)```", page)[1]
    number, line = re.search(r"Line (\d+) is `(.*?)`", page).groups()
    Path("train.py").write_text(script)
    assert command.main(parsed("train.py")) == 1 and words(capsys.readouterr().out) == words(printed)
    assert script.splitlines()[int(number) - 1].strip() == line and f"Line: train.py:{number}\n" in printed
    Path("train.py").write_text(script.replace("model.module(x)", "model(x)"))
    assert command.main(parsed("train.py")) == 0 and "2 processes: same" in capsys.readouterr().out


def test_each_finding_has_a_code_of_its_own_and_its_section_in_a_notebook():
    codes = [row["code"] for row in TABLE.values()]
    assert len(set(codes)) == len(codes) and all(re.fullmatch(r"S[1-6]\d\d", code) for code in codes)
    for name, row in TABLE.items():
        file, section = re.fullmatch(r"(notebooks/\S+\.ipynb), section (\d+)", row["page"]).groups()
        cells = nbformat.read(root() / file, 4).cells
        assert any(re.search(rf"(?m)^## {section}\. ", cell.source) for cell in cells), name
