"""Run a training script unchanged, and note each step of its optimizers. It needs PyTorch alone."""

import functools
import os
import runpy
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import chance, data, keep, messages, private_torch, rows, sketch, state, sync_norm, where
from .data import taken, trained
from .messages import calls
from .notes import ORDER, before, finish, note, note_once, now, number_of

optimizers, last_drawn = {}, {}  # the last batch before a step of each
# modules that ran; names that had a gradient; parameters that want one
seen, alive, trainable = {}, set(), {}
OF_ROWS = ("rows", "columns", "values")
stepping = []  # an optimizer's step may call the steps of others, as ZeRO's does: together they are one


def parameters(optimizer) -> list:
    """Return all that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_empty(optimizer) -> bool:
    """Whether a step only makes an optimizer create its state, as `get_state_dict` does before it loads one."""
    grads = [parameter.grad for parameter in parameters(optimizer)]
    still = not any(group["lr"] for group in optimizer.param_groups)
    return still and all(grad is not None and not grad.any() for grad in grads)


def find_parameters():
    """Note those of the modules that have run: after a backward pass, when they are sharded again."""
    inner = {id(child) for module in seen.values() for child in module.modules() if child is not module}
    whole = [module for key, module in seen.items() if key not in inner]
    note("untrained", weights=sketch.untrained(whole))
    for module in (module for module in whole if module.training):
        found = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        if any(map(sketch.is_trained, found)):  # not a model that only a metric looks at
            trainable.update({key: sketch.names.get(key, name) for key, name in found.items()})


def before_step(optimizer, *_):
    """Note the weights before a step, and the gradients, if they are there already."""
    if optimizer in stepping:  # its last step has failed
        del stepping[stepping.index(optimizer) :]
    stepping.append(optimizer)
    if len(stepping) > 1 or is_empty(optimizer):
        return
    sketch.meet_held(parameters(optimizer))
    if id(optimizer) not in optimizers:
        started(number_of(optimizers, optimizer), signal.getsignal(signal.SIGTERM))
    own = parameters(optimizer)
    now.weights = sketch.weights()
    if any(id(p) in sketch.local for p in own):
        now.update(gradients=sketch.gradients(own), largest=sketch.largest(own))


def started(number, handler):
    """Note with what the steps of an optimizer begin."""
    shapes = {sketch.name_of(key): list(p.shape) for key, (_, p) in sketch.known.items()}
    made = dist.is_available() and dist.is_initialized()
    handles = handler not in (signal.SIG_DFL, None)
    note("start", optimizer=number, handler=handles, shapes=shapes, distributed=made)


def after_step(optimizer, *_):
    """Note a step: after it, since some trainers compute the gradients inside it."""
    while stepping and stepping.pop() is not optimizer:
        pass
    if stepping or is_empty(optimizer):
        return
    if not now.steps:
        find_parameters()
    own, key = parameters(optimizer), number_of(optimizers, optimizer)
    now.update(gradients=now.gradients or sketch.gradients(own), largest=now.largest or sketch.largest(own))
    step_taken(key, own, [float(group["lr"]) for group in optimizer.param_groups])


def by_hand():
    """Note a step that the script takes without an optimizer: its weights have changed since the backward pass."""
    if optimizers or not now.parts or sketch.weights() == now.weights:
        return
    own = [parameter for _, parameter in sketch.known.values()]
    if not now.steps:
        started(0, signal.getsignal(signal.SIGTERM))
        note_once("by hand", "step")
        find_parameters()
    if any(sketch.largest(own).values()):  # or they are gone: those when the backward pass was over
        now.update(gradients=sketch.gradients(own), largest=sketch.largest(own))
    step_taken(0, own, [0.0])


def step_taken(key, own, rates):
    """Write the note of a step."""
    gradients, largest = now.gradients, now.largest
    alive.update(name for name, value in largest.items() if value)
    drawn = now.read_from, taken[now.read_from]
    loader, number = (
        now.read_from if last_drawn.get(key) != drawn else (None, 0)
    )  # a loader that was read before is none
    last_drawn[key] = drawn
    trained[loader].add(number)
    now.rates.add(tuple(rates))
    step = {name: getattr(now, name) for name in ("weights", "scheduled", "epoch", "parts", *OF_ROWS)}
    step |= {"optimizer": key, "rates": rates, "gradients": gradients, "local": sketch.of_this_rank()}
    step |= {
        "largest": largest,
        "averaged": now.averaged,
        "backwards": now.backwards,
        "where": where.here(),
    }
    step["state"] = state.found_now()
    note("step", **step, loader=loader, number=number, taken=drawn[1], calls=calls)
    calls.clear()
    rows.used.clear()
    sketch.forget(own)
    now.update(parts=[], rows=[], columns=[], values=[], gradients={}, largest={}, averaged={})
    now.update(scheduled=0, steps=now.steps + 1)
    if ORDER["stop"] and ORDER["stop"][1] == now.steps:
        os.kill(os.getpid(), ORDER["stop"][0])
    uncut = loader is None or loader in now.whole
    if uncut and now.steps >= ORDER["batches"] * ORDER["epochs"] or keep.has_saved_twice():
        finish()


def watch():
    """Note each optimizer step, each backward pass, and the modules that run before the first of them."""
    backward = torch.autograd.backward

    def noted(tensors, *args, **options):
        before = calls.copy()
        note_once("backward", "seen")
        now.rows = now.rows or list(now.eval_rows)
        now.eval_rows.clear()
        where.calling(
            "backward", f"batch {private_torch.yielded(now.iterator)}" if now.iterator is not None else ""
        )
        now.backward += 1
        try:
            backward(tensors, *args, **options)
        finally:
            now.backward -= 1
        now.backwards += 1
        if ORDER["processes"] > 1:
            now.averaged = sketch.gradients(list(sketch.held.values()))
        if not optimizers:
            own = [parameter for _, parameter in sketch.known.values()]
            now.update(
                weights=sketch.weights(), gradients=sketch.gradients(own), largest=sketch.largest(own)
            )
        alone = isinstance(tensors, torch.Tensor) and tensors.numel() == 1
        value = float(rows.local(tensors).detach()) if alone else None
        part = {"terms": now.terms, "synced": now.synced, "calls": dict(calls - before), "loss": value}
        part["where"] = where.here()
        now.parts.append(part)
        now.update(synced=None, terms=0)

    def ran(module, _, output):
        if not now.steps:
            seen[id(module)] = module
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            note_once("dtype", str(output.dtype).removeprefix("torch."))
        if isinstance(module, FSDPModule):
            note_once("wrapped", "FSDP2")

    add_group = Optimizer.add_param_group

    @functools.wraps(add_group)
    def added(optimizer, param_group):
        add_group(optimizer, param_group)
        note_once("optimizer at", where.here())
        sketch.meet_held(optimizer.param_groups[-1]["params"])  # a list by now, whatever was given

    torch.autograd.backward = noted
    register_module_forward_hook(ran)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    Optimizer.add_param_group = added
    before(nn.Module, "zero_grad", lambda *_, **__: by_hand())
    rows.begin.append(by_hand)


def do_not_compile():
    """Run modules as they are written: what a compiled one does inside cannot be seen.

    Only a tensor that tensor parallelism is still sending enters compiled code, as it would: it may lose its gradient.
    """
    compile_it = torch.compile
    compiled = functools.cache(lambda: compile_it(lambda tensor: tensor * 1, backend="aot_eager"))

    def enter(thing):
        return compiled()(thing) if is_sent(thing) else thing

    def as_it_is(model=None, **_):
        if model is None:
            return torch.compile  # a decorator with options: this function again
        if isinstance(model, nn.Module):
            nn.Module.compile(model)  # it compiles how the model is called, by this function
            object.__setattr__(model, private_torch.COMPILED, model)  # where scripts look for it
            return model

        @functools.wraps(model)
        def called(*args, **options):
            if any(map(is_sent, private_torch.tree_leaves((args, options)))):
                args, options = private_torch.tree_map(enter, (args, options))
            return model(*args, **options)

        return called

    torch.compile = as_it_is


def is_sent(thing) -> bool:
    """Whether a tensor that wants a gradient is still on its way from other ranks."""
    return isinstance(thing, private_torch.SentTensor) and thing.requires_grad and torch.is_grad_enabled()


def at_end():
    """Note the parameters that were not trained."""
    by_hand()
    held = {id(p) for _, optimizer in optimizers.values() for p in parameters(optimizer)} or set(
        sketch.known
    )
    outside = [key for key in held if key not in sketch.wrapped and key in sketch.known]
    outside = {sketch.name_of(key): key in sketch.frozen for key in outside}  # and whether it was frozen
    missing = [name for key, name in trainable.items() if key not in held]
    unused = [name for key, name in trainable.items() if key in held and name not in alive]
    strange = [key for key in held if key not in sketch.names]
    note("model", missing=missing, unused=unused, strange=len(strange), held=len(held), outside=outside)
    if rows.kept:
        torch.save(rows.kept, f"{ORDER['notes']}/{ORDER['rank']}.rows")
    if private_torch.has_pipeline():
        note_once("pipeline", "seen")


def run(order, rank):
    """Run the script of an order as one rank."""
    ORDER.update(order, rank=rank, at_end=at_end)
    now.begun = time.monotonic()
    ORDER["fd"] = os.open(f"{order['notes']}/{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.chdir(order["cwd"])
    script, *sys.argv[1:] = order["command"]
    sys.argv[0], sys.path[0] = script, os.path.dirname(os.path.abspath(script))
    if order["device"] == "cpu":
        from . import as_cpu

        as_cpu.install(order["devices"])
    for module in (keep, data, messages, rows, sketch, chance, state, sync_norm):
        module.watch()
    do_not_compile()
    watch()
    chance.seed(order["seed"] + rank)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    at_end()
