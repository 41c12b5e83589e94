"""What a rank runs to check the programs of notebooks/09_checkpoint.ipynb; the checks are in checkpoint.py."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from mpdemo.exercises.rank import folder, substitute
from mpdemo.world.launch import be_killed_with_parent

BATCHES, STEPS = 5, 12  # batches of an epoch, steps of the uninterrupted run
STOPS = (3, 5, 9)  # within the first epoch, at its end, within the second
# Exit status of a save that was ended just before the rename: all of the content was synced, none, a part; or the file
# comes from another folder.
RENAMED, RENAMED_AT_ONCE, TOO_EARLY, ELSEWHERE = 9, 8, 7, 6


def new_training(seed):
    """Return a toy training at its start: dropout, AdamW, a falling learning rate, shuffled batches."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, done=0)


def train(training, steps) -> list[dict]:
    """Train for some steps; return for each one where it was, its learning rate and its loss."""
    import torch

    images = torch.randn(BATCHES, 8, 4, generator=torch.Generator().manual_seed(1))
    rows = []
    for _ in range(steps):
        order = torch.randperm(BATCHES, generator=torch.Generator().manual_seed(training.epoch))
        batch = images[order[training.done]]
        loss = (training.model(batch).squeeze(1) - batch.sum(dim=1)).square().mean()
        place = {"epoch": training.epoch, "batch": training.done, "lr": training.optimizer.param_groups[0]["lr"]}
        rows.append(place | {"loss": loss.item()})
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        epochs, training.done = divmod(training.done + 1, BATCHES)
        training.epoch += epochs
    return rows


def drive_resume(program, rank, world_size):
    """Stop a training, save it, load it into a new one and go on; return the rows beside those without a stop."""
    import torch

    whole, results = train(new_training(0), STEPS), []
    for stop in STOPS:
        path = folder() / f"stop-{stop}.pt"
        training = new_training(0)
        train(training, stop)
        program.save(training, path)
        resumed = new_training(1)
        program.load(resumed, path)
        weights = zip(training.model.parameters(), resumed.model.parameters(), strict=True)
        same = all(torch.equal(*pair) for pair in weights)
        rows = {"rows": train(resumed, STEPS - stop), "whole": whole[stop:]}
        results.append({"stop": stop, "same weights": same} | rows)
    return results


def drive_atomic(program, rank, world_size):
    """Save, then save again and be ended in the middle, or just before the rename; return what is left each time."""
    path = folder() / "last.pt"
    program.save(state(1), path)
    first = {"step": step_in(path), "files": sorted(file.name for file in path.parent.glob("*last*"))}
    size = path.stat().st_size if path.exists() else 0
    middle = {"status": in_child(program, path, lambda: limit_files(size // 2)), "step": step_in(path)}
    rename = {"status": in_child(program, path, lambda: end_before_rename(program, path)), "step": step_in(path)}
    program.save(state(3), path)
    return {"first": first, "middle": middle, "rename": rename, "last": step_in(path)}


def state(step) -> dict:
    import torch

    return {"step": step, "weights": torch.full((100_000,), float(step))}


def step_in(path):
    """Return the step of a saved state; None where the file is missing or damaged."""
    import torch

    try:
        loaded = torch.load(path)
        return loaded["step"] if bool((loaded["weights"] == loaded["step"]).all()) else None
    except Exception:  # torch.load raises many kinds of error on a damaged file
        return None


def in_child(program, path, prepare) -> int:
    """Save the second state in a child process that is prepared to end early; return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            be_killed_with_parent()  # a save that never ends must not outlive this rank
            prepare()
            program.save(state(2), path)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def limit_files(size):
    """End this process when it writes a file beyond `size` bytes."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no memory dump
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def end_before_rename(program, path):
    """End this process when it renames a file to `path`; its exit status tells what was on the disk."""
    synced = {}  # device and inode of a file -> its size at the last fsync

    def syncing(sync):
        def call(file):
            sync(file)
            about = os.stat(file if isinstance(file, int) else file.fileno())
            synced[about.st_dev, about.st_ino] = about.st_size

        return call

    def ending(rename):
        def call(source, target, **options):
            if Path(target).resolve() == path.resolve():
                os._exit(_state_at_rename(Path(source).resolve(), path.resolve(), synced))
            rename(source, target, **options)

        return call

    for name, make in {"fsync": syncing, "fdatasync": syncing, "replace": ending, "rename": ending}.items():
        substitute(os, name, make(getattr(os, name)), program)  # pathlib and shutil find theirs in os


def _state_at_rename(source, path, synced) -> int:
    """Return the exit status for a rename from `source` to `path`, given the size of each file at its last fsync."""
    if path.parent not in source.parents:
        return ELSEWHERE
    about = source.stat()
    size = synced.get((about.st_dev, about.st_ino))
    return RENAMED_AT_ONCE if size is None else RENAMED if size == about.st_size else TOO_EARLY


def drive_save(program, rank, world_size):
    """Let every rank save its part, rank 0 slowly; return how often it wrote, and whether the file is there."""
    import torch

    path, written, save = folder() / "checkpoint.pt", [], torch.save

    def slow_save(object, file, *arguments, **options):
        if isinstance(file, str | Path) or hasattr(file, "name"):  # the gathering of objects saves into memory
            written.append(rank)
            time.sleep(0.5)
        save(object, file, *arguments, **options)

    torch.save = slow_save
    program.save({f"weight{rank}": torch.full((2,), float(rank))}, path, rank, world_size)
    there = path.exists()
    names = sorted(torch.load(path)) if there else []
    return {"written": len(written), "there": there, "names": names}
