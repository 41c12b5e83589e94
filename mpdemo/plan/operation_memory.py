"""What one stage of a pipeline needs for each operation of a schedule, added up from its blocks' footprints.

The rules are those of the library, and of the form with one process. `mpdemo.plan.memory` applies them in the order
of the schedule. Taught in notebooks/04_model_parallel.ipynb.
"""

from mpdemo.plan.footprint import needs


def operations(blocks, size, received, sent, kept, one_process):
    """Return what every operation of a stage needs.

    Parameters
    ----------
    blocks : sequence of Footprint
    size : int
        Samples of a microbatch.
    received, sent : int
        Bytes of one microbatch from the stage before and to the stage after; 0 where there is none.
    kept : int
        Bytes of what was sent for a microbatch and stays until the end of the step.
    one_process : int
        Microbatches in the form with one process, 0 with one process per device.

    Returns
    -------
    list of (float, float)
        For F, B, I and W, as in `mpdemo.plan.order.KINDS`: the peak, in bytes above what was allocated before, and
        the change. Then the same for a microbatch whose backward pass creates the gradients of the parameters.
    """
    blocks = blocks[::-1]  # in the order of the backward pass
    need = [needs(block, size) for block in blocks]
    peak, saved = _follow((n.forward_peak, n.saved) for n in reversed(need))
    if one_process and sent:
        saved -= need[0].output_only  # the next device has its own copy
    copied = received if one_process else 0  # one process per device has a place for what each microbatch receives
    forward = copied + peak, copied + saved
    result = []
    for new in (0, 1):
        released = kept - forward[1] + new * sum(block.gradients for block in blocks)
        peak = _full_backward_peak(blocks, need, new)
        if one_process > 1 and not new:  # autograd adds up the microbatches' gradients out of place, in a buffer
            peak += max(block.largest for block in blocks)
        backward = peak, released
        # the images need no gradient, so W is the whole backward pass of the first stage
        halves = _halves(blocks, need, new, released) if received else ((0, 0), (peak, released))
        result += [forward, backward, *halves]
    return result


def _follow(steps):
    """Return the highest level while steps (peak, change) follow each other, and the level after them."""
    level = highest = 0
    for peak, change in steps:
        highest, level = max(highest, level + peak), level + change
    return highest, level


def _full_backward_peak(blocks, need, new):
    steps = []
    for number, (block, n) in enumerate(zip(blocks, need, strict=True)):
        peak = n.first_backward_peak if new else n.backward_peak
        freed = n.output_only if number else 0  # it was the input of the block after
        steps.append((peak - freed, new * block.gradients - n.saved))
    return _follow(steps)[0]


def _halves(blocks, need, new, released):
    """Return I and W: I keeps gradients inside the stage, W frees them and everything that was saved."""
    peak, kept = _follow((n.input_peak, n.kept_by_input) for n in need)
    weight_steps = (
        (n.weight_peak, new * block.gradients - n.saved - n.kept_by_input)
        for block, n in zip(blocks, need, strict=True)
    )
    return (peak, kept), (_follow(weight_steps)[0], released - kept)
