"""Typical wrong answers to the exercises of notebook 06."""

HEAD = "import torch\nimport torch.distributed as dist\n\n\ndef average(gradients, pipeline, same_stage):\n"
LOOP = "    for gradient in gradients:\n        dist.all_reduce(gradient, group=same_stage)\n        gradient /= "


def columns_first(rank, world_size, replicas):
    same_stage = range(rank - rank % replicas, rank - rank % replicas + replicas)
    return list(range(rank % replicas, world_size, replicas)), list(same_stage)


def swapped(rank, world_size, replicas):
    stages = world_size // replicas
    first = rank - rank % stages
    return list(range(rank % stages, world_size, stages)), list(range(first, first + stages))


def wrong_size(rank, world_size, replicas):
    first = rank - rank % replicas
    return list(range(first, first + replicas)), list(range(rank % replicas, world_size, replicas))


def without_itself(rank, world_size, replicas):
    stages = world_size // replicas
    first = rank - rank % stages
    pipeline = [other for other in range(first, first + stages) if other != rank]
    return pipeline, list(range(rank % stages, world_size, stages))


def only_the_first_row(rank, world_size, replicas):
    stages = world_size // replicas
    return list(range(stages)) if rank < stages else list(range(rank, rank + stages)), list(
        range(rank % stages, world_size, stages)
    )


OTHERS = {"rung": "hybrid", "model": "transformer", "batch_size": 64, "schedule": "1f1b"}
WRONG = {
    "06.1": [(1, 3, [4, 5]), (5, 3, [1, 4]), (3, 5, [3, 4, 5]), (3, 5, [4]), (3, 4, [1, 4]), (0, 5, [1, 4])],
    "06.2": [columns_first, swapped, wrong_size, without_itself, only_the_first_row],
    "06.3": [
        HEAD + LOOP.replace(", group=same_stage", "") + "dist.get_world_size()\n",
        HEAD + LOOP.replace("same_stage", "pipeline") + "2\n",
        HEAD + LOOP + "dist.get_world_size()\n",
        HEAD + LOOP + "1\n",
        HEAD + "    return\n",
    ],
    "06.4": [(102.4, 822), (205, 411), (205, 1644), (410, 822), (51.2, 822), (205, 206)],
    "06.5": ["inside", "both"],
    "06.6": [
        OTHERS | {"replicas": 16, "microbatches": 4},
        OTHERS | {"replicas": 8, "microbatches": 4},
        OTHERS | {"replicas": 4, "microbatches": 2},
        OTHERS | {"replicas": 4, "microbatches": 16},
        OTHERS | {"replicas": 2, "microbatches": 8},
    ],
}
