"""Run a training script unchanged, and note each step of its optimizers. It needs PyTorch alone."""

import functools
import os
import runpy
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import as_cpu, chance, data, keep, messages, private_torch, rows, sketch, state
from .data import trained
from .messages import calls
from .notes import (
    ORDER,
    before,
    calling,
    finish,
    guarded,
    here,
    new_round,
    note,
    note_line,
    note_once,
    now,
    number_of,
)

optimizers, last_drawn = {}, {}  # the last batch before a step of each
kept, forced = {}, []  # of each step the weights before it: of this rank, and of all ranks for one process
OF_STEP = [*new_round(), "epoch", "backwards", "where", "optimizer", "chances"]
room = [64 * 2**20]  # bytes of weights that a rank keeps


def parameters(optimizer) -> list:
    """Return all that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_empty(optimizer) -> bool:
    """Whether a step only makes an optimizer create its state, as `get_state_dict` does before it loads one."""
    grads = [parameter.grad for parameter in parameters(optimizer)]
    still = not any(group["lr"] for group in optimizer.param_groups)
    return still and all(grad is not None and not grad.any() for grad in grads)


def open_round():
    """Begin a round at a forward pass: the last one is over if it has made a step."""
    if now.stepped or by_hand():
        close_round()
    if now.weights:
        return
    now.update(weights=sketch.weights(), sent="")
    if ORDER["forced"]:
        force()
    elif room[0] > 0 and ORDER["processes"] > 1:
        keep_weights()


def keep_weights():
    """Keep this rank's part of the weights, for one process that begins its step with them."""
    own = {}
    for key, parameter in sketch.known.items():
        place = sketch.place_of(parameter)
        if sketch.is_trained(key) and place is not None:
            own[sketch.name_of(key)] = place, rows.local(parameter.detach())
    room[0] -= sum(part.nbytes for _, part in own.values())
    if room[0] > 0:  # else no step after this one, either
        kept[now.steps] = {name: (place, part.cpu().clone()) for name, (place, part) in own.items()}


@torch.no_grad()
def force():
    """Begin a step with the weights of the several ranks: so nothing is carried from step to step, nor grows."""
    if not forced:
        forced.extend(torch.load(file, weights_only=False) for file in ORDER["forced"])
    found = {sketch.name_of(key): parameter for key, parameter in sketch.known.items()}
    for rank in forced[::-1]:  # of what they hold whole, rank 0's counts
        for name, (place, part) in rank.get(now.steps, {}).items():
            # .data has no version: the script may go back through what it computed with these weights
            if name in found and (into := rows.local(found[name].data)[place]).shape == part.shape:
                into.copy_(part)


def before_step(optimizer, *_):
    """Note the gradients that a step uses, if they are there already."""
    if optimizer in now.stepping:  # its last step has failed
        del now.stepping[now.stepping.index(optimizer) :]
    now.stepping.append(optimizer)
    if len(now.stepping) > 1 or is_empty(optimizer):
        return
    own = parameters(optimizer)
    sketch.meet_held(own)
    if id(optimizer) not in optimizers:
        number_of(optimizers, optimizer)
        started()
    if not now.weights:
        open_round()
    now.weights |= sketch.weights(but=now.weights)
    if any(id(p) in sketch.local for p in own):
        use(own)


def use(own):
    """Note the gradients of some parameters as those that are used."""
    now.gradients |= sketch.gradients(own)


def started():
    """Note with what the steps of an optimizer begin."""
    shapes = {sketch.name_of(key): list(p.shape) for key, p in sketch.known.items()}
    made = dist.is_available() and dist.is_initialized()
    handles = signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None)
    note("start", handler=handles, shapes=shapes, distributed=made, tied=sketch.tied)


def after_step(optimizer, *_):
    """Note a step: after it, since some trainers compute the gradients inside it."""
    while now.stepping and now.stepping.pop() is not optimizer:
        pass
    if now.stepping or is_empty(optimizer):
        return
    own = parameters(optimizer)
    if not any(sketch.name_of(id(p)) in now.gradients for p in own if id(p) in sketch.known):
        use(own)
    step_taken(own, [float(group["lr"]) for group in optimizer.param_groups])
    now.optimizer = number_of(optimizers, optimizer)
    if not now.backward:
        close_if_all()


def step_taken(own, rates):
    """Count a step of some parameters to this round."""
    now.stepped |= set(map(id, own))
    now.early |= now.backward > 0
    now.rates += rates
    now.where = here()


def close_if_all():
    """End the round where all parameters that have a gradient were updated."""
    if now.stepped and {key for key in sketch.local if key in sketch.held} <= now.stepped:
        close_round()


def by_hand() -> bool:
    """Whether the script has taken a step without an optimizer: its weights have changed since the round began."""
    if optimizers or ORDER["climbs"] or not now.parts or sketch.weights() == now.weights:
        return False
    own = list(sketch.known.values())
    if not now.steps:
        started()
        note_once("by hand", "step")
    if any(row[0] for row in sketch.gradients(own).values()):  # or they are gone: those when it went back
        use(own)
    step_taken(own, [0.0])
    return True


def close_round():
    """Write the note of a step."""
    if not now.steps:
        note("untrained", weights=sketch.untrained([model for _, model in rows.models.values()]))
    now.rising, now.last_rate = now.rates[0] > now.last_rate, now.rates[0]
    loader, number, batches = now.read_from
    if last_drawn.get(now.optimizer) == now.read_from:  # a batch that was read before is none
        loader, number = None, 0
    last_drawn[now.optimizer] = now.read_from
    trained[loader].add(number)
    now.seen_rates.add(tuple(now.rates))
    step = {name: getattr(now, name) for name in OF_STEP} | state.found_now()
    step |= {"local": sketch.of_this_rank(), "calls": calls, "taken": batches}
    note("step", **step, loader=loader, number=number)
    calls.clear()
    sketch.seen.update(sketch.local)
    sketch.local.clear()
    now.update(new_round(), steps=now.steps + 1, stepped=set())
    if ORDER["stop"] and ORDER["stop"][1] == now.steps:
        os.kill(os.getpid(), ORDER["stop"][0])
    uncut = loader is None or loader in now.whole
    if uncut and now.steps >= ORDER["batches"] * ORDER["epochs"] or keep.has_saved_twice():
        finish()


@guarded
def goes_back():
    """Note a backward pass before it begins: it may never end."""
    note_once("backward", "seen")
    now.rows = now.rows or list(now.eval_rows)
    now.eval_rows.clear()
    now.trained_on = now.iterator
    batch = f"batch {private_torch.yielded(now.iterator)}" if now.iterator is not None else "a loss"
    calling("backward", batch)


@guarded
def went_back(tensors, before):
    """Note what a backward pass has left, and what was sent in it."""
    now.backwards += 1
    now.averaged = sketch.gradients([p for key, p in sketch.known.items() if key in sketch.local])
    if not optimizers:
        now.gradients = {}
        use(list(sketch.known.values()))
    alone = isinstance(tensors, torch.Tensor) and tensors.numel() == 1
    value = float(rows.local(tensors).detach()) if alone else None
    part = {"calls": dict(calls - before), "loss": value, "where": here(), "in_step": bool(now.stepping)}
    now.parts.append(part)
    if now.stepped:
        close_if_all()


def watch():
    """Note each optimizer step, each backward pass, and the modules that run before the first of them."""
    backward = torch.autograd.backward

    def noted(tensors, *args, **options):
        before = calls.copy()
        goes_back()
        now.backward += 1
        try:
            backward(tensors, *args, **options)
        finally:
            now.backward -= 1
        went_back(tensors, before)

    add_group = Optimizer.add_param_group

    @functools.wraps(add_group)
    def added(optimizer, param_group):
        add_group(optimizer, param_group)
        note_once("optimizer at", here())
        sketch.meet_held(optimizer.param_groups[-1]["params"])  # a list by now, whatever was given

    torch.autograd.backward = noted
    register_optimizer_step_pre_hook(guarded(before_step))
    register_optimizer_step_post_hook(guarded(after_step))
    Optimizer.add_param_group = added
    note_line(torch.autograd, "grad", "grad at")
    before(nn.Module, "zero_grad", lambda *_, **__: by_hand() and close_round())
    rows.begin.append(open_round)


@guarded
def at_end():
    """Note the last step, and what its optimizers hold."""
    if now.stepped or by_hand():
        close_round()
    held = set(sketch.held) or set(sketch.known)
    outside = held & sketch.known.keys() - sketch.wrapped
    outside = {sketch.name_of(key): key in sketch.frozen for key in outside}  # and whether it was frozen
    note("model", outside=outside)
    note("kept", steps=len(kept))
    if kept:
        torch.save(kept, f"{ORDER['notes']}/{ORDER['rank']}.weights")


def run(order, rank):
    """Run the script of an order as one rank."""
    ORDER.update(order, rank=rank, at_end=at_end)
    ORDER["fd"] = os.open(f"{order['notes']}/{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.chdir(order["cwd"])
    script, *sys.argv[1:] = order["command"]
    sys.argv[0], sys.path[0] = script, os.path.dirname(os.path.abspath(script))
    if order["device"] == "cpu":
        as_cpu.install(order["devices"])
    as_cpu.replace_gloo()
    keep.watch()
    if not order["plain"]:
        private_torch.do_not_compile()
        watch()
        for module in (data, rows, sketch, chance, state, messages):
            module.watch()
    chance.seed(order["seed"] + rank)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    at_end()
