"""PyTorch's private parts that a training run uses, all of them: what a new PyTorch may move is found here.

tests/test_private_pytorch.py tries each by its name.
"""

import torch


def compile_on_one_core():
    """Let ``torch.compile`` start no processes of its own, and compile every block of a ResNet, since they differ."""
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = 64


def skip_handshake(stage):
    """Let a ``PipelineStage`` open its channels without a handshake: at the foot of ZBV's V it would send to itself."""
    stage._get_init_p2p_neighbors_ops = list


def record_memory():
    """Record from now on every allocation on the GPU."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def save_memory(path):
    """Write the allocations recorded so far to a file for https://pytorch.org/memory_viz, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def all_threads():
    """Return what makes torch.profiler record every thread, also those that ran before it."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
