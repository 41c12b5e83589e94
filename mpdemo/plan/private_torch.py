"""PyTorch's private parts that plans need. What a new PyTorch may move is found here.

tests/test_private_pytorch.py tries each by its name.
"""

from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeStore", "TorchDispatchMode", "tree_leaves"]
