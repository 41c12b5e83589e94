"""PyTorch's private parts that the course and plans need. What a new PyTorch may move is found here.

tests/test_private_pytorch.py tries each by its name.
"""

from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors as device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["DataDependentOutputException", "DynamicOutputShapeException", "FakeStore", "FakeTensors"]
__all__ += ["TorchDispatchMode", "device_constructors", "without_cuda_guards"]
__all__ += ["backward", "keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map_only"]
__all__ += ["tree_unflatten"]


class FakeTensors(FakeTensorMode):
    """Fake tensors, which have shapes and types but no memory, as a context manager.

    Without a GPU, PyTorch 2.11 would replace CUDA's guard here, and crash in a second thread that does so.
    """

    avoid_device_init = False


def backward(loss):
    """Do what ``loss.backward()`` does, and stay in the modes of functions, in which blocks then recompute."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def without_cuda_guards():
    """Let the fake modes that PyTorch enters by itself (DTensor does) leave CUDA's guard alone too, for a while."""
    return patch.object(FakeTensorMode, "avoid_device_init", False)


def skip_handshake(stage):
    """Let a ``PipelineStage`` open its channels without a handshake: at the foot of ZBV's V it would send to itself."""
    stage._get_init_p2p_neighbors_ops = list


def all_threads():
    """Return what makes torch.profiler record every thread, also those that ran before it."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
