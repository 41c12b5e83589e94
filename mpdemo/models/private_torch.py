"""PyTorch's private parts that models need: fake tensors. What a new PyTorch may move is found here.

tests/test_private_pytorch.py tries each by its name.
"""

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

__all__ = ["DataDependentOutputException", "DynamicOutputShapeException", "FakeTensors"]


class FakeTensors(FakeTensorMode):
    """Fake tensors, which have shapes and types but no memory, as a context manager.

    Without a GPU, PyTorch 2.11 would replace CUDA's guard here, and crash where two threads do that at once.
    """

    avoid_device_init = False
