"""Context parallelism by hand: causal attention over a sequence that is split over the ranks.

    torchrun --standalone --nproc-per-node=2 notebooks/labs/context_parallel.py

`gathered` first fetches the keys and values of the whole sequence; `ring` passes them on from rank to rank, so that no
rank ever has more than two parts. Outputs and gradients are those of one device. No notebook shows it yet.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

CLOSE = 2e-6  # the sums are added up in another order
LOW = -1e30  # instead of -inf, of which a difference would be nan


class Gather(torch.autograd.Function):
    """All-gather along the sequence; each rank's part takes its gradient from all ranks, by a reduce-scatter."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, whole):
        parts = [part.contiguous() for part in whole.chunk(dist.get_world_size(), dim=2)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        return mine


def scores_of(q, k, first):
    """Return the scaled scores of this rank's queries and keys from position `first` on, and which are not masked."""
    positions = torch.arange(q.shape[2]) + dist.get_rank() * q.shape[2]
    seen = torch.arange(k.shape[2]) + first <= positions[:, None]
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen, LOW), seen


def gathered(q, k, v):
    """Return this rank's part of the attention's output; q, k, v are its parts, (batch, heads, length, size)."""
    k, v = Gather.apply(k), Gather.apply(v)
    scores, _ = scores_of(q, k, first=0)
    return scores.softmax(-1) @ v


class Pass(torch.autograd.Function):
    """Send a tensor to the next rank and return the previous rank's; gradients travel the other way round."""

    @staticmethod
    def forward(ctx, x):
        return shifted(x, 1)

    @staticmethod
    def backward(ctx, gradient):
        return shifted(gradient, -1)


def shifted(x, places):
    """Send x to the rank so many places on; return what comes from the other side."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent, received = x.contiguous(), torch.empty(x.shape)
    sends = dist.P2POp(dist.isend, sent, (rank + places) % world)
    receives = dist.P2POp(dist.irecv, received, (rank - places) % world)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return received


def ring(q, k, v):
    """Return the same as `gathered`, one block of keys and values after the other, by an online softmax."""
    rank, world, length = dist.get_rank(), dist.get_world_size(), q.shape[2]
    block = torch.stack([k, v])
    highest = torch.full((*q.shape[:3], 1), LOW)  # score so far, of each query
    total, output = torch.zeros_like(highest), torch.zeros_like(q)  # of exp(score - highest), and of that times v
    for step in range(world):
        scores, seen = scores_of(q, block[0], first=(rank - step) % world * length)
        higher = torch.maximum(highest, scores.detach().amax(-1, keepdim=True))
        weights = torch.exp(scores - higher) * seen  # in a block that is masked whole, exp(0) would count
        shrink = torch.exp(highest - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights @ block[1]
        highest = higher
        if step < world - 1:
            block = Pass.apply(block)
    return output / total


def compare() -> dict:
    """Return for both ways the largest difference from one device, of this rank's outputs and gradients."""
    torch.manual_seed(0)
    wholes = [torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3)]
    expected, arriving = scaled_dot_product_attention(*wholes, is_causal=True), torch.randn(2, 4, 64, 16)
    expected.backward(arriving)
    found = {}
    for attention in (gathered, ring):
        parts = [mine(whole.detach()).requires_grad_() for whole in wholes]
        output = attention(*parts)
        output.backward(mine(arriving))
        pairs = [(part.grad, mine(whole.grad)) for part, whole in zip(parts, wholes, strict=True)]
        differences = [(a - b).abs().max().item() for a, b in [(output, mine(expected)), *pairs]]
        found[attention.__name__] = max(differences)
    return found


def mine(whole):
    """Return this rank's part of a sequence."""
    return whole.chunk(dist.get_world_size(), dim=2)[dist.get_rank()].contiguous()


def main():
    dist.init_process_group("gloo")
    found = compare()
    print(f"rank {dist.get_rank()}: {found}", flush=True)
    assert max(found.values()) < CLOSE
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
