"""Wrong answers to the exercises of notebook 11."""

PLAIN = """
def forward(blocks, x):
    for block in blocks:
        x = block(x)
    return x
"""
EVERY_SECOND = """
from torch.utils.checkpoint import checkpoint


def forward(blocks, x):
    for number, block in enumerate(blocks):
        x = block(x) if number % 2 else checkpoint(block, x, use_reentrant=False)
    return x
"""
TWO_SEGMENTS = """
from torch.utils.checkpoint import checkpoint_sequential


def forward(blocks, x):
    return checkpoint_sequential(blocks, 2, x, use_reentrant=False)
"""
ALL_AT_ONCE = """
from torch.utils.checkpoint import checkpoint


def forward(blocks, x):
    def all_blocks(x):
        for block in blocks:
            x = block(x)
        return x

    return checkpoint(all_blocks, x, use_reentrant=False)
"""
NO_GRAPH = """
import torch


def forward(blocks, x):
    with torch.no_grad():
        for block in blocks:
            x = block(x)
    return x
"""
JOB = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node={tasks}
#SBATCH --gpus-per-node=4
srun python -m mpdemo train --rung {rung} --model transformer --dataset digits \\
  --batch-size {batch} --microbatches {parts} --optimizer adamw --out runs/transformer
"""
WRONG = {
    "11.1": [[True, True, False, False], [True, True, True, True], [True, True, True, False], [False] * 4],
    "11.2": [["halves", "stays", "halves"], ["halves", "doubles", "stays"], ["stays", "stays", "stays"]],
    "11.3": [["weights", "activations"], ["weights", "gradients", "optimizer states", "activations"], []],
    "11.4": [PLAIN, ALL_AT_ONCE, NO_GRAPH, EVERY_SECOND, TWO_SEGMENTS],
    "11.5": [2, 4, 8],
    "11.6": [
        ["single", "fsdp", "ddp", "fsdp", "model_parallel"],
        ["single", "ddp", "ddp", "ddp", "model_parallel"],
        ["single", "ddp", "ddp", "hybrid", "model_parallel"],
        ["single", "ddp", "ddp", "fsdp", "fsdp"],
        ["ddp", "ddp", "ddp", "fsdp", "model_parallel"],
    ],
    "11.7": [
        {"rung": "ddp", "processes": 8},
        {"rung": "pipeline", "processes": 8, "microbatches": 16},
        {"rung": "ddp", "processes": 7},
        {"rung": "ddp", "processes": 8, "precision": "bf16"},
        {"rung": "ddp", "processes": 8, "precision": "fp16", "microbatches": 2},
        {"rung": "ddp", "processes": 8, "activation_checkpointing": True},
        {"rung": "ddp", "processes": 8, "microbatches": 16},
        {"rung": "ddp", "processes": 8, "microbatches": 2, "optimizer": "adamw"},
    ],
    "11.8": [
        JOB.format(rung="pipeline", tasks=4, batch=64, parts=16),
        JOB.format(rung="ddp", tasks=4, batch=64, parts=4),
        JOB.format(rung="model_parallel", tasks=4, batch=64, parts=1),
        JOB.format(rung="ddp", tasks=1, batch=64, parts=1),
        JOB.format(rung="ddp", tasks=4, batch=64, parts="1 --cut block.1,block.3,block.5"),
        JOB.format(rung="ddp", tasks=4, batch=64, parts="1 --precision bf16"),
        JOB.format(rung="ddp", tasks=4, batch=64, parts=1).replace("adamw", "sgd"),
    ],
}
