"""train_gpt.py: for every mesh the training of one device, resumed by any other; what cannot be is refused."""

import ast
import functools
import importlib
import io
import re
import shutil
import sys
import tokenize

import meshes
import pytest
import torch
from deletion import clean, without
from meshes import LIMIT, run_mesh, world_of
from project import tokens

from mpdemo.labs.meshes import SCRIPTS, STEPS, differences, flags_of

BY_DAY = [  # each dimension and schedule, most pairs
    "pp2 gpipe",
    "pp2 tp2",
    "pp2 shard2 zbv",
    "pp2 cp2 interleaved",
    "replicate2 shard2",
    "replicate2 tp2 --recompute",
    "shard2 cp2 --packed",
    "cp2 tp2",
]
BY_NIGHT = [f"{mesh} {schedule}" for schedule in ("gpipe", "interleaved", "zbv") for mesh in (
    "pp2", "pp2 tp2", "pp2 cp2", "pp2 shard2", "pp2 replicate2", "pp4", "pp2 shard2 tp2", "pp2 replicate2 cp2",
)]  # fmt: skip
BY_NIGHT += [f"{mesh} --recompute" for mesh in ("pp2 tp2", "shard2 cp2", "pp2 zbv")]
BY_NIGHT += [f"{mesh} --packed" for mesh in (
    "one process", "tp2", "pp2 cp2 zbv", "pp2 cp2 --recompute", "cp2 --compile",
)]  # fmt: skip
BY_NIGHT += [f"{mesh} --compile" for mesh in ("shard2", "cp2", "tp2", "pp2", "pp2 tp2 interleaved")]
plain = functools.cache(meshes.plain)


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(SCRIPTS)
    for name in ("gpt", "job", "train_gpt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return importlib.import_module("train_gpt")


def compared(folder, mesh, hook=meshes.unsaved, scripts=SCRIPTS, steps=STEPS) -> dict:
    """Run a mesh; return how far it is from one device."""
    flags, batch, blocks = flags_of(mesh)
    ranks = run_mesh(folder, [*flags, f"--steps={steps}"], world_of(mesh), hook, scripts)
    found = differences(ranks, plain(batch, blocks, steps, "--packed" in mesh))
    print(f"{mesh:32}" + " ".join(f"{name} {value:.1e}" for name, value in found.items()))
    return found


def check(found):
    assert max(found.values()) < LIMIT, found


# --- equal to one device


@pytest.mark.parametrize("mesh", BY_DAY)
def test_a_mesh_is_the_training_of_one_device(tmp_path, mesh):
    check(compared(tmp_path, mesh))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_mesh_of_eight_processes_is_the_training_of_one_device_or_refused(tmp_path, script):
    """Prints a table."""
    bad, refused = [], []
    for number, mesh in enumerate(meshes.all_meshes(8)):
        try:
            script.read_flags(flags_of(mesh)[0])
        except SystemExit as end:
            print(f"{mesh:32}refused: {end}")
            refused.append(mesh)
            continue
        (tmp_path / str(number)).mkdir()
        found = compared(tmp_path / str(number), mesh)
        bad += [mesh] * (max(found.values()) > LIMIT)
    assert not bad
    assert all(
        {"cp3", "cp5", "cp6", "cp7", "tp3", "tp5", "tp6", "tp7"} & set(mesh.split()) for mesh in refused
    )


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", BY_NIGHT)
def test_schedules_recomputation_and_compilation_change_nothing(tmp_path, mesh):
    check(compared(tmp_path, mesh))


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["pp2 cp2 tp2", "shard2 tp2"])
def test_bfloat16_comes_close(tmp_path, mesh):
    found = compared(tmp_path, f"{mesh} --bf16")
    assert LIMIT < found["loss"] < 2e-3 and found["gradients"] < 3e-2


@pytest.mark.parametrize("hook", [
    meshes.compile_eagerly, pytest.param(meshes.unsaved, marks=pytest.mark.nightly),  # which generates C++
])  # fmt: skip
def test_what_a_gpu_does_by_default_is_one_device_s_with_the_same_switches(tmp_path, hook):
    ran = {}
    for mesh in ("one process", "shard2", "tp2"):
        (folder := tmp_path / mesh.replace(" ", "")).mkdir()
        flags, batch, blocks = flags_of(f"{mesh} --bf16 --compile --recompute")
        ran[mesh] = run_mesh(folder, [*flags, f"--steps={STEPS}"], world_of(mesh), hook)
    (one,) = ran.pop("one process")
    assert LIMIT < differences([one], plain(batch, blocks, STEPS, False))["loss"] < 2e-3  # it is bf16
    for mesh, ranks in ran.items():
        found = differences(ranks, one)
        assert found["loss"] < 3e-4 and found["gradients"] < 1e-2, (mesh, found)


def test_train_fsdp_is_what_is_left_of_the_script_without_its_other_dimensions():
    text, left = ((SCRIPTS / f"{name}.py").read_text() for name in ("train_gpt", "train_fsdp"))
    names = {"pp", "tp", "ring", "documents", "document", "schedule", "square"}
    deleted = without(
        text.replace('"train_gpt"', '"train_fsdp"'), {"pp", "cp", "tp", "packed", "stages"}, names
    )
    assert clean(ast.parse(left)) == deleted
    assert comments(left) <= comments(text)


def comments(text) -> set:
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in found if token.type == tokenize.COMMENT}


def test_the_script_has_at_most_4000_tokens_without_comments_and_docstrings():
    assert tokens((SCRIPTS / "train_gpt.py").read_text()) <= 4000


@pytest.mark.parametrize(
    "mesh", ["cp2", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("tp1", "pp2 --recompute"))]
)
def test_a_changed_token_moves_no_loss_of_another_document(tmp_path, mesh):
    flags, _, _ = flags_of(f"{mesh} --packed")
    sizes = ["--batch=2", "--microbatches=2", "--steps=1"]  # so that each microbatch is a row
    run_mesh(tmp_path, [*flags, *sizes], world_of(mesh), meshes.change_a_token)
    parts = [torch.load(file) for file in sorted(tmp_path.glob("tokens-*.pt"))]
    if "cp2" in mesh:  # rank 0 has the first and the last quarter, rank 1 those between
        (first, last), middle = parts[0].chunk(2, 1), parts[1]
        parts = [torch.cat([first, middle, last], 1)]
    first, changed = parts[0]
    moved = ((first - changed).abs() > 1e-5).nonzero().flatten().tolist()
    begins = torch.load(tmp_path / "begins.pt")
    assert len(first) == 64 and len(begins) > 2, begins
    assert begins[1] + 2 in moved and begins[1] + 2 <= min(moved) and max(moved) < begins[2]


# --- the comparison sees mistakes, most of which PyTorch does not

SCALE = "ranks * args.cp * args.tp / scored"
MUTANTS = {
    "FSDP's average taken for a sum": ("shard2", SCALE, "args.tp / scored"),
    "copies not counted": ("replicate2", SCALE, "args.shard * args.cp * args.tp / scored"),
    "samples by rank": ("cp2", "args.epochs, run.done, rank // args.cp, ranks)",
                        "args.epochs, run.done, rank, dist.get_world_size())"),
    "positions from 0 in each rank": ("cp2", "angles[positions(ring)]", "angles[: LENGTH // ring.size()]"),
    "a ring without a way back": ("cp2", "following = pass_on(following, mesh)",
                                  "following = pass_on(following, mesh).detach()"),
    "tokens counted once per rank": ("tp2", SCALE, "ranks / scored"),
    "no clone before a compiled block": ("tp2 --compile", "x: x.clone()", "x: x"),
    "gradients divided by microbatches": ("pp2", "scale_grads=False", "scale_grads=True"),
    "documents that see each other": ("cp2 --packed", ".cumsum(1) * args.packed", ".cumsum(1) * 0"),
    "a mask that is not causal": ("--packed", "same(documents, documents).tril()", "same(documents, documents)"),
    "the norm of one stage": ("pp2", "dist.all_reduce(square := norm**2, group=pp.get_group())", "square = norm**2"),
    "gradients of a validation kept": ("pp2 zbv", "optimizer.zero_grad()  # zbv", "pass  # zbv"),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_seen(tmp_path, name):
    mesh, old, new = MUTANTS[name]
    scripts = shutil.copytree(SCRIPTS, tmp_path / "scripts")
    text = (scripts / "train_gpt.py").read_text()
    assert text.count(old) == 1
    (scripts / "train_gpt.py").write_text(text.replace(old, new))
    hook = meshes.compile_eagerly if "--compile" in mesh else meshes.unsaved
    found = compared(tmp_path, mesh, hook, scripts, steps=STEPS + 1)
    assert max(found.values()) > 100 * LIMIT, found


# --- resuming


def resume(folder, first, others):
    """Save after two steps with a mesh, and resume up to four, over the end of an epoch, with others."""
    (folder / "saving").mkdir()
    flags, batch, blocks = flags_of(first)
    right = plain(batch, blocks, 4)
    check(differences(run_mesh(folder / "saving", [*flags, "--steps=2"], world_of(first)), right))
    losses = sum(
        loss * tokens for loss, tokens in zip(right["losses"][:STEPS], right["tokens"], strict=False)
    )
    for number, mesh in enumerate(others):
        there = shutil.copytree(folder / "saving", folder / str(number))
        flags = [*flags_of(mesh)[0], f"--batch={batch}", f"--blocks={blocks}", "--steps=4"]
        found = differences(run_mesh(there, flags, world_of(mesh)), right, first=2)
        print(f"{first} -> {mesh}: " + " ".join(f"{name} {value:.1e}" for name, value in found.items()))
        check(found)
        assert {path.name for path in there.glob("run-*")} == {"run-2", "run-4"}
        mean = float(re.search(r"epoch 1: loss ([\d.]+)", (there / "log-0").read_text())[1])
        # also of the steps before
        assert mean == pytest.approx(losses / sum(right["tokens"][:STEPS]), abs=2e-6)


def test_another_mesh_resumes_what_zero_bubble_has_saved(tmp_path):
    resume(tmp_path, "pp2 zbv", ["shard2"])


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "others"), [
    ("pp2 tp2", ["shard4", "cp2 tp2", "one process"]),
    ("pp2 cp2 zbv", ["replicate2 shard2 tp2", "pp4 shard2", "pp2 interleaved"]),
    ("shard2 cp2", ["pp2 zbv", "tp4", "pp4 gpipe"]),
    ("replicate2 tp2", ["pp2 shard2 zbv", "cp4", "shard2 cp2"]),
])  # fmt: skip
def test_any_mesh_resumes_what_any_other_has_saved(tmp_path, first, others):
    resume(tmp_path, first, others)


@pytest.mark.nightly
def test_a_signal_to_one_rank_stops_all_stages_and_the_same_command_resumes_bit_for_bit(tmp_path):
    flags, ends = flags_of("pp2 zbv")[0], {}
    for name, hook in (("whole", None), ("stopped", meshes.signal_one)):
        (tmp_path / name).mkdir()
        ends[name] = run_mesh(tmp_path / name, flags, 2, hook)
    assert [path.name for path in (tmp_path / "stopped").glob("run-*")] == ["run-2"]
    again = run_mesh(tmp_path / "stopped", flags, 2)
    for whole, stopped, resumed in zip(ends["whole"], ends["stopped"], again, strict=True):
        assert stopped["losses"] + resumed["losses"] == whole["losses"] and len(stopped["losses"]) == 2
        assert all(
            torch.equal(grad, resumed["grads"][-1][name]) for name, grad in whole["grads"][-1].items()
        )


# --- refused, before any process waits for another


@pytest.mark.parametrize(("flags", "said"), [
    ("--pp 8 --microbatches 8", "--blocks 4 cannot fill 8 stages"),
    ("--pp 4 --schedule zbv", "--blocks 4 cannot fill 8 stages"),
    ("--pp 2 --microbatches 1", "--schedule 1f1b: at least 2 --microbatches, one per stage"),
    ("--pp 2 --schedule zbv --microbatches 2", "--schedule zbv: at least 4 --microbatches, one per stage"),
    ("--pp 2 --schedule interleaved --microbatches 1", "--schedule interleaved: --microbatches must be"),
    ("--pp 2 --schedule zbv --compile", "--schedule zbv splits backward passes, which torch.compile can't"),
    ("--shard 3", "--batch 32: a multiple of --replicate x --shard x --microbatches, 3"),
    ("--batch 100000", "--batch 100000: there are only "),
    ("--heads 3", "--heads 3: must divide half of --width 64"),
    ("--tp 8", "--tp 8: must divide --heads 4"),
    ("--cp 3", "64 tokens: not divisible by 2 x --cp x --tp, 6"),
    ("--tp 0", "--tp 0: at least 1"),
    ("--tp two", "argument --tp: invalid int value: 'two'"),
    ("--pq 2", "unrecognized arguments: --pq 2"),
    *((f"--checkpoint={name}", f"argument --checkpoint: checkpoints cannot be named '{name}': say how")
      for name in ("", ".", "a/..", "a/")),
    ("", "RANK is not set: start this script with torchrun"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(script, flags, said):
    with pytest.raises(SystemExit) as end:
        script.main(flags.split())
    assert str(end.value).startswith(said) and "\n" not in str(end.value)


def test_only_rank_0_says_why_a_mesh_does_not_fit_the_processes(script, monkeypatch):
    for rank, said in ((0, "--pp x --replicate x --shard x --cp x --tp is 4, but 2 processes run"), (1, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(SystemExit) as end:
            script.main(["--pp=2", "--tp=2"])
        assert end.value.code == said


@pytest.mark.parametrize("mesh", ["pp2", pytest.param("replicate2", marks=pytest.mark.nightly)])
def test_memory_that_nobody_fills_is_named_and_all_ranks_end_before_a_step(tmp_path, mesh):
    with pytest.raises(
        AssertionError, match=r"\nnobody fills blocks.3.mask, blocks.3.mean, blocks.3.scale: give it"
    ):
        run_mesh(tmp_path, flags_of(mesh)[0], 2, meshes.leave_empty)
    logs = [(tmp_path / f"log-{rank}").read_text().splitlines() for rank in range(2)]
    assert [len([line for line in log if "on cpu" not in line]) for log in logs] == [1, 1] and logs[1][
        -1
    ] == "1"


@pytest.mark.parametrize(("flags", "shards"), [("", 8), ("--tp 2", 4), ("--pp 2 --replicate 2 --tp 2", 1)])
def test_what_the_other_dimensions_leave_is_sharded(script, monkeypatch, flags, shards):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert script.read_flags(flags.split()).shard == shards
    with pytest.raises(SystemExit, match=r" is \d+, but 8 processes run"):
        script.read_flags([*flags.split(), f"--shard={2 if shards == 1 else 1}"])


def test_another_model_or_other_batches_do_not_resume(tmp_path):
    """Heads are in no weight's shape, and of more blocks the first ones would fit."""
    flags, _, _ = flags_of("one process")
    run_mesh(tmp_path, [*flags, "--steps=1"], 1)
    for changed in ("--heads=4", "--blocks=3", "--batch=12"):
        with pytest.raises(AssertionError, match="run-1 has .*, this run .*: other data would follow"):
            run_mesh(tmp_path, [*flags, changed], 1)
    with pytest.raises(AssertionError, match=r"--steps 999: --epochs end after \d+, so give more of them"):
        run_mesh(tmp_path, [*flags, "--steps=999"], 1)
