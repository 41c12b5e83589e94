"""Compare the gradients of a script to take home, eager and compiled: torchrun compiled_gradients.py SCRIPT [BACKEND].

It lies beside the script. Prints the norm of each gradient in eager mode, and its relative distance when compiled.
"""

import functools
import importlib
import sys

import job
import torch
import torch.distributed as dist
from gpt import count, make_datasets
from torch.distributed.device_mesh import init_device_mesh

name, *backend = sys.argv[1:]
script = importlib.import_module(name)
script.CHECKPOINTING, script.BF16 = True, False  # the first as on a GPU
if backend:
    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend=backend[0])


def gradients(mesh, device, compiled) -> dict:
    """Return the whole gradients of a model that was made by the script."""
    script.COMPILE = compiled
    model = script.make_model(device, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # adapters begin with zeros, and these would make others' gradients 0
    inputs, targets = make_datasets()[0][:8]
    (model(inputs.to(device), targets.to(device)) / count(targets)).backward()
    return {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    device = job.join()
    shape = {"data": dist.get_world_size()} if not hasattr(script, "TENSOR") else {"data": 1, "tensor": script.TENSOR}
    mesh = init_device_mesh(device.type, (*shape.values(),), mesh_dim_names=(*shape,))
    eager, compiled = (gradients(mesh, device, compiled) for compiled in (False, True))
    for key, gradient in eager.items():
        distance = (compiled[key] - gradient).norm() / gradient.norm()
        if dist.get_rank() == 0:
            print(f"{key} norm {gradient.norm():.3e}, differs by {distance:.3e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
