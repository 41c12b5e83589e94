"""What clusters do to the scripts to take home: kills, full disks, damaged files, a folder that one node doesn't see.

Each training resumes from a checkpoint in the middle of its second epoch, and must end as if nothing had happened,
bit for bit. By day these files are only imported: `make soak` makes the same trouble at random.
"""

import platform
import re
import shutil
import subprocess

import psutil
import pytest
from home_scripts import (
    FIRST,
    IMPORTED,
    RECORD,
    UPDATE,
    Training,
    change,
    content,
    damage,
    environment,
    losses,
    told,
)
from worker_jobs import until

pytestmark = pytest.mark.nightly
SECONDS = 60  # in which a job that can't train must have ended
TOLERANCE = 2e-6  # of a loss printed with 6 digits, where more or fewer processes sum in another order


@pytest.fixture(scope="module", params=["train_ddp", "train_fsdp"])
def begun(request, tmp_path_factory):
    """A training that was stopped one step after its third checkpoint, and the end of one that wasn't stopped."""
    begun = Training.anew(request.param, tmp_path_factory.mktemp("begun") / "scripts")
    printed = begun.run("whole")
    begun.rows, begun.losses = told(printed), losses(printed)
    begun.final = content(begun.saved("whole")[-1])
    begun.last = 0 if request.param == "train_single" else 1  # rank
    begun.run("a", begun.at(3 * begun.unit + 1, begun.last, "stop"))
    assert begun.steps("a") == [3 * begun.unit, 3 * begun.unit + 1]
    return begun


@pytest.fixture
def training(begun, tmp_path):
    """A copy of it, which knows what it must come to."""
    return begun.copied(tmp_path / "scripts")


def resumes(training, *changes, first=None):
    """Run it to its end: all losses and the end must be those of the training that nobody stopped."""
    first = first or training.steps("a")[-1] + 1
    printed = training.run("a", *changes)
    assert told(printed) == rows_from(training, first)
    assert content(training.saved("a")[-1]) == training.final and len(training.saved("a")) == 2
    return printed


def rows_from(training, first) -> dict:
    """Return what is said from a step on: of steps, and of epochs that end after it."""
    length = len(training.rows) // 2 - 1  # rows of two epochs: of each step, and one more
    ends = {
        name: int(name.split()[1]) * (length if name.startswith("epoch") else 1) for name in training.rows
    }
    return {name: row for name, row in training.rows.items() if ends[name] >= first}


def in_one_line(printed, pattern) -> bool:
    """Whether a line says it, once; the only traceback is that of torchrun."""
    found = [line for line in printed.splitlines() if re.search(pattern, line)]
    return len(found) == 1 and printed.count("Traceback") == printed.count("ChildFailedError:") <= 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_find_the_checkpoint_of_the_others_ends_the_job(training, rank):
    """Rank 0 has none, or rank 1 an older one. It would train another model, and the others average with it."""
    (elsewhere := training.folder / "elsewhere").mkdir()
    if rank == 1:
        training.saved("a")[0].rename(elsewhere / training.saved("a")[0].name)
    kept = training.data("a")
    printed = training.run("a", training.blind(rank), fails=True, seconds=SECONDS)
    says = rf"^rank 1 on {platform.node()} (finds|sees) .*a.*, but rank 0 on {platform.node()} .*: all need the same "
    assert in_one_line(printed, says + rf"folder {training.folder}" + "/elsewhere" * (rank == 0)), printed
    assert told(printed) == {} and training.data("a") == kept
    resumes(training)


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(training, how):
    newest = training.saved("a")[-1]
    damage(newest, how)
    printed = resumes(training, first=3 * training.unit + 1)
    assert f"{newest.name} is damaged" in printed
    for checkpoint in training.saved("a"):
        damage(checkpoint, how)
    kept = training.data("a")
    printed = training.run("a", fails=True, seconds=SECONDS)
    assert in_one_line(
        printed, r"no whole checkpoint a-\*(.pt)? can be read: move them away to start anew"
    ), printed
    assert training.data("a") == kept and told(printed) == {}


@pytest.mark.parametrize("begun", ["train_fsdp"], indirect=True)
def test_neither_a_damaged_nor_an_unfinished_checkpoint_is_one_of_the_newest_two(training):
    """Of 6 and 7 the second is damaged; from 6 it comes to 8, and dies in the middle of a save after 9."""
    damage(newest := training.saved("a")[-1], "flipped")
    shutil.copytree(newest, f"{newest}.damaged")  # of an earlier time
    training.run(
        "a", training.at(9, 0, "stop"), training.at(9, 1, "die_in_the_middle_of_a_file"), fails=True
    )
    assert training.steps("a") == [6, 8] and (training.folder / "a-9").exists()
    resumes(training, first=9)
    assert {path.name for path in training.folder.glob("a-*") if path.is_dir()} == {
        "a-7.damaged",
        "a-8",
        "a-10",
    }


@pytest.mark.parametrize("begun", ["train_ddp"], indirect=True)
def test_a_damaged_file_is_none_of_the_newest_two(training):
    whole, damaged = training.steps("a")
    damage(training.saved("a")[-1], "flipped")
    training.run("a", training.at(damaged + 1, 0, "stop"))
    assert (
        training.steps("a") == [whole, damaged + 1] and (training.folder / f"a-{damaged}.damaged").exists()
    )


@pytest.mark.parametrize("begun", ["train_ddp"], indirect=True)
def test_all_ranks_refuse_another_model_and_a_name_of_no_file_in_one_line(training):
    kept, other = training.data("a"), ("nn.ReLU()", "nn.BatchNorm2d(32)")
    printed = training.run("a", other, fails=True, seconds=SECONDS)
    fits = r"^a-\d+\.pt does not fit this model \(RuntimeError: .*Missing key"
    assert in_one_line(printed, fits) and told(printed) == {}, printed
    printed = training.run(".", fails=True, seconds=SECONDS)
    assert in_one_line(printed, r"^checkpoints cannot be named '\.': say ") and told(printed) == {}, printed
    assert training.data("a") == kept


MORE = """    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2), use_buffers=True)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(average.parameters(), 1.0), 1)
"""
STEP = """        schedule.step()
        average.update_parameters(average.module)
        if run.done == 9:
            print("steps:", schedule.last_epoch, average.n_averaged.item())
"""


@pytest.mark.parametrize("begun", ["train_fsdp"], indirect=True)
def test_what_else_a_learner_saves_is_resumed(training):
    run = "model.operations, peak, last=last"
    changes = [
        (f"{run})", f'{run}, more={{"schedule": schedule, "average": average}})'),
        (UPDATE, STEP + UPDATE),
    ]
    changes.append(("    train, checked = sets", f"{MORE}    train, checked = sets"))
    training.run("b", *changes, training.at(5, 1, "stop"))
    printed = training.run("b", *changes)
    assert "steps: 10 10" in printed
    kept, printed = training.data("a"), training.run("a", *changes, fails=True)
    assert (
        in_one_line(printed, r"a-7 does not fit this model \(.*Missing key.*\)")
        and training.data("a") == kept
    )


def test_a_full_disk_ends_the_job_in_one_line_and_leaves_the_older_checkpoints(training):
    kept, (prefix, name) = training.data("a"), training.full_disk()
    printed = training.run(name, prefix=prefix, fails=True)
    assert in_one_line(printed, rf"{name}-.* could not be written \(.+\); .* stay"), printed
    assert training.data("a") == kept
    resumes(training)


@pytest.mark.parametrize("moment", ["die_in_the_middle_of_a_file", "die_before_the_name"])
def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(training, moment):
    kept, step = training.data("a"), 4 * training.unit
    training.run("a", training.at(step, 0, moment), fails=True)
    left = [
        file
        for path in training.folder.glob(f"a-{step}*")
        for file in (path, *path.glob("*"))
        if file.is_file()
    ]
    assert training.data("a") == kept and sum(file.stat().st_size for file in left)
    resumes(training)


@pytest.mark.parametrize("victim", ["rank", "launcher", "launcher of ranks that begin"])
def test_a_kill_ends_all_processes_within_seconds(training, victim):
    slow = (UPDATE, UPDATE + "        __import__('time').sleep(0.2)\n")
    training.change(slow)
    with psutil.Popen(
        training.command("a"), cwd=training.folder, env=environment(), stdout=subprocess.PIPE, text=True
    ) as launcher:
        until(lambda: len(launcher.children()) == 2)
        if victim != "launcher of ranks that begin":
            next(line for line in launcher.stdout if f"step {3 * training.unit + 3}:" in line)
        processes = [launcher, *launcher.children(recursive=True)]
        processes[-1 if victim == "rank" else 0].kill()
        _, left = psutil.wait_procs(processes, timeout=15)
        for process in left:
            process.kill()
    assert left == []
    resumes(training)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_clock_of_rank_0_says_when_to_save(training, rank):
    """One rank's clock runs a million times too fast; nobody may wait for a save that this rank alone makes."""
    change(training.looks, [("SAVE_STEPS, SAVE_MINUTES = ", "SAVE_STEPS, SAVE_MINUTES = 1000")])
    printed = training.run("new", (RECORD, f"{IMPORTED}.hurry({rank})\n\n\n{RECORD}"))
    assert told(printed) == training.rows and content(training.saved("new")[-1]) == training.final
    steps = len(training.rows) - 2
    assert training.steps("new") == ([steps] if rank else [steps - 1, steps])


@pytest.mark.parametrize("looks", [1, 4])
def test_a_loss_that_is_not_finite_ends_the_job_with_its_step_and_rank_and_is_not_saved(training, looks):
    step, (line, name) = 3 * training.unit + 3, training.kind.spoilt
    spoil = f"{name} = {name} * (float('nan') if {training.kind.step} == {step} and rank == 1 else 1)\n"
    change(file := training.looks, [("LOOK = 1", f"LOOK = {looks}")])
    printed = training.run("a", (line, line[: -len(line.lstrip())] + spoil + line), fails=True)
    change(file, [(f"LOOK = {looks}", "LOOK = 1")])
    assert in_one_line(printed, f"^step {step}: the loss or gradient of rank 1 is not finite; .* stay$"), (
        printed
    )
    assert max(training.steps("a")) < step
    resumes(training)


def test_three_processes_and_then_one_have_the_losses_of_two_and_another_batch_is_refused(training):
    kept, other = training.data("a"), (FIRST + "2, 64", FIRST + "2, 48")
    if training.name == "train_fsdp":
        other = (
            "args = read_flags(arguments)",
            'args = read_flags([*__import__("sys").argv[1:], "--batch=16"])',
        )
    printed = training.run("a", other, fails=True, seconds=SECONDS)
    assert in_one_line(printed, r"^a-\d+(\.pt)? .*'size': \d\d, .*'size': \d\d, .*(next|follow)"), printed
    assert training.data("a") == kept
    printed = training.run("a", training.at(4 * training.unit + 1, 2, "stop"), processes=3)
    printed += training.run("a", processes=1)
    assert told(printed).keys() == rows_from(training, 3 * training.unit + 2).keys()
    assert losses(printed) == pytest.approx(training.losses[1:], abs=TOLERANCE)


@pytest.mark.parametrize("begun", ["train_single", "train_ddp", "train_fsdp"], indirect=True)
def test_random_augmentation_is_resumed_bit_for_bit_also_in_workers(training):
    line, workers = "    train, check = make_dataset()\n", (FIRST + "2, 64, 0", FIRST + "2, 64, 2")
    if training.name == "train_fsdp":
        line, workers = "    train, checked = sets\n", ("WORKERS = 8e-3, 1.0, 0", "WORKERS = 8e-3, 1.0, 2")
    changes = [(line, f"{line}    train = {IMPORTED}.Noisy(train)\n"), workers]
    whole = told(training.run("noisy", *changes))
    assert whole.keys() == training.rows.keys() and whole != training.rows
    training.run("b", *changes, training.at(3 * training.unit + 1, training.last, "stop"))
    assert told(training.run("b", *changes)).items() <= whole.items()
    assert content(training.saved("b")[-1]) == content(training.saved("noisy")[-1])
