"""Two stages of a model, each with the same limit of memory: with an uneven boundary the second one does not fit.

    torchrun --standalone --nproc-per-node=2 notebooks/labs/failures/memory.py 8     # 8 of 40 blocks on rank 0
    torchrun --standalone --nproc-per-node=2 notebooks/labs/failures/memory.py 20

The operating system's limit on a process's memory stands for that of a GPU. Taught in
notebooks/91_when_it_breaks.ipynb.
"""

import resource
import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

BLOCKS, WIDTH = 40, 2048  # a block has 2048 x 2048 weights: 16 MiB
LIMIT = 400 * 2**20  # bytes, for the blocks of one stage


def limit_memory(size):
    """Refuse this process more than `size` bytes above what it has now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + size, now + size))


def build_stage(blocks):
    """Return a stage whose weights hold anything: only their size counts."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(blocks)]).to_empty(
        device="cpu"
    )


@record
def main():
    dist.init_process_group("gloo")
    dist.barrier()  # connections, their threads, and the driver of a GPU take memory too
    limit_memory(LIMIT)
    first = int(sys.argv[1])
    blocks = first if dist.get_rank() == 0 else BLOCKS - first
    build_stage(blocks)
    print(f"rank {dist.get_rank()}: its stage of {blocks} blocks fits\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
