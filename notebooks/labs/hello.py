"""The smallest program that is started many times: each process prints who it is.

    srun python -u -m mpdemo.labs.hello                                      # in a batch script
    python -m torch.distributed.run --nproc-per-node 2 -m mpdemo.labs.hello  # on this machine

It reads the launcher's variables and loads no PyTorch. Taught in notebooks/11_first_job.ipynb.
"""

import os


def describe(environ) -> str:
    """Return one line: rank, world size, node, local rank and the GPUs that this process sees.

    Examples
    --------
    >>> describe({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"})
    'rank 3 of 4: node 1, local rank 1, GPUs none'
    """
    if "RANK" in environ:
        names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")
    else:  # a batch script's own shell has SLURM_PROCID too; srun alone sets the number of tasks
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_LOCALID")
    started_alone = names[1] not in environ
    numbers = (0, 1, 0, 0) if started_alone else (environ[name] for name in names)
    rank, world_size, node, local_rank = numbers
    gpus = environ.get("CUDA_VISIBLE_DEVICES") or "none"
    return f"rank {rank} of {world_size}: node {node}, local rank {local_rank}, GPUs {gpus}"


if __name__ == "__main__":
    print(describe(os.environ))
