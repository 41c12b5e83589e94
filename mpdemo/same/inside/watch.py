"""Run a training script unchanged, and note what it does: samples, steps, messages, chance. It needs PyTorch alone.

`serve.py` forks the ranks, and each calls `run`; torchrun can start them, too: ``torchrun ... watch.py ORDER.json``.
A note is one line of JSON in ``NOTES/RANK.jsonl``. It is written at once, so a killed rank leaves its notes as well.
"""

import collections
import functools
import itertools
import json
import os
import runpy
import signal
import sys
import time

import chance
import keep
import messages
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

ORDER = {}  # how much is run, and where the notes are written
calls = collections.Counter()  # of collectives, so far
loaders, datasets, optimizers, passes = [], [], [], {}
trained = collections.defaultdict(set)  # by loader: the passes over it in which there was a step
seen, alive, trainable = {}, {}, {}  # modules before the first step; parameters with a gradient; all that want one
taken, last_drawn = collections.Counter(), {}  # batches of each pass over a loader; the last one before a step
now = {"pass": (None, 0), "parts": [], "synced": None, "terms": 0, "steps": 0}


def note(kind, **what):
    """Write a note of this rank."""
    os.write(ORDER["fd"], (json.dumps({"kind": kind, **what}) + "\n").encode())


@functools.cache
def note_once(kind, name):
    """Write a note the first time."""
    note(kind, name=name)


def number_of(known, thing) -> int:
    """Return a thing's place in a list of those met so far; the list keeps it alive, so no other gets its id."""
    place = next((k for k, other in enumerate(known) if other is thing), len(known))
    if place == len(known):
        known.append(thing)
    return place


class Noted:
    """Stands for a loader's batch sampler: notes the whole order of an epoch, and hands out the first batches of it."""

    def __init__(self, loader, sampler):
        self.sampler, self.dataset, self.in_batches = sampler, loader.dataset, loader._auto_collation
        kind = number_of(datasets, loader.dataset), loader.batch_size, type(loader.sampler).__name__
        if kind not in loaders:  # many scripts build a new loader for each epoch
            loaders.append(kind)
        self.key, self.number = loaders.index(kind), 0

    def __len__(self):
        return min(len(self.sampler), ORDER["batches"])

    def __iter__(self):
        self.number = passes[self.key] = passes.get(self.key, 0) + 1
        if len(trained[self.key]) >= ORDER["epochs"]:
            finish()
        whole = list(itertools.islice(self.sampler, None if hasattr(self.sampler, "__len__") else ORDER["batches"]))
        batches = [[plain(index) for index in (batch if self.in_batches else [batch])] for batch in whole]
        root, samples = self.dataset, batches
        while isinstance(root, Subset):  # a sample's number in the whole data set, not in a part of it
            samples = [[plain(root.indices[index]) for index in batch] for batch in samples]
            root = root.dataset
        root = number_of(datasets, root)
        note("pass", loader=self.key, number=self.number, batches=batches, samples=samples, root=root)
        replayed = ORDER["replay"].get(str(self.key), [])
        if len(replayed) >= self.number and self.in_batches:
            whole = replayed[self.number - 1]
        yield from whole[: ORDER["batches"]]


def plain(index):
    """Return a sample's number as JSON can hold it."""
    return int(index) if hasattr(index, "__index__") else repr(index)


def watch_data():
    """Note which samples are drawn, and which batches the script takes."""
    index_sampler, next_batch = DataLoader._index_sampler.fget, _BaseDataLoaderIter.__next__

    def noted(loader):
        if loader._dataset_kind == 0:  # a map: samples have numbers
            return Noted(loader, index_sampler(loader))
        note_once("unseen", type(loader.dataset).__name__)
        return index_sampler(loader)

    def take(iterator):
        batch = next_batch(iterator)
        if isinstance(iterator._index_sampler, Noted):
            now["pass"] = (iterator._index_sampler.key, iterator._index_sampler.number)
            taken[now["pass"]] += 1
        return batch

    DataLoader._index_sampler = property(noted)
    _BaseDataLoaderIter.__next__ = take


def whole(tensor):
    """Return a tensor's own values, all of them where it is split over ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def measure(tensors) -> tuple:
    """Return the norm of tensors together, and a sum that two tensors of one norm do not share."""
    square = mixed = 0.0
    for place, tensor in enumerate(tensors):
        flat = whole(tensor).double().flatten()
        square += float(flat.square().sum())
        mixed += float(flat @ torch.cos(torch.arange(len(flat), device=flat.device, dtype=flat.dtype) + place))
    return square**0.5, mixed


def parameters(optimizer) -> list:
    """Return all that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def before_step(optimizer, *_):
    """Note the first weights, and the parameters that should be trained."""
    if optimizer not in optimizers:
        norm, mixed = measure(parameters(optimizer))
        note("start", optimizer=number_of(optimizers, optimizer), weights=norm, mixed=mixed)
        inside = {id(child) for module in seen.values() for child in module.modules() if child is not module}
        for module in (module for key, module in seen.items() if key not in inside and module.training):
            found = {id(p): (name.removeprefix("module."), p) for name, p in module.named_parameters()}
            trainable.update({key: pair for key, pair in found.items() if pair[1].requires_grad})
        handler = signal.getsignal(signal.SIGTERM)
        note("handler", there=handler not in (signal.SIG_DFL, None))


def after_step(optimizer, *_):
    """Note a step: after it, since some trainers compute the gradients inside it."""
    counted = calls.copy()
    held = [p for p in parameters(optimizer) if p.grad is not None]
    norms = {id(p): measure([p.grad])[0] for p in held}
    alive.update({key: True for key, norm in norms.items() if norm})
    weights, mixed = measure(parameters(optimizer))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    key, drawn = number_of(optimizers, optimizer), (now["pass"], taken[now["pass"]])
    loader, number = now["pass"] if last_drawn.get(key) != drawn else (None, 0)  # a loader that was read before is none
    last_drawn[key] = drawn
    trained[loader].add(number)
    note(
        "step",
        optimizer=key,
        gradient=sum(norm**2 for norm in norms.values()) ** 0.5,
        weights=weights,
        mixed=mixed,
        rates=rates,
        loader=loader,
        number=number,
        taken=taken[now["pass"]],
        parts=now["parts"],
        calls=dict(counted),
    )
    calls.clear()
    now.update(parts=[], steps=now["steps"] + 1)
    stop = ORDER.get("stop") or {}
    if stop.get("step") == now["steps"]:
        os.kill(os.getpid(), stop["signal"])
    if loader is None and now["steps"] >= ORDER["batches"] * ORDER["epochs"]:
        finish()


def watch_steps():
    """Note each optimizer step, each backward pass, and the modules that run before the first of them."""
    backward = torch.autograd.backward

    def noted(tensors, *args, **options):
        before = calls.copy()
        backward(tensors, *args, **options)
        loss = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        value = float(whole(loss)) if loss.numel() == 1 else None
        made = dict(calls - before)
        now["parts"].append({"loss": value, "terms": now["terms"], "synced": now["synced"], "calls": made})
        now.update(synced=None, terms=0)

    def ran(module, _, output):
        if not optimizers:
            seen[id(module)] = module
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            note_once("dtype", str(output.dtype).removeprefix("torch."))
        if isinstance(module, FSDPModule):
            note_once("wrapped", "FSDP2")

    torch.autograd.backward = noted
    register_module_forward_hook(ran)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def finish():
    """Note that enough was seen, and wait until all ranks have: the one that forked them ends them."""
    unused = [name for key, (name, _) in trainable.items() if not alive.get(key)]
    held = {id(parameter) for optimizer in optimizers for parameter in parameters(optimizer)}
    note("model", unused=unused, missing=[name for key, (name, _) in trainable.items() if key not in held])
    if "torch.distributed.pipelining.stage" in sys.modules:
        note("pipeline")
    sys.stdout.flush()
    open(f"{ORDER['notes']}/{ORDER['rank']}.end", "w").close()
    if not ORDER["ended"]:
        while ORDER.get("waited_for"):
            time.sleep(1)
        os._exit(0)


def run(order, rank) -> int:
    """Run the script of an order as one rank; return its exit status."""
    ORDER.update(order, rank=rank, ended=False)
    ORDER["fd"] = os.open(f"{order['notes']}/{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.chdir(order["cwd"])
    script, *sys.argv[1:] = order["command"]
    sys.argv[0], sys.path[0] = script, os.path.dirname(os.path.abspath(script))
    keep.watch(ORDER, note_once)
    chance.watch(ORDER, note_once, now)
    messages.watch(calls, note_once, now)
    watch_data()
    watch_steps()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    ORDER["ended"] = True
    finish()
    return 0


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        sys.exit(run(json.load(file), int(os.environ.get("RANK", 0))))
