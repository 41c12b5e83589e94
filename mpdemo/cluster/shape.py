"""The shape of a real cluster, as its site file tells it, for a throw-away one: ``cluster run --site NAME``.

The throw-away Slurm then has the site's partitions, time limit, nodes, GPUs, features and reservation, and refuses what
the site would refuse for them. What a site installs, its modules, containers and plugins, is not on this machine: a
stand-in of the site file leaves it out.
"""

import dataclasses
import json
import re

from mpdemo.cluster.config import CLUSTER_NAME
from mpdemo.jobs.site import feature_names, partitions

LEAST_MEMORY = 180_000  # MiB of a node if the site file does not say how much it has
MIB = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
OF_THE_SITE = ("setup", "python", "scratch", "quota")  # words about what is installed there
AWAY = ("--clusters=", "--gres=", "--export=")  # other clusters, local disks, and what setup lines put right
OPTION_LISTS = {"extra": "sbatch", "srun_options": "srun", "binding": "srun"}


def shape_of(site) -> dict:
    """Return the arguments of `mpdemo.cluster.Cluster.up` that give a cluster the shape of a site."""
    wanted = {
        "partitions": partitions(site),
        "default": next(iter(partitions(site)), "debug"),
        "max_time": site.max_time,
        "features": {name for text in (site.constraint, *site.features) for name in feature_names(text)},
        "reservations": [site.reservation] if site.reservation else [],
        "gpu_type": site.gpu_type,
        "licenses": licenses(site.extra),
        "suffix": site.master_suffix,
    }
    return {"cpus": site.cores_per_node, "gpus": site.gpus_per_node, "memory": memory_of(site), "wanted": wanted}


def licenses(options) -> set:
    """Return the names in ``--licenses=scratch:2,seat``."""
    texts = [option.partition("=")[2] for option in options if option.startswith("--licenses=")]
    return {re.split("[:@]", name.strip())[0] for text in texts for name in re.split("[,|]", text)}


def memory_of(site) -> int:
    """Return the memory of a node in MiB: at least what the site file asks of a whole node."""
    asked, mib = {"memory": 1, "memory_per_cpu": site.cores_per_node, "memory_per_gpu": site.gpus_per_node}, 0
    for word, shares in asked.items():
        if match := re.fullmatch(r"(\d+)([KMGT]?)", getattr(site, word), re.I):
            mib = max(mib, int(match[1]) * MIB[match[2].upper() or "M"] * shares)
    return max(LEAST_MEMORY, round(mib))


def stand_in(site, knows):
    """Return the site as this machine can run its jobs, and the words of its file that are left out.

    `knows` is `Cluster.knows`: options that the site's own plugins add, `AWAY` and `OF_THE_SITE` are left out.
    """
    plain = type(site)(site.name)
    changes = {word: getattr(plain, word) for word in OF_THE_SITE if getattr(site, word) != getattr(plain, word)}
    left_out = list(changes)
    for word, program in OPTION_LISTS.items():
        options = getattr(site, word)
        changes[word] = tuple(option for option in options if knows(program, option) and not option.startswith(AWAY))
        left_out += [option.split("=")[0] for option in options if option not in changes[word]]
    changes |= {"name": f"{site.name}-throwaway", "cluster_names": (CLUSTER_NAME,)}
    changes |= {"polling_seconds": 1, "inside_a_job": "queue"}
    return dataclasses.replace(site, **changes), left_out


def write_site(site, file):
    """Write a site file."""
    values = {key: value for key, value in dataclasses.asdict(site).items() if key != "name"}
    # All is the same in JSON and in TOML, but for the names in a row of small_jobs.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
    file.write_text("".join(re.sub(r'"(\w+)": ', r"\1 = ", line) for line in lines), encoding="utf-8")
