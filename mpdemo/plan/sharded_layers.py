"""Memory of a device that has a part of every layer: FSDP, tensor parallelism, and a grid of both.

The footprints of the blocks (`mpdemo.plan.footprint`) are added up in the order of a step. Under FSDP a block's weights
are whole twice while it computes: the message in which they arrived, and the parameters that are copied out of it.
Compared with steps on two and four CPU cores (tests/test_labs_predictions.py) the peaks deviate by less than 5 %.
Taught in notebooks/07_sharding.ipynb.
"""

from math import ceil, prod

from mpdemo.plan.footprint import needs
from mpdemo.plan.memory import STATES, DeviceMemory

FLOAT = 4  # bytes of a float32
COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.up")  # layers that parallel/tensor.py splits
ROWS = ("attention.out", "mlp.down")
# of a transformer's block: activations as large as its output that stay whole where its layers are split
WHOLE = {False: 4, True: 2}  # norm, sum, norm, sum; with sequence parallelism the two that are gathered


def local_shape(name, shape, splits):
    """Return the shape of what a device has of a parameter, by its name, where layers are split over so many devices.

    Examples
    --------
    >>> local_shape("block.0.mlp.up.weight", (768, 192), splits=2)
    (384, 192)
    """
    layer, _, kind = name.rpartition(".")
    if layer.endswith(COLUMNS):
        return (shape[0] // splits, *shape[1:])
    if layer.endswith(ROWS) and kind == "weight":
        return (shape[0], shape[1] // splits)
    return tuple(shape)


def local_shapes(blocks, splits=1) -> list:
    """Return the shapes of what a device has of all parameters."""
    return [local_shape(name, shape, splits) for block in blocks for name, shape in block.shapes.items()]


def padded_bytes(shapes, ranks) -> int:
    """Return the bytes of parameters that are gathered from equal parts: rows are added until they can be shared.

    Examples
    --------
    >>> padded_bytes([(3, 5)], ranks=2)
    80
    """
    return sum(ceil(shape[0] / ranks) * ranks * prod(shape[1:]) * FLOAT for shape in shapes)


def device(blocks, images, optimizer, *, parts=1, shards=1, splits=1, reshard="always", sequence_parallel=False):
    """Return the `DeviceMemory` of a device of a grid, shards x splits.

    Parameters
    ----------
    blocks : sequence of Footprint
        With several splits: of the transformer, whose first and last block stay whole.
    images : int
        Of the device's share of the batch, computed in so many `parts`.
    optimizer : str
        As for `mpdemo.plan.memory.estimate`.
    shards : int
        Devices over which FSDP divides what a device has.
    splits : int
        Devices over which tensor parallelism splits each layer.
    reshard, sequence_parallel
        As in `mpdemo.settings.Settings`.
    """
    size = images // parts
    whole = [padded_bytes(local_shapes([block], splits), 1) for block in blocks]
    passes = [
        _split(needs(block, size), size * block.output, splits, sequence_parallel)
        if splits > 1 and 0 < number < len(blocks) - 1
        else needs(block, size)
        for number, block in enumerate(blocks)
    ]
    weights = sum(whole) // shards
    state = STATES[optimizer] * weights
    level = weights + state + images * blocks[0].input + (parts > 1) * sum(whole)  # the sum of the parts' gradients
    highest = _highest(level, whole, passes, shards, reshard == "never", parts == 1)
    if optimizer == "adamw":  # its step needs two more tensors like the parameter it updates
        largest = max(prod(shape) * FLOAT for shape in local_shapes(blocks, splits)) // shards
        highest = max(highest, 2 * weights + state + 2 * largest)
    return DeviceMemory(0, weights, weights, state, int(highest) - 2 * weights - state)


def _split(need, output, splits, sequence_parallel):
    """Return what a block needs for its part of the layers: only some of its activations stay whole."""
    stay = WHOLE[sequence_parallel] * output
    return need._replace(
        **{name: stay + (value - stay) / splits for name, value in need._asdict().items() if value > stay}
    )


def _highest(level, whole, passes, shards, never, at_once):
    """Return the highest level of one forward and one backward pass over the blocks, from a level between steps."""
    gathering = 0 if shards == 1 else 2  # times the weights of a block: the message, and the parameters
    highest = kept = 0
    for weights, need in zip(whole, passes, strict=True):
        highest = max(highest, level + kept + gathering * weights + need.forward_peak)
        level += need.saved
        kept += never * weights
    for weights, need in zip(whole[::-1], passes[::-1], strict=True):
        gathered = kept if never else gathering * weights
        backward = need.first_backward_peak if at_once else need.backward_peak
        highest = max(highest, level + gathered + backward)
        level -= need.saved
        if at_once:  # the gradients, and the message in which their parts are added up
            highest = max(highest, level + gathered + (2 * weights if shards > 1 else weights))
            level += weights / shards
        kept -= never * weights
    return highest
