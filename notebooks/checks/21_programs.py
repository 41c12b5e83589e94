"""Tests of the programs in notebook 21: a reader's own DDP, and its no_sync()."""
# ruff: noqa: F821 - what the reader's program defines

import copy
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import gradients, require_gradients, substitute

BUCKET = 512  # bytes: two of the layers of `Layers`, which has seven
UNDER_WAY = weakref.WeakSet()  # every late all-reduce that something still holds


class Layers(nn.Module):
    """Seven layers of 256 bytes and a buffer, other ones on each rank; `skip` are layers that aren't used."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.layers, self.skip = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(7)), ()
        self.register_buffer("shift", torch.full((8,), 1.0 + rank))

    def forward(self, inputs):
        for number, layer in enumerate(self.layers):
            inputs = inputs if number in self.skip else inputs + layer(inputs + self.shift)
        return inputs


def late_all_reduces(program):
    """Let asynchronous all-reduces happen when they are waited for, so that no luck hides a missing wait; note both.

    Noted, too: that a tensor was changed in between, and when gradients are clipped.
    """
    all_reduce, clip, log = dist.all_reduce, torch.nn.utils.clip_grad_norm_, []

    class Work:
        def __init__(self, tensor, *options):
            self.tensor, self.sent, self.options = tensor, tensor.clone(), options
            UNDER_WAY.add(self)

        def wait(self, *_):
            if self.sent is not None:
                log.append(("wait", self.tensor.nbytes))
                log.extend([] if torch.equal(self.tensor, self.sent) else [("changed", self.tensor.nbytes)])
                all_reduce(self.tensor, *self.options)
                self.sent = None

    def late(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        log.append(("send" if async_op else "block", tensor.nbytes))
        return Work(tensor, op, group) if async_op else all_reduce(tensor, op, group)

    def noted(*args, **kwargs):
        log.append(("clip", 0))
        return clip(*args, **kwargs)

    substitute(program, dist, "all_reduce", late)
    substitute(program, torch.nn.utils, "clip_grad_norm_", noted)
    return log


def test_21_1(rank, n):
    net, log = Layers(rank), late_all_reduces(program)
    single, old = Layers(0), []
    ddp = MyDDP(net, BUCKET)
    for (name, own), right in zip(net.state_dict().items(), single.state_dict().values(), strict=True):
        what = "buffers" if name == "shift" else "weights"
        assert torch.equal(own, right), (
            f"Rank {rank} doesn't begin with rank 0's {what}: {name} is its own."
        )
    inputs, labels = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 8
    for step, skip in enumerate(((), (), (3, 4))):  # of what is left a bucket fills up, and one doesn't
        net.skip = single.skip = skip
        where = "Where the layers 3 and 4 aren't used," if skip else f"In step {step}"
        cross_entropy(single(inputs[rank::n]), labels[rank::n]).backward()
        local = gradients(single)
        cross_entropy(single(inputs), labels).backward()
        right = gradients(single)
        net.zero_grad()
        loss = cross_entropy(ddp(inputs[rank::n]), labels[rank::n])
        log.clear()
        loss.backward()
        require_overlap(log, where)
        ddp.finish()
        require_buckets(log, where)
        own = gradients(net)
        kept = f"{where} gradients of the step before are still held: every step would take more memory."
        assert all(reference() is None for reference in old), kept
        old = [weakref.ref(thing) for thing in (*own, *UNDER_WAY) if thing is not None]
        used = [number for number, gradient in enumerate(right) if gradient is not None]
        apart = [number for number in used if torch.allclose(own[number], local[number], atol=1e-7)]
        why = "nothing was handed back" if len(apart) == len(used) else "no bucket took them"
        assert not apart, f"{where} the gradients of the layers {apart} are still each rank's own: {why}."
        require_gradients([own[number] for number in used], [right[number] for number in used], where)


def require_overlap(log, where):
    """Require that the backward pass, which has just ended, sent what it could and waited for nothing."""
    kinds = [kind for kind, _ in log]
    assert "block" not in kinds, (
        f"{where} the backward pass stands still in all_reduce until the sum is there."
    )
    assert "wait" not in kinds, f"{where} the backward pass waits for an all-reduce, so nothing overlaps."
    assert "send" in kinds, (
        f"{where} no all-reduce begins before the backward pass has ended, so nothing overlaps."
    )


def require_buckets(log, where):
    """Require all-reduces of a bucket's size, each of them waited for."""
    sizes, waits = (
        [bytes_ for kind, bytes_ in log if kind in kinds] for kinds in (("send", "block"), ("wait",))
    )
    assert max(sizes) <= BUCKET, (
        f"{where} an all-reduce carries {max(sizes)} bytes: bucket_bytes is {BUCKET}."
    )
    alone = f"{where} there are {len(sizes)} all-reduces, and each carries a single gradient: nothing is collected."
    assert max(sizes) == BUCKET, alone
    luck = (
        f"{where} a tensor is changed while its all-reduce is under way: what arrives is a matter of luck."
    )
    assert ("changed", BUCKET) not in log, luck
    missing = len(sizes) - len(waits) - [kind for kind, _ in log].count("block")
    assert not missing, (
        f"{where} finish() returns while {missing} of {len(sizes)} all-reduces are still under way."
    )


def test_21_2(rank, n):
    torch.manual_seed(0)
    model, labels, seen = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), torch.arange(12) % 3, []
    single, clip = copy.deepcopy(model), torch.nn.utils.clip_grad_norm_
    log = late_all_reduces(program)
    ddp, optimizer = Hooks(model), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
    # gradients of the last two are clipped
    for step, (size, count) in enumerate(((0.1, 3), (10, 3), (10, 1))):
        if step == 2:
            require_switched_on(ddp, log)
        inputs = size * torch.randn(12, 5)
        single.load_state_dict(model.state_dict())
        cross_entropy(single(inputs), labels).backward()
        clip(single.parameters(), 1)
        log.clear()
        train_step(
            ddp,
            optimizer,
            list(zip(inputs[rank::n].chunk(count), labels[rank::n].chunk(count), strict=True)),
        )
        kinds = [kind for kind, _ in log]
        sent, waited, where = kinds.count("send"), kinds.count("wait"), f"In step {step}"
        assert sent != 12, (
            "All 4 gradients are sent in each of the 3 microbatches: two thirds of that is wasted."
        )
        assert sent == 4, f"{where} there are {sent} all-reduces: the mean of 4 gradients needs 4."
        assert waited == 4, f"{where} the optimizer doesn't wait for {4 - waited} of 4 all-reduces."
        early = f"{where} gradients are clipped before the all-reduces have ended: each rank measures its own norm."
        assert "clip" not in kinds[: kinds.index("wait")], early
        assert "changed" not in kinds, f"{where} gradients were sent before all microbatches were in them."
        assert len(seen) == step + 1, (
            f"{where} the optimizer makes {len(seen) - step} steps instead of one."
        )
        total = torch.cat([gradient.flatten() for gradient in seen[-1]]).norm()
        assert total < 1.01, f"{where} the gradient has the norm {total:.1f}: it isn't clipped to 1."
        require_gradients(
            seen[-1], gradients(single), where, "Was an older one still in .grad?" if step else ""
        )


def require_switched_on(ddp, log):
    """Require an error inside of no_sync() to come out, and the next backward pass to send; leave no gradients."""
    try:
        with ddp.no_sync():
            raise KeyError
    except KeyError:
        log.clear()
        ddp.model(torch.ones(1, 5)).sum().backward()
        ddp.finish()
        assert log, "After an error inside of no_sync() nothing is sent: it was left switched off."
        ddp.model.zero_grad()
    else:
        raise AssertionError(
            "no_sync() swallows an error inside of it: the run would go on with half a batch."
        )
