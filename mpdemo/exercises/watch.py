"""Note which functions of torch.distributed a reader's program calls."""

from mpdemo.exercises.rank import substitute

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter",
               "reduce_scatter", "reduce_scatter_tensor", "all_gather_object", "all_gather_single",
               "reduce_scatter_single")  # fmt: skip
NEW_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def watch(names, program) -> list:
    """Return a list that notes every call of these functions of torch.distributed: name, shape of the first argument.

    Calls by a name that the reader's program has imported are noted as well, and new names under the old ones.
    """
    import torch.distributed as dist

    calls, originals, point_to_point = [], {}, dist.P2POp

    def watched(name, function):
        def call(*args, **kwargs):
            tensor = args[0] if args else next(iter(kwargs.values()), None)
            if tensor is None:
                raise ValueError(f"{name} was given None instead of a tensor")
            calls.append((NEW_NAMES.get(name, name), list(getattr(tensor, "shape", []))))
            return function(*args, **kwargs)

        originals[call] = function
        return call

    def operation(op, tensor, *args, **kwargs):  # `dist.P2POp` takes no functions but isend and irecv themselves
        if op in originals:
            calls.append(("isend", list(tensor.shape)))
        return point_to_point(originals.get(op, op), tensor, *args, **kwargs)

    for name in names:
        if function := getattr(dist, name, None):  # an older PyTorch has no new names
            substitute(dist, name, watched(name, function), program)
    substitute(dist, "P2POp", operation, program)
    return calls
