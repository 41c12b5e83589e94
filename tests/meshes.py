"""Meshes of notebooks/scripts/train_gpt.py in processes of their own, and what a test changes in one before it runs."""

import importlib
import itertools
import math
import os
import sys
import time
import traceback

import torch
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset
from worlds import FORKS, forked

from mpdemo.labs.meshes import NAMES, SCRIPTS, STEPS, sizes_of, watch
from mpdemo.labs.meshes import plain as in_rows
from mpdemo.world.family import held_port

CLIP = torch.nn.utils.clip_grads_with_norm_
LIMIT = 1e-5  # of each difference, relative: rounding comes to 4e-6, a mistake to 1e-3 and more
SECONDS = 480  # after which a mesh has hung; two processes may compile for minutes


# --- a mesh


def run_mesh(folder, flags, world, hook=None, scripts=SCRIPTS) -> list:
    """Run train_gpt.py in some processes; return what each has noted. A hook changes it before."""
    held = held_port()
    address, port = held.getsockname()
    environment = {"WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    given = folder, flags, environment, hook, scripts
    processes = [FORKS.Process(target=run_rank, args=(rank, *given)) for rank in range(world)]
    for process in processes:
        process.start()
    end = time.monotonic() + SECONDS
    while any(process.exitcode is None for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + 5)  # in which the others say why, too
        time.sleep(0.05)
    for process in processes:
        if process.exitcode is None:
            process.kill()
        process.join()
    logs = "".join((folder / f"log-{rank}").read_text()[-3000:] for rank in range(world))
    assert not any(process.exitcode for process in processes), f"{flags}\n{logs}"
    return [torch.load(folder / f"noted-{rank}.pt") for rank in range(world)]


def run_rank(rank, folder, flags, environment, hook, scripts):
    """In the new process: run the script's main(), and save what it has come to."""
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    log = (folder / f"log-{rank}").open("w", buffering=1)
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout = sys.stderr = log
    os.chdir(folder)
    sys.argv, sys.path[:0] = ["train_gpt.py", *flags], [str(scripts)]
    torch.set_num_threads(1)
    status = 1
    try:
        job, module = importlib.import_module("job"), importlib.import_module("train_gpt")
        with watch(module, job) as noted:
            if hook:
                hook(module, job)
            module.main()
        torch.save(noted, folder / f"noted-{rank}.pt")
        status = 0
    except SystemExit as end:
        print(end)
    except BaseException:
        traceback.print_exc()
    log.flush()
    os._exit(status)


def unsaved(script, job):
    """A hook: save no checkpoint."""
    job.Run.save = lambda *given: None


def compile_eagerly(script, job):
    """A hook: compile as by default, except that no C++ is generated."""
    compiled = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: compiled(module, backend="aot_eager")
    unsaved(script, job)


def leave_empty(script, job):
    """A hook: the last block has memory that no reset_parameters fills."""
    gpt = importlib.import_module("gpt")
    made = gpt.GPT.__init__

    def init(model, *sizes):
        made(model, *sizes)
        model.blocks[-1].scale = torch.nn.Parameter(torch.ones(4))
        for name in ("mask", "mean"):
            model.blocks[-1].register_buffer(name, torch.ones(4) > 0, persistent=name == "mean")

    gpt.GPT.__init__ = init


def change_a_token(script, job):
    """A hook: train on a packed row, and on one with another token in its second document; save each token's loss."""
    make_datasets, found = importlib.import_module("gpt").make_datasets, []

    def two_rows(packed):
        inputs, targets = make_datasets(packed=packed)[0].tensors
        row = (inputs[:-1] == script.END).sum(1).argmax()  # with most documents; the last row has padding
        inputs, targets = (tensor[row].repeat(2, 1) for tensor in (inputs, targets))
        begins = (inputs[0] == script.END).nonzero().flatten().tolist()
        torch.save(begins, "begins.pt")
        inputs[1, begins[1] + 2] += 1
        return [TensorDataset(inputs, targets)] * 2

    def noting(logits, targets, reduction):
        losses = cross_entropy(logits, targets, reduction="none")
        if torch.is_grad_enabled():
            found.append(losses.detach())
            torch.save(torch.stack(found[-2:]), f"tokens-{os.environ['RANK']}.pt")
        return losses.sum()

    script.make_datasets, script.cross_entropy, job.places = (
        two_rows,
        noting,
        lambda *given: iter([[(0, 0), (0, 1)]]),
    )
    unsaved(script, job)


def signal_one(script, job):
    """A hook: the last rank gets a signal in its first step, and all look after the second."""
    places, job.LOOK = job.places, 2

    def signalling(*given):
        for place in places(*given):
            yield place
            if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
                os.kill(os.getpid(), job.signal.SIGUSR1)

    job.places = signalling


# --- one device


def plain(batch, blocks, steps=STEPS, packed=False) -> dict:
    """Train on one device, each packed document in a row of its own; return what it comes to, as a rank notes it."""
    return in_rows(batch, blocks, steps, alone if packed else None)


def alone(inputs, targets) -> list:
    """Return packed documents, each in a row of its own that it begins."""
    found = []
    for row in zip(inputs, targets, strict=True):
        begins = [0, *(k for k in range(1, len(row[0])) if row[0][k] == 0), len(row[0])]
        for begin, end in itertools.pairwise(begins):
            tokens, wanted = (tensor[begin:end] for tensor in row)
            rest = (0, len(row[0]) - (end - begin))
            found.append((pad(tokens, rest), pad(wanted, rest, value=-100)))
    return [torch.stack(tensors) for tensors in zip(*found, strict=True)]


# --- names of meshes


def world_of(mesh) -> int:
    return math.prod(sizes_of(mesh).values())


def all_meshes(processes) -> list:
    """Return all meshes of up to so many processes."""
    every = itertools.product(range(1, processes + 1), repeat=len(NAMES))
    fit = sorted((math.prod(sizes), sizes) for sizes in every if math.prod(sizes) <= processes)
    words = [
        " ".join(f"{name}{size}" for name, size in zip(NAMES, sizes, strict=True) if size > 1)
        for _, sizes in fit
    ]
    return [mesh or "one process" for mesh in words]


def count_instead(script, job):
    """A hook: count a step as rehearse.py does, in real processes, and note nothing else."""
    rehearse = importlib.import_module("rehearse")
    torch.nn.utils.clip_grads_with_norm_ = CLIP

    def main():
        args, device = script.read_flags(), job.join()
        peak, calls, _ = rehearse.count_step(args, device, *script.make_mesh(args, device))
        torch.save((peak, calls), f"counted-{os.environ['RANK']}.pt")

    script.main = main


def rehearsed(folder, arguments, ranks, rank) -> tuple:
    """Rehearse a rank in a process of its own; return the peak of a step, its calls, and what is printed."""
    words = [f"--ranks={ranks}", f"--rank={rank}", *arguments]
    done = forked(folder, rehearse_alone, folder, words, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return *torch.load(folder / "rehearsed.pt"), done.stdout


def rehearse_alone(folder, arguments):
    """In the new process: keep what the script counts before it prints it."""
    sys.path.insert(0, str(SCRIPTS))
    rehearse = importlib.import_module("rehearse")
    count_step = rehearse.count_step

    def kept(*given):
        peak, calls, weights = count_step(*given)
        torch.save((peak, calls), folder / "rehearsed.pt")
        return peak, calls, weights

    rehearse.count_step = kept
    rehearse.main(arguments)
