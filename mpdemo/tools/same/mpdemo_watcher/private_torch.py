"""PyTorch's private parts that the watcher uses, all of them: what a new PyTorch may move is found here.

tests/test_private_pytorch.py tries each by its name.
"""

import functools

import torch
import torch.distributed._functional_collectives as of_dtensors
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as of_fsdp
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as part_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "DispatchMode",
    "Fetcher",
    "LoaderIterator",
    "no_modes",
    "of_fsdp",
    "part_of",
    "tree_map",
]
SentTensor = of_dtensors.AsyncCollectiveTensor  # a tensor that is on its way, until its values are used
COMPILED = "_orig_mod"  # where a compiled model holds the one that was given


def tensors_in(thing) -> list:
    """Return the tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(thing) if isinstance(leaf, torch.Tensor)]


def replace_batch_samplers(stand_in):
    """Let each loader take its batches of sample numbers from ``stand_in(loader)``."""
    DataLoader._index_sampler = property(stand_in)


def batch_sampler(iterator):
    """Return the stand-in that an iterator over a loader was given."""
    return iterator._index_sampler


def number_of_storage(storage) -> int:
    """Return a number that no other storage has as long as this one lives."""
    return storage._cdata


def whole_of(tensor):
    """Return the tensor of which another one is a view."""
    return tensor if tensor._base is None else tensor._base


def weak(tensor) -> tuple:
    """Return what finds a tensor's values again as long as anything holds them: also an alias of it may be written."""
    like = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
    return StorageWeakRef(tensor.untyped_storage()), like


def alive(reference):
    """Return a tensor of the values that `weak` has found, or None."""
    (storage, (dtype, *place)) = reference
    found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return None if found is None else torch.empty(0, dtype=dtype).set_(found, *place)


def yielded(iterator) -> int:
    """Return how many batches an iterator over a loader has given."""
    return iterator._num_yielded


def forget_driver(init):
    """Let ``init`` take the place of what loads CUDA's driver."""
    torch.cuda._lazy_init = init


def allow_sync_norm():
    """Let SyncBatchNorm, and DDP with it, work without a GPU."""
    torch.nn.SyncBatchNorm._check_input_dim = lambda *_: None
    torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None


def do_not_compile():
    """Run modules as they are written: what a compiled one does inside cannot be seen.

    Only a tensor that tensor parallelism is still sending enters compiled code, as it would: it may lose its gradient.
    """
    compile_it = torch.compile
    compiled = functools.cache(lambda: compile_it(lambda tensor: tensor * 1, backend="aot_eager"))

    def enter(thing):
        with no_modes():  # the compiler leaves code alone that a mode sees
            return compiled()(thing) if is_sent(thing) else thing

    def as_it_is(model=None, **_):
        if model is None:
            return torch.compile  # a decorator with options: this function again
        if isinstance(model, torch.nn.Module):
            torch.nn.Module.compile(model)  # it compiles how the model is called, by this function
            object.__setattr__(model, COMPILED, model)  # where scripts look for it
            return model

        @functools.wraps(model)
        def called(*args, **options):
            if any(map(is_sent, tree_leaves((args, options)))):
                args, options = tree_map(enter, (args, options))
            return model(*args, **options)

        return called

    torch.compile = as_it_is


def is_sent(thing) -> bool:
    """Whether a tensor that wants a gradient is still on its way from other ranks."""
    return isinstance(thing, SentTensor) and thing.requires_grad and torch.is_grad_enabled()
