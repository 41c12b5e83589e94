"""Run a training script unchanged, and note what it does: samples, steps, messages, chance. It needs PyTorch alone."""

import gc
import os
import runpy
import signal
import sys

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import data, keep, messages
from .data import taken, trained
from .messages import calls
from .notes import ORDER, finish, note, note_once, now, number_of

optimizers, last_drawn = {}, {}  # the last batch before a step of each
seen, alive, trainable = {}, set(), {}  # modules that ran; parameters with a gradient; all that want one


def measure(tensors) -> tuple:
    """Return the norm of tensors together, whole if split, and a sum that two tensors of one norm do not share."""
    square = mixed = 0.0
    for place, tensor in enumerate(tensors):
        tensor = tensor.detach()
        flat = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).double().flatten()
        square += float(flat.square().sum())
        mixed += float(flat @ torch.cos(torch.arange(len(flat), device=flat.device, dtype=flat.dtype) + place))
    return square**0.5, mixed


def parameters(optimizer) -> list:
    """Return all that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_empty(optimizer) -> bool:
    """Whether a step only makes an optimizer create its state, as `get_state_dict` does before it loads one."""
    grads = [parameter.grad for parameter in parameters(optimizer)]
    still = not any(group["lr"] for group in optimizer.param_groups)
    return still and all(grad is not None and not grad.any() for grad in grads)


def before_step(optimizer, *_):
    """Note the first weights."""
    if id(optimizer) not in optimizers and not is_empty(optimizer):
        norm, mixed = measure(parameters(optimizer))
        handler = signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None)
        note("start", optimizer=number_of(optimizers, optimizer), weights=norm, mixed=mixed, handler=handler)


def find_trainable():
    """Name the parameters of the modules that have run: after a backward pass, when they are sharded again."""
    inside = {id(child) for module in seen.values() for child in module.modules() if child is not module}
    for module in (module for key, module in seen.items() if key not in inside and module.training):
        found = {id(p): (name.removeprefix("module."), p) for name, p in module.named_parameters()}
        trainable.update({key: pair for key, pair in found.items() if pair[1].requires_grad})


def after_step(optimizer, *_):
    """Note a step: after it, since some trainers compute the gradients inside it."""
    if is_empty(optimizer):
        return
    if not now["steps"]:
        find_trainable()
    counted = dict(calls)
    norms = {id(p): measure([p.grad])[0] for p in parameters(optimizer) if p.grad is not None}
    alive.update(key for key, norm in norms.items() if norm)
    weights, mixed = measure(parameters(optimizer))
    key, drawn = number_of(optimizers, optimizer), (now["pass"], taken[now["pass"]])
    loader, number = now["pass"] if last_drawn.get(key) != drawn else (None, 0)  # a loader that was read before is none
    last_drawn[key] = drawn
    trained[loader].add(number)
    step = {"gradient": sum(norm**2 for norm in norms.values()) ** 0.5, "weights": weights, "mixed": mixed}
    step |= {"optimizer": key, "rates": [float(group["lr"]) for group in optimizer.param_groups]}
    note("step", **step, loader=loader, number=number, taken=drawn[1], parts=now["parts"], calls=counted)
    calls.clear()
    now.update(parts=[], steps=now["steps"] + 1)
    if ORDER["stop"] and ORDER["stop"][1] == now["steps"]:
        os.kill(os.getpid(), ORDER["stop"][0])
    if loader is None and now["steps"] >= ORDER["batches"] * ORDER["epochs"]:
        finish()


def watch():
    """Note each optimizer step, each backward pass, and the modules that run before the first of them."""
    backward = torch.autograd.backward

    def noted(tensors, *args, **options):
        before = calls.copy()
        backward(tensors, *args, **options)
        now["parts"].append({"terms": now["terms"], "synced": now["synced"], "calls": dict(calls - before)})
        now.update(synced=None, terms=0)

    def ran(module, _, output):
        if not now["steps"]:
            seen[id(module)] = module
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            note_once("dtype", str(output.dtype).removeprefix("torch."))
        if isinstance(module, FSDPModule):
            note_once("wrapped", "FSDP2")

    torch.autograd.backward = noted
    register_module_forward_hook(ran)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def at_end():
    """Note the parameters that were not trained."""
    held = {id(parameter) for _, optimizer in optimizers.values() for parameter in parameters(optimizer)}
    missing = [name for key, (name, _) in trainable.items() if key not in held]
    note("model", missing=missing, unused=[name for key, (name, _) in trainable.items() if key in held - alive])
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    if stage and any(isinstance(thing, stage._PipelineStageBase) for thing in gc.get_objects()):
        note("pipeline")


def run(order, rank):
    """Run the script of an order as one rank."""
    ORDER.update(order, rank=rank, at_end=at_end)
    ORDER["fd"] = os.open(f"{order['notes']}/{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.chdir(order["cwd"])
    script, *sys.argv[1:] = order["command"]
    sys.argv[0], sys.path[0] = script, os.path.dirname(os.path.abspath(script))
    for module in (keep, data, messages):
        module.watch()
    watch()
    data.seed(order["seed"] + rank)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    at_end()
