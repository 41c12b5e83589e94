"""Is train_gpt.py, in any mesh, the training of one device? Compare them, and count what each dimension exchanges.

    torchrun --standalone --nproc-per-node 4 -m mpdemo.labs.meshes runs/45_meshes "pp2 replicate2" "shard2 tp2"

A mesh is written as the sizes of its dimensions; a schedule and other flags may follow. The tests compare by it as
well. Taught in notebooks/45_one_mesh.ipynb and 32_in_anger.ipynb.
"""

import importlib
import logging
import math
import os
import re
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from mpdemo.measure.compare import write_result
from mpdemo.paths import root
from mpdemo.world.collectives import gather_objects
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.processes import end

SCRIPTS = root() / "notebooks" / "scripts"
NAMES = ("pp", "replicate", "shard", "cp", "tp")
WIDTH, HEADS = 32, 8
STEPS = 3  # of an epoch; there are two


def sizes_of(mesh) -> dict:
    """Return the sizes of a mesh such as "pp2 tp2"; further words are a schedule or switches."""
    return dict.fromkeys(NAMES, 1) | {
        name: int(size) for name, size in re.findall(r"\b([a-z]+)(\d)\b", mesh)
    }


def flags_of(mesh) -> tuple:
    """Return the flags of a mesh, its batch and its blocks; it has as many microbatches as its stages, or two."""
    sizes, words = sizes_of(mesh), mesh.split()
    schedule = next((word for word in ("gpipe", "interleaved", "zbv") if word in words), "1f1b")
    stages = sizes["pp"] * (2 if schedule in ("interleaved", "zbv") else 1)
    micro, blocks = max(2, stages), max(4, stages)
    parts = sizes["replicate"] * sizes["shard"] * micro
    batch = -(-24 // parts) * parts
    flags = [f"--{name}={size}" for name, size in sizes.items() if size > 1]
    flags += [f"--schedule={schedule}", f"--microbatches={micro}", f"--batch={batch}", f"--width={WIDTH}"]
    flags += [f"--heads={HEADS}", f"--blocks={blocks}", "--checkpoint=run"]
    return [*flags, *(word for word in words if word.startswith("--"))], batch, blocks


def small_sets(make_datasets, batch) -> list:
    """Return sets of three batches to train on, and of one and a quarter to validate."""
    pairs = zip(make_datasets(), (STEPS * batch, batch + batch // 4), strict=True)
    return [TensorDataset(*(tensor[:most] for tensor in dataset.tensors)) for dataset, most in pairs]


@contextmanager
def watch(script, job):
    """Make it train on small sets; yield losses, norms, gradients before they are clipped, and validations."""
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

    with (
        patch.object(
            script, "make_datasets", lambda **given: small_sets(partial(make_datasets, **given), batch)
        ),
        patch.object(script, "make_model", model),
        patch.multiple(job.Run, look=looked, end_epoch=ended),
        patch.object(torch.nn.utils, "clip_grads_with_norm_", clipped),
    ):
        yield noted


def plain(batch, blocks, steps=STEPS, alone=None) -> dict:
    """Train on one device, without the script; return what a rank would note. `alone` unpacks documents into rows."""
    with patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
        gpt = importlib.import_module("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(WIDTH, blocks, HEADS)
    train, check = small_sets(partial(gpt.make_datasets, packed=alone is not None), batch)
    rows = alone or (lambda *tensors: tensors)
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
                noted["validations"].append(
                    model(*rows(*check.tensors)).item() / gpt.count(check.tensors[1])
                )
    return noted


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
        assert {name: grad.shape for name, grad in got} == {
            name: grad.shape for name, grad in gradients.items()
        }
        for name, grad in got:
            errors[name] = max(errors[name], (grad - gradients[name]).square().sum().item())
        wrong.append(errors)
        whole.append({name: grad.square().sum().item() for name, grad in gradients.items()})
    found["gradient"] = math.sqrt(max(wrong[0][name] / whole[0][name] for name in whole[0]))
    total = [sum(square for step in steps for square in step.values()) for steps in (wrong, whole)]
    return found | {"gradients": math.sqrt(total[0] / total[1])}


def compare_all(meshes, world) -> dict:
    """Return of each mesh how far it is `apart` from one device and the `bytes` of a step, or why it is `refused`."""
    warnings.simplefilter("ignore")  # of PyTorch's own; the log is for what is found
    logging.disable(logging.WARNING)
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.world_size)}  # which srun does not set
    sys.path.insert(0, str(SCRIPTS))
    train_gpt, right, rows = importlib.import_module("train_gpt"), cache(plain), {}
    for mesh in meshes:
        flags, batch, blocks = flags_of(mesh)
        sys.argv = ["train_gpt.py", *flags, f"--steps={STEPS}"]
        try:
            # DTensor's caches are a thread's, and would know old meshes
            with ThreadPoolExecutor(1) as thread:
                counted = thread.submit(count, train_gpt, world).result()
                ranks = gather_objects(thread.submit(trained, train_gpt, world).result())
            rows[mesh] = {"apart": differences(ranks, right(batch, blocks)), "bytes": counted}
        except SystemExit as refused:
            rows[mesh] = {"refused": str(refused)}
        if world.rank == 0:
            print(f"{len(rows)} of {len(meshes)}: {mesh}", flush=True)
    return rows


def count(train_gpt, world) -> Counter:
    """Return the bytes that this rank sends in a step, if collectives are rings, by the dimension of the mesh."""
    rehearse, args, counted = importlib.import_module("rehearse"), train_gpt.read_flags(), Counter()
    mesh, ring = train_gpt.make_mesh(args, world.device)
    with patch.object(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_):  # which it replaces
        _, calls, _ = rehearse.count_step(args, world.device, mesh, ring)
    for dimension, name, size in calls:
        ranks = (ring if dimension == "cp" else mesh[dimension]).size()
        counted[dimension] += round(size * sent(name.replace("_", ""), ranks))
    return +counted  # alone, a rank sends nothing


def sent(collective, ranks) -> float:
    """Return how much of the whole tensor a rank sends: messages, and the keys of --cp, go to one other rank."""
    times = {"allreduce": 2, "allgather": 1, "reducescatter": 1}
    found = [factor for name, factor in times.items() if collective.startswith(name)]
    return found[0] * (ranks - 1) / ranks if found else float(ranks > 1)


def report(rows):
    """Print how far each mesh is from one device, and the kB that rank 0 sends in a step, or why it was refused."""
    print(f"{'mesh':18} {'loss':7}{'norm':7}{'gradient':10}a rank sends in a step")
    for name, row in rows.items():
        if "refused" in row:
            print(f"{name:18} refused: {row['refused']}")
            continue
        apart = [f"{row['apart'][what]:.0e}" for what in ("loss", "norm", "gradient")]
        sizes = ", ".join(f"{dimension} {size / 1e3:,.0f} kB" for dimension, size in row["bytes"].items())
        print(f"{name:18} {apart[0]:7}{apart[1]:7}{apart[2]:10}{sizes}")


def trained(train_gpt, world) -> dict:
    """Run the script in the processes of this job; return what this rank has noted."""
    job = train_gpt.job
    with (
        watch(train_gpt, job) as noted,
        patch.object(job, "join", lambda: world.device),
        patch.object(job.Run, "save", lambda *_: None),
        patch.object(dist, "destroy_process_group"),
    ):
        train_gpt.main()
    return noted


if __name__ == "__main__":
    os.environ |= ON_THE_CPU
    out, *meshes = sys.argv[1:]
    end(write_result(out, lambda world: {"meshes": compare_all(meshes, world)}))
