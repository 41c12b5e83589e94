"""Tests of the programs in notebook 10: a complete checkpoint, a save that survives a kill, one of all ranks."""
# ruff: noqa: F821 - what the reader's program defines

import ctypes
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from checks.helpers import close, gathered, slow_saves, substitute
from mpdemo.labs.killed_save import end_at

BATCHES, STEPS = 5, 12  # batches of an epoch, steps of the uninterrupted run


def new_training(seed):
    """Return a toy training at its start: dropout, AdamW, a falling learning rate, shuffled batches."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, done=0)


def steps_of(training, steps):
    """Train for some steps; return for each one its place, its learning rate and its loss."""
    images, rows = torch.randn(BATCHES, 8, 4, generator=torch.Generator().manual_seed(1)), []
    for _ in range(steps):
        order = torch.randperm(BATCHES, generator=torch.Generator().manual_seed(training.epoch))
        batch = images[order[training.done]]
        loss = (training.model(batch).squeeze(1) - batch.sum(dim=1)).square().mean()
        place = f"batch {training.done} of epoch {training.epoch}"
        rows.append((place, training.optimizer.param_groups[0]["lr"], loss.item()))
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        epochs, training.done = divmod(training.done + 1, BATCHES)
        training.epoch += epochs
    return rows


def test_10_1(rank, n):
    whole = steps_of(new_training(0), STEPS)
    for stop in (3, 5, 9):  # within the first epoch, at its end, within the second
        path, training, after = folder / f"{stop}.pt", new_training(0), f"Stopped after {stop} steps"
        steps_of(training, stop)
        save(training, path)
        resumed = new_training(1)
        load(resumed, path)
        same = all(map(torch.equal, training.model.parameters(), resumed.model.parameters()))
        assert same, f"{after}: after load, the new training doesn't have the saved weights."
        rows = zip(steps_of(resumed, STEPS - stop), whole[stop:], strict=True)
        for step, ((place, rate, loss), (right_place, right_rate, right_loss)) in enumerate(rows, stop + 1):
            assert place == right_place, f"{after}: step {step} trains on {place}, not on {right_place}."
            rates = f"{after}: step {step} has the learning rate {rate:.4f}, not {right_rate:.4f}."
            assert close(rate, right_rate, 1e-9), rates
            dropout = f"step {step} has the right weights and images, but dropout draws other zeros."
            later = f"step {step - 1} has the right loss, and then the weights move differently than before."
            assert loss == right_loss, f"{after}: {dropout if step == stop + 1 else later}"


def in_child(path, prepare):
    """Save the second state in a child process that is prepared to end early; return its exit status, what is left."""
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a save that never ends must not outlive this rank
            prepare()
            save(state(2), path)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), step_in(path)


def state(step):
    return {"step": step, "weights": torch.full((100_000,), float(step))}


def step_in(path):
    """Return the step of a saved state; None where the file is missing or damaged."""
    try:
        loaded = torch.load(path)
        return loaded["step"] if bool((loaded["weights"] == loaded["step"]).all()) else None
    except Exception:  # torch.load raises many kinds of error on a damaged file
        return None


NOT_SYNCED, SYNCED = 8, 9  # exit status: whether the whole file lay on the disk at the rename


def end_before_rename(path):
    """End this process when it renames a file to `path`; its exit status tells what was on the disk."""
    synced = {}  # inode of a file -> its size at the last fsync

    def syncing(sync, file):
        sync(file)
        about = os.stat(file if isinstance(file, int) else file.fileno())
        synced[about.st_ino] = about.st_size

    def ending(rename, source, target, **options):
        if Path(target).resolve() != path.resolve():
            return rename(source, target, **options)
        about = os.stat(source)
        os._exit(SYNCED if synced.get(about.st_ino) == about.st_size else NOT_SYNCED)

    for name, make in {"fsync": syncing, "fdatasync": syncing, "replace": ending, "rename": ending}.items():
        substitute(program, os, name, partial(make, getattr(os, name)))  # pathlib and shutil find theirs in os


def test_10_2(rank, n):
    path = folder / "last.pt"
    save(state(1), path)
    assert step_in(path) == 1, "After an undisturbed save, the file can't be loaded."
    size = path.stat().st_size
    status, left = in_child(path, lambda: end_at(size // 2))
    assert status and left == 1, "Ended in the middle of its second write, it had already destroyed the old file."
    status, left = in_child(path, lambda: end_before_rename(path))
    assert status, "The new file didn't get its name by a rename."
    assert left == 1, "Ended just before the rename, it had already destroyed the old file."
    assert status == SYNCED, "The rename came while content was only in memory: a power cut leaves the name alone."
    save(state(3), path)
    assert step_in(path) == 3, "After the two that were ended, a third save didn't leave the newest state."


def test_10_3(rank, n):
    path = folder / "checkpoint.pt"
    with slow_saves() as saved:
        save({f"weight{rank}": torch.full((2,), float(rank))}, path, rank, n)
        there = path.exists()
        names = sorted(torch.load(path)) if there else []
        wait_for_all()
    counts = sorted(map(len, gathered(saved)))
    assert counts != [1, 1], "Both ranks wrote the file, at the same time and under the same name."
    assert counts == [0, 1], f"The ranks wrote {counts[1]} and {counts[0]} files."
    assert there, f"Rank {rank} came back from save, and the file wasn't there yet."
    assert names == ["weight0", "weight1"], f"The file holds {', '.join(names) or 'nothing'}."


def test_10_4(rank, n):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    whole, stage = nn.Sequential(*layers), nn.Sequential(*layers[2 * rank : 2 * rank + 2])
    save(stage, 2 * rank, folder / "stages")
    wait_for_all()
    saved = dcp.FileSystemReader(folder / "stages").read_metadata().state_dict_metadata
    missing = sorted(whole.state_dict().keys() - saved.keys())
    assert not missing, f"The checkpoint holds {', '.join(sorted(saved))}, but not {', '.join(missing)}."
    state = {name: torch.zeros_like(tensor) for name, tensor in whole.state_dict().items()}
    dcp.load(state, checkpoint_id=folder / "stages")
    other = [name for name, tensor in whole.state_dict().items() if not torch.equal(tensor, state[name])]
    assert not other, f"Under {', '.join(other)}, the checkpoint has the numbers of another layer."
