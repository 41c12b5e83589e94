"""Meshes of notebooks/scripts/train_gpt.py, and a plain loop on one device that uses nothing of that script."""

import importlib
import itertools
import math
import os
import re
import socket
import sys
import time
import traceback
from functools import partial

import torch
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset
from worlds import FORKS

from mpdemo.paths import root

SCRIPTS = root() / "notebooks" / "scripts"
NAMES = ("pp", "replicate", "shard", "cp", "tp")
WIDTH, HEADS = 32, 8
STEPS = 3  # of an epoch; there are two
CLIP = torch.nn.utils.clip_grads_with_norm_
LIMIT = 1e-5  # of each difference, relative: rounding comes to 4e-6, a mistake to 1e-3 and more
SECONDS = 480  # after which a mesh has hung; two processes may compile for minutes


def small_sets(make_datasets, batch) -> list:
    """Return sets of three batches to train on, and of one and a quarter to validate."""
    rows = STEPS * batch, batch + batch // 4
    pairs = zip(make_datasets(), rows, strict=True)
    return [TensorDataset(*(tensor[:most] for tensor in dataset.tensors)) for dataset, most in pairs]


# --- a mesh


def run_mesh(folder, flags, world, hook=None, scripts=SCRIPTS, script="train_gpt") -> list:
    """Run a script in some processes; return what each has noted. A hook changes it before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [folder, flags, {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}]
    processes = [FORKS.Process(target=run_rank, args=(rank, *given, hook, scripts, script)) for rank in range(world)]
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


def run_rank(rank, folder, flags, environment, hook, scripts, script):
    """In the new process: run the script's main(), and save what it has come to."""
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    log = (folder / f"log-{rank}").open("w", buffering=1)
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout = sys.stderr = log
    os.chdir(folder)
    sys.argv, sys.path[:0] = [script, *flags], [str(scripts)]
    torch.set_num_threads(1)
    status = 1
    try:
        job, module = importlib.import_module("job"), importlib.import_module(script)
        noted = watch(module, job)
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


def watch(script, job) -> dict:
    """Train on small sets, and note gradients before they are clipped, their norms, losses and validations."""
    noted = {"grads": [], "norms": [], "losses": [], "validations": []}
    make_model, make_datasets = script.make_model, script.make_datasets
    clip, look, end_epoch = torch.nn.utils.clip_grads_with_norm_, job.Run.look, job.Run.end_epoch
    batch = int((re.findall(r"--batch=(\d+)", " ".join(sys.argv)) or [32])[0])

    def model(*given):
        made = make_model(*given)
        noted["names"] = [name for name, _ in made.named_parameters()]
        return made

    def clipped(parameters, limit, norm):
        whole = [parameter.grad.full_tensor().clone() for parameter in parameters]
        noted["grads"].append(dict(zip(noted["names"], whole, strict=True)))
        noted["norms"].append(norm.item())
        clip(parameters, limit, norm)

    def looked(run, losses, scored, *rest):
        noted["losses"].append(losses.item() / scored)  # this rank's part
        return look(run, losses, scored, *rest)

    def ended(run, validation):
        noted["validations"].append(validation)
        return end_epoch(run, validation)

    def small(**given):
        return small_sets(partial(make_datasets, **given), batch)

    script.make_datasets, script.make_model = small, model
    torch.nn.utils.clip_grads_with_norm_, job.Run.look, job.Run.end_epoch = clipped, looked, ended
    return noted


def unsaved(script, job):
    """A hook: save no checkpoint."""
    job.Run.save = lambda *given: None


def compile_eagerly(script, job):
    """A hook: compile as by default, except that no C++ is generated."""
    compiled = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: compiled(module, backend="aot_eager")
    unsaved(script, job)


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

    script.make_datasets, script.cross_entropy, job.places = two_rows, noting, lambda *given: iter([[(0, 0), (0, 1)]])
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
    """Train on one device, each document in a row of its own; return what it comes to, as a rank notes it."""
    sys.path.insert(0, str(SCRIPTS))
    gpt = importlib.import_module("gpt")
    sys.path.remove(str(SCRIPTS))
    torch.manual_seed(0)
    model = gpt.GPT(WIDTH, blocks, HEADS)
    train, check = small_sets(partial(gpt.make_datasets, packed=packed), batch)
    rows = alone if packed else lambda *tensors: tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, fused=True)
    noted = {"grads": [], "norms": [], "losses": [], "tokens": [], "validations": []}
    for step in range(steps):
        if step % STEPS == 0:
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(step // STEPS))
        inputs, targets = train[order[step % STEPS * batch :][:batch]]
        loss = model(*rows(inputs, targets)) / gpt.count(targets)
        loss.backward()
        noted["losses"].append(loss.item())
        noted["tokens"].append(gpt.count(targets))
        noted["grads"].append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        noted["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = 8e-3 * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / (2 * STEPS)))
        optimizer.step()
        optimizer.zero_grad()
        if step % STEPS == STEPS - 1:
            with torch.no_grad():
                noted["validations"].append(model(*rows(*check.tensors)).item() / gpt.count(check.tensors[1]))
    return noted


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


def far(a, b) -> float:
    return max((abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)), default=0.0)


def differences(ranks, right, first=0) -> dict:
    """Return how far ranks that began after some steps are from the plain loop: the largest relative differences."""
    losses = [sum(parts) for parts in zip(*(rank["losses"] for rank in ranks), strict=True)]
    steps = slice(first, first + len(losses))
    ended = right["validations"][first // STEPS : (first + len(losses)) // STEPS]
    found = {
        "loss": far(losses, right["losses"][steps]),
        "validation": max(far(rank["validations"], ended) for rank in ranks),
        "norm": max(far(rank["norms"], right["norms"][steps]) for rank in ranks),
    }
    wrong, whole = [], []  # of each step, each tensor's squares
    for step, gradients in enumerate(right["grads"][steps]):
        errors = dict.fromkeys(gradients, 0.0)
        got = [pair for rank in ranks for pair in rank["grads"][step].items()]
        assert {name: grad.shape for name, grad in got} == {name: grad.shape for name, grad in gradients.items()}
        for name, grad in got:
            errors[name] = max(errors[name], (grad - gradients[name]).square().sum().item())
        wrong.append(errors)
        whole.append({name: grad.square().sum().item() for name, grad in gradients.items()})
    found["gradient"] = math.sqrt(max(wrong[0][name] / whole[0][name] for name in whole[0]))
    total = [sum(square for step in steps for square in step.values()) for steps in (wrong, whole)]
    return found | {"gradients": math.sqrt(total[0] / total[1])}


# --- names of meshes


def sizes_of(mesh) -> dict:
    """Return the sizes of a mesh such as "pp2 tp2"; further words are a schedule or switches."""
    return dict.fromkeys(NAMES, 1) | {name: int(size) for name, size in re.findall(r"\b([a-z]+)(\d)\b", mesh)}


def world_of(mesh) -> int:
    return math.prod(sizes_of(mesh).values())


def flags_of(mesh) -> tuple:
    """Return the flags of a mesh, its batch and its blocks; it has as many microbatches as its stages, or two."""
    sizes, words = sizes_of(mesh), mesh.split()
    schedule = next((word for word in ("gpipe", "interleaved", "zbv") if word in words), "1f1b")
    stages = sizes["pp"] * (2 if schedule in ("interleaved", "zbv") else 1)
    micro, blocks = max(2, stages), max(4, stages)
    parts = sizes["replicate"] * sizes["shard"] * micro
    batch = -(-24 // parts) * parts
    flags = [f"--{name}={size}" for name, size in sizes.items() if size > 1]
    flags += [word for word in words if word.startswith("--")]
    flags += [f"--schedule={schedule}", f"--microbatches={micro}", f"--batch={batch}"]
    return [*flags, f"--width={WIDTH}", f"--heads={HEADS}", f"--blocks={blocks}", "--checkpoint=run"], batch, blocks


def all_meshes(processes) -> list:
    """Return all meshes of up to so many processes."""
    every = itertools.product(range(1, processes + 1), repeat=len(NAMES))
    fit = sorted((math.prod(sizes), sizes) for sizes in every if math.prod(sizes) <= processes)
    words = [" ".join(f"{name}{size}" for name, size in zip(NAMES, sizes, strict=True) if size > 1) for _, sizes in fit]
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
    """Rehearse a rank in a process of its own; return the peak of a step and its calls."""
    process = FORKS.Process(target=rehearse_alone, args=(folder, [f"--ranks={ranks}", f"--rank={rank}", *arguments]))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0, (folder / "rehearsed.log").read_text()[-3000:]
    return torch.load(folder / "rehearsed.pt")


def rehearse_alone(folder, arguments):
    """In the new process: keep what the script counts before it prints it."""
    log = (folder / "rehearsed.log").open("w", buffering=1)
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout = sys.stderr = log
    sys.path.insert(0, str(SCRIPTS))
    rehearse = importlib.import_module("rehearse")
    count_step = rehearse.count_step

    def kept(*given):
        peak, calls, weights = count_step(*given)
        torch.save((peak, calls), folder / "rehearsed.pt")
        return peak, calls, weights

    rehearse.count_step = kept
    rehearse.main(arguments)
