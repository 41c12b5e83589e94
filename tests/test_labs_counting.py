"""Bytes and messages are counted exactly; test_labs_predictions.py compares those of every rung with the plan's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from mpdemo.labs.sharding import local_bytes
from mpdemo.plan.counting import CountMessages, LiveMemory

# PyTorch 2.14 renamed them
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_of_dtensors = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


@pytest.fixture
def group(tmp_path):
    """A world of this process alone: the same operators as in a large one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_message_is_noted_with_the_bytes_of_the_whole_tensor(group):
    tensor, large = torch.zeros(10), torch.zeros(10, dtype=torch.float64)
    with CountMessages() as count:
        dist.all_reduce(tensor)
        all_gather(large, large.clone())
        reduce_scatter(tensor, tensor.clone())
        dist.broadcast(tensor, 0)
        dist.barrier()
    expected = [("all-reduce", 40), ("all-gather", 80), ("reduce-scatter", 40), ("broadcast", 40)]
    assert count.messages == expected


def test_the_messages_of_distributed_tensors_are_noted(group):
    """They use operators of their own, which return another tensor."""
    with CountMessages() as count:
        functional.all_reduce(torch.zeros(10), "sum", dist.group.WORLD).sum()
        all_gather_of_dtensors(torch.zeros(4, 3), 0, dist.group.WORLD).sum()
    assert count.messages == [("all-reduce", 40), ("all-gather", 48)]


def test_live_memory_counts_storages_once_and_as_they_are():
    kept = torch.zeros(1024)
    with LiveMemory() as live:
        other = kept.view(4, 256) + 1  # a view is no storage of its own
        other.untyped_storage().resize_(0)
        torch.zeros(256)
    assert live.peak() == 2 * 4096


def test_a_rank_holds_its_part():
    assert local_bytes(torch.zeros(3, 5)) == 60
