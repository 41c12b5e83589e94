"""Rehearse one rank of a mesh that is not here: train_gpt.py's own code, on tensors without data.

    python rehearse.py --ranks 1024 --rank 517 --pp 8 --shard 16 --tp 8 --width 8192 --blocks 80

It trains nothing and starts no process. Other flags: train_gpt.py's, by default of a larger model.
It needs PyTorch 2.10 or newer."""

import argparse
import os
import weakref

import torch
import torch.distributed as dist
import train_gpt
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SENT = collective_ops - sync_ops - {torch.ops.c10d.recv_.default}  # the last: by another rank
MOST = 131072  # ranks: each has a number in a mesh, which is computed here as well
LARGE = ["--width=8192", "--blocks=80", "--heads=64", "--batch=128", "--no-compile"]


class Count(TorchDispatchMode):
    """Counts bytes of tensors that come, go or are resized; lists calls: (group, name, bytes)."""

    def __init__(self):
        super().__init__()
        self.calls, self.sizes, self.live, self.peak = [], {}, 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, (train_gpt.DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it then calls the operations on this rank's part, or on what has arrived
        result = operation(*args, **(kwargs or {}))
        result = args[0] if operation in sync_ops else result  # a fake one is another tensor
        leaves = tree_leaves((args, kwargs, result))
        wrapper = AsyncCollectiveTensor  # it has no memory; what it wraps is counted
        tensors = [x for x in leaves if torch.is_tensor(x) and not isinstance(x, wrapper)]
        for tensor in tensors:
            self.note(tensor.untyped_storage())
        if operation in SENT:
            group = CollectiveOp.get_process_group(operation, args).group_name
            name = operation._schema.name.partition("::")[2].strip("_")
            self.calls.append((group, name, max(tensor.nbytes for tensor in tensors)))
        return result

    def note(self, storage, key=None):
        size = 0 if key else storage.nbytes()
        key = key or weakref.ref(storage, lambda key: self.note(None, key))
        self.live += size - self.sizes.pop(key, 0)
        self.peak = max(self.peak, self.live)
        self.sizes |= {key: size} if size else {}


def count_step(args, device, mesh, ring):
    """Return the peak of a step, its calls by dimension, and this process's weights."""
    count, resize = Count(), torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda *given: count.note(resize(*given))  # FSDP calls it directly
    with count:
        model = train_gpt.make_model(args, device, mesh, ring)
        compute = train_gpt.make_pass(args, device, mesh, ring, model)
        optimizer = torch.optim.AdamW(weights := list(model.parameters()), fused=True)
        batch = [torch.zeros(args.batch // (args.replicate * args.shard), train_gpt.LENGTH).long()] * 2
        for _ in range(2):  # the first step makes the moments, and fills DTensor's caches
            count.peak, count.calls = count.live, []
            compute(batch)
            train_gpt.clip(weights, 1.0, mesh["pp"])
            optimizer.step()
            optimizer.zero_grad()
    names = {mesh[name].get_group().group_name: name for name in mesh.mesh_dim_names}
    names[ring.get_group().group_name] = "cp"
    return count.peak, [(names[group], *call) for group, *call in count.calls], weights


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.error = train_gpt.refuse
    own, others = parser.parse_known_args(arguments)
    own.ranks in range(1, MOST + 1) or train_gpt.refuse(f"--ranks {own.ranks}: 1 to {MOST}")
    os.environ["WORLD_SIZE"] = str(own.ranks)
    args, device = train_gpt.read_flags(LARGE + others), torch.device("cpu")
    own.rank in range(own.ranks) or train_gpt.refuse(f"--rank {own.rank}: 0 to {own.ranks - 1}")
    dist.init_process_group("fake", store=FakeStore(), rank=own.rank, world_size=own.ranks)
    mesh, ring = train_gpt.make_mesh(args, device)
    for name in ("_compute_coordinates_from_mesh", "_concatenate"):  # they read a mesh's numbers
        setattr(DeviceMesh, name, staticmethod(unset_fake_temporarily()(getattr(DeviceMesh, name))))
    train_gpt.fill, train_gpt.count = lambda *given: None, torch.Tensor.numel  # so do these
    with FakeTensorMode(allow_non_fake_inputs=True):
        peak, calls, weights = count_step(args, device, mesh, ring)
    stored = sum(weight.to_local().nbytes for weight in weights)
    place = ", ".join(f"{name} {mesh[name].get_local_rank()}" for name in mesh.mesh_dim_names)
    print(f"rank {own.rank} of {own.ranks} ({place}): stages {train_gpt.stages_of(args, mesh)}")
    print(f"{len(weights)} shards, {stored / 2**20:,.1f} MiB in all", end="; ")
    print(f"peak of a step {peak / 2**20:,.1f} MiB")
    for kind in sorted({call[:2] for call in calls}):
        sizes = [size for *other, size in calls if tuple(other) == kind]
        print("{:9} {:22}".format(*kind), f"{len(sizes):6,} calls {sum(sizes) / 2**20:12,.2f} MiB")
    print(
        "MiB of the whole tensor of each call. Not in it: time, compilation, gaps, sends on their way."
    )


if __name__ == "__main__":
    main()
