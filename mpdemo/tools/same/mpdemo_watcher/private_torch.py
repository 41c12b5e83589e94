"""PyTorch's private parts that the watcher uses, all of them: what a new PyTorch may move is found here.

tests/test_private_pytorch.py tries each by its name.
"""

import gc
import sys

import torch
import torch.distributed._functional_collectives as of_dtensors
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as of_fsdp
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as part_of
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["Fetcher", "LoaderIterator", "of_dtensors", "of_fsdp", "part_of", "tree_leaves", "tree_map"]
SentTensor = of_dtensors.AsyncCollectiveTensor  # a tensor that is on its way, until its values are used
COMPILED = "_orig_mod"  # where a compiled model holds the one that was given


def replace_batch_samplers(stand_in):
    """Let each loader take its batches of sample numbers from ``stand_in(loader)``."""
    DataLoader._index_sampler = property(stand_in)


def batch_sampler(iterator):
    """Return the stand-in that an iterator over a loader was given."""
    return iterator._index_sampler


def number_of_storage(storage) -> int:
    """Return a number that no other storage has as long as this one lives."""
    return storage._cdata


def yielded(iterator) -> int:
    """Return how many batches an iterator over a loader has given."""
    return iterator._num_yielded


def version(tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def forget_driver(init):
    """Let ``init`` take the place of what loads CUDA's driver."""
    torch.cuda._lazy_init = init


def allow_sync_norm():
    """Let SyncBatchNorm, and DDP with it, work without a GPU."""
    torch.nn.SyncBatchNorm._check_input_dim = lambda *_: None
    torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None


def has_pipeline() -> bool:
    """Whether this process has made a stage of a pipeline."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    return bool(stage) and any(isinstance(thing, stage._PipelineStageBase) for thing in gc.get_objects())
