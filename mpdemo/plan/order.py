"""The order in which each rank of a pipeline works, for every schedule of ``torch.distributed.pipelining``.

A schedule is one list of operations per rank. ``F`` is the forward pass of one microbatch through one
stage, ``B`` its backward pass. The zero-bubble schedules cut B in two: ``I``, the gradient of the stage's input, which
the stage before waits for, and ``W``, the gradient of its weights, which nobody waits for and which therefore fills
gaps. Taught in notebooks/05_pipeline.ipynb.
"""

import numpy as np

KINDS = "FBIW"  # an operation's kind is stored as its position in this string
F, B, I, W = range(4)  # noqa: E741 - the library and the papers call it I


def order_arrays(schedule, rank, ranks, microbatches, stages_per_rank):
    """Return one rank's operations as three integer arrays: kind (index into KINDS), stage, microbatch.

    A rank handles its forwards, its backwards and its weight gradients each in a sequence of its own (a *lane*);
    a schedule is then the *pattern* of lanes from which the next operation is taken.
    """
    build = {
        "naive": _gpipe,
        "gpipe": _gpipe,
        "1f1b": _1f1b,
        "interleaved-1f1b": _interleaved_1f1b,
        "interleaved-zero-bubble": _interleaved_zero_bubble,
        "zbv": _zbv,
    }[schedule]
    pattern, lanes = build(rank, ranks, microbatches, stages_per_rank)
    kind, stage, microbatch = (np.empty(len(pattern), dtype=np.int64) for _ in range(3))
    for number, (lane_kind, lane_stage, lane_microbatch) in enumerate(lanes):
        slots = pattern == number
        kind[slots], stage[slots], microbatch[slots] = lane_kind, lane_stage, lane_microbatch
    keep = microbatch < microbatches  # only zbv lays out more than there are
    return kind[keep], stage[keep], microbatch[keep]


def _repeat(lanes, times):
    """Return a pattern that takes from these lanes in turn, so many times."""
    return np.tile(np.asarray(lanes, dtype=np.int64), max(0, times))


def _gpipe(rank, ranks, microbatches, _):
    every = np.arange(microbatches)
    pattern = np.concatenate([_repeat([0], microbatches), _repeat([1], microbatches)])
    return pattern, [(F, rank, every), (B, rank, every)]


def _1f1b(rank, ranks, microbatches, _):
    every = np.arange(microbatches)
    ahead = min(ranks - 1 - rank, microbatches)  # forwards before the first backward can have come back
    pattern = np.concatenate([_repeat([0], ahead), _repeat([0, 1], microbatches - ahead), _repeat([1], ahead)])
    return pattern, [(F, rank, every), (B, rank, every)]


def _rounds(rank, ranks, microbatches, stages_per_rank):
    """Return the stage and microbatch of a rank's forwards, and of its backwards, for the interleaved schedules.

    The microbatches go in rounds of about P: a whole round passes through the rank's first stage, then through its
    second, and so on; backward the same from the last stage to the first.
    """
    in_a_round = microbatches // max(1, microbatches // ranks)
    n = np.arange(microbatches * stages_per_rank)
    local = n // in_a_round % stages_per_rank
    microbatch = n // (in_a_round * stages_per_rank) * in_a_round + n % in_a_round
    forward = (local * ranks + rank, microbatch)
    backward = ((stages_per_rank - 1 - local) * ranks + rank, microbatch)
    return in_a_round, forward, backward


def _interleaved_1f1b(rank, ranks, microbatches, stages_per_rank):
    in_a_round, forward, backward = _rounds(rank, ranks, microbatches, stages_per_rank)
    total = microbatches * stages_per_rank
    ahead = min((stages_per_rank - 1) * in_a_round + 2 * (ranks - 1 - rank), total)
    pattern = np.concatenate([_repeat([0], ahead), _repeat([0, 1], total - ahead), _repeat([1], ahead)])
    return pattern, [(F, *forward), (B, *backward)]


def _interleaved_zero_bubble(rank, ranks, microbatches, stages_per_rank):
    in_a_round, forward, backward = _rounds(rank, ranks, microbatches, stages_per_rank)
    total = microbatches * stages_per_rank
    ahead = min((stages_per_rank - 1) * in_a_round + (ranks - 1 - rank), total)
    late = min(rank, total)  # the weight gradients run so many operations behind the input gradients
    early, steady = min(late, total - ahead), max(0, total - ahead - late)
    pattern = np.concatenate(
        [
            _repeat([0], ahead),
            _repeat([0, 1], early),
            _repeat([0, 1, 2], steady),
            _repeat([1], late - early),
            _repeat([1, 2], ahead - (late - early)),
            _repeat([2], late),
        ]
    )
    return pattern, [(F, *forward), (I, *backward), (W, *backward)]


def _zbv(rank, ranks, microbatches, _):
    # Laid out for at least 2P - 1 microbatches, as the library does; order_arrays drops those that do not exist.
    total = max(2 * ranks - 1, microbatches)
    f0, f1, i0, w0, i1, w1 = range(6)  # 0: the rank's stage on the way down the V; 1: on the way up
    with_new = total - (2 * ranks - rank - 1)  # turns that still start a new microbatch
    pattern = np.concatenate(
        [
            _repeat([f0], 2 * (ranks - rank) - 1),
            _repeat([f1, f0], rank),
            _repeat([f1, i1, w1], ranks - rank),
            _repeat([f0, i0, w0, f1, i1, w1], with_new),
            _repeat([i0, w0, f1, i1, w1], total - ranks - with_new),
            _repeat([i0, i1], rank),
            _repeat([i0, w0], ranks - rank),
            _repeat([w1], rank),
            _repeat([w0], rank),
        ]
    )
    down, up, every = rank, 2 * ranks - 1 - rank, np.arange(total)
    return pattern, [
        (kind, stage, every) for stage, kind in [(down, F), (up, F), (down, I), (down, W), (up, I), (up, W)]
    ]
