"""Typical wrong answers to the exercises of notebook 00."""

from mpdemo.jobs import JobSpec, attach

COMMAND = ("-m", "mpdemo", "train", "--rung", "ddp")
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n"
TASKS = "#SBATCH --ntasks-per-node=2\n"
GPUS = "#SBATCH --gres=gpu:2\n"
REST = "#SBATCH --time=00:05:00\n#SBATCH --output=work/slurm-%j.out\n"
SRUN = "srun python -u -m mpdemo.labs.hello\n"
SITE = """gpus_per_node = 8
cores_per_node = 64
gpu_syntax = "gpus-per-node"
partition = "ai"
account = "lab7"
max_time = "1-00:00:00"
"""


def spec(**changes):
    """A right spec for exercise 00.4, but for the changes."""
    values = {"command": COMMAND, "out": "runs/big", "nodes": 4, "processes_per_node": 4, "time_limit": "02:00:00"}
    return JobSpec(name="wrong", **values | changes)


def only_looks(out):
    return attach(out).state


def only_claims(out):
    return "cancelled"


def cancels_and_returns_nothing(out):
    job = attach(out)
    job.cancel()
    job.wait()


WRONG = {
    "00.1": ["a", "abc", "bd", "acx"],
    "00.2": [(1, 2), (3, 1), (2, 9), (0, 1)],
    "00.3": [
        "import os\nfor image in range(10):\n    print(image)\n",
        "import os\nfor image in range(10):\n    if image % 2 == os.environ['RANK'] + 0:\n        print(image)\n",
        "import os\nfor image in range(10):\n    if image % 2 == os.environ['RANK']:\n        print(image)\n",
        "import os\nrank = int(os.environ['RANK'])\nfor image in range(10):\n    if image % 2 == rank:\n"
        "        print(image)\n",
        "import os\nrank, world_size = int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE'])\n"
        "for image in range(rank, 10, world_size):\n    print(image)\n",
    ],
    "00.4": [
        spec(nodes=1, processes_per_node=16),
        spec(nodes=16, processes_per_node=4),
        spec(time_limit="02:00"),
        spec(gpus_per_process=4, processes_per_node=1, nodes=16),
        spec(out="runs/00_first_job"),
        spec(command=("-m", "mpdemo.labs.hello")),
        {"nodes": 4},
    ],
    "00.5": [3, 18, 5, 6, 9, "8"],
    "00.6": [96, 24, 40],
    "00.7": [3, 1],
    "00.8": [
        SITE.replace('gpu_syntax = "gpus-per-node"\n', ""),
        SITE.replace('partition = "ai"\n', ""),
        SITE.replace("64", "8"),
        SITE.replace('"1-00:00:00"', '"24:00"'),
        SITE.replace("partition", "queue"),
        SITE.replace("gpus_per_node = 8\n", ""),
    ],
    "00.9": [
        HEAD.replace("#SBATCH", "# SBATCH") + TASKS + GPUS + SRUN,
        HEAD + "cd .\n" + TASKS + GPUS + SRUN,
        HEAD + TASKS + GPUS + SRUN.removeprefix("srun "),
        HEAD + GPUS + SRUN,
        HEAD + TASKS + SRUN,
        HEAD + TASKS + GPUS.replace("2", "1") + SRUN,
        HEAD + TASKS + GPUS + SRUN.replace("hello", "helo"),
    ],
    "00.10": [
        HEAD + TASKS + GPUS + REST.replace("00:05:00", "05:00:00") + SRUN,
        HEAD + "#SBATCH --ntasks=4\n" + GPUS + REST + SRUN,
        HEAD + TASKS + GPUS + SRUN,
        HEAD + TASKS + GPUS + REST.replace("work/", "") + SRUN,
        HEAD + TASKS + GPUS + REST.replace("work", "nowhere") + SRUN,
        HEAD + TASKS + GPUS.replace("2", "8") + REST + SRUN,
        HEAD + TASKS + "#SBATCH --partition=nowhere\n" + GPUS + REST + SRUN,
    ],
    "00.11": [120, 30, 61],
    "00.12": [only_looks, only_claims, cancels_and_returns_nothing],
}
