"""What the processes of a training send in a step: how many bytes each hands to which collective.

These are the bytes of the whole tensor that is reduced, or that all parts make together, as
`mpdemo.labs.counting.CountMessages` notes them; `ring_bytes` gives what a device sends of it.
Taught in notebooks/07_sharding.ipynb.
"""

from math import prod

from mpdemo.plan.cut import stage_slices
from mpdemo.plan.sharded_layers import FLOAT, local_shapes, padded_bytes

# An all-reduce is an all-gather and a reduce-scatter; a broadcast goes round the ring once.
HALVES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1}
FORWARD_SUMS, BACKWARD_SUMS = 2, 4  # of tensor parallelism, in a block; the last for query, key and value one by one


def ring_bytes(messages, ranks) -> float:
    """Return the bytes that each of `ranks` devices sends, with collectives that go round a ring.

    Parameters
    ----------
    messages : dict
        Collective, or "send" -> bytes.
    """
    share = (ranks - 1) / ranks
    return sum(HALVES[kind] * share * size if kind in HALVES else size for kind, size in messages.items())


def of_replicas(blocks) -> dict:
    """Return the messages of DDP: the gradients, averaged; before the forward pass the buffers of rank 0, if any."""
    buffers = sum(block.buffers for block in blocks)
    return {"all-reduce": padded_bytes(local_shapes(blocks), 1)} | ({"broadcast": buffers} if buffers else {})


def of_shards(blocks, ranks, parts=1, reshard="always", splits=1) -> dict:
    """Return the messages of FSDP over `ranks`: weights for every part, once or twice; gradients once.

    With `splits` every layer is split already, and what a device has of it is divided.
    """
    padded = padded_bytes(local_shapes(blocks, splits), ranks)
    gathers = parts * (2 if reshard == "always" else 1)
    return {"all-gather": gathers * padded, "reduce-scatter": padded}


def of_split_layers(blocks, images, parts=1, sequence_parallel=False, bf16=False) -> dict:
    """Return the messages of tensor parallelism: six sums as large as its output for each block between the ends.

    Two forward, four backward: the library adds up the gradients of query, key and value one by one. With sequence
    parallelism both halves of a sum are messages of their own, but for two of query, key and value. Under autocast to
    bf16 those of the forward pass are half as large; the gradients are in float32 by then.
    """
    forward, backward = FORWARD_SUMS // 2 if bf16 else FORWARD_SUMS, BACKWARD_SUMS
    between = blocks[1:-1]
    outputs = images * sum(block.output for block in between)
    if not sequence_parallel:
        return {"all-reduce": (forward + backward) * outputs}
    ends = images * (blocks[0].output + between[-1].output)
    norms = [shape for block in between for name, shape in block.shapes.items() if ".norm" in name]
    in_norms = parts * FLOAT * sum(map(prod, norms))  # each sees some of the tokens
    halves = (forward + backward // 2) * outputs
    return {"all-gather": halves + ends, "reduce-scatter": halves, "all-reduce": in_norms}


def of_stages(blocks, points, owners, images) -> list[dict]:
    """Return the messages of each rank of a cut model: activations forward, and their gradients back.

    Parameters
    ----------
    owners : sequence of int
        The rank that holds each stage (`mpdemo.schedules.placement`).
    """
    sent = [0] * (max(owners) + 1)
    for stage, point in enumerate(points):
        sender, receiver = owners[stage : stage + 2]
        if sender != receiver:
            sent[sender] += images * blocks[point - 1].output
            sent[receiver] += images * blocks[point - 1].output
    return [{"send": size} for size in sent]


def of_grid(blocks, points, owners, shards=1, parts=1, steps=1) -> list[dict]:
    """Return the messages of each rank of a replica to those that hold the same stages in other replicas.

    They average their gradients. With `shards` (FSDP) weights are gathered for every one of `parts` microbatches, and
    once more for the first backward pass; each of `steps` accumulated batches does all of that.
    """
    stages = [blocks[start:stop] for start, stop in stage_slices(points, len(blocks))]
    owned = [[stages[s] for s, owner in enumerate(owners) if owner == rank] for rank in range(max(owners) + 1)]
    blocks_of_rank = [[block for stage in own for block in stage] for own in owned]
    if shards == 1:
        return [{"all-reduce": padded_bytes(local_shapes(own), 1)} for own in blocks_of_rank]
    padded = [padded_bytes(local_shapes(own), shards) for own in blocks_of_rank]
    return [{"all-gather": steps * (parts + 1) * size, "reduce-scatter": steps * size} for size in padded]


def added(first, second) -> dict:
    """Return the messages of both together."""
    return {kind: first.get(kind, 0) + second.get(kind, 0) for kind in (first | second)}
