"""Run under torchrun: train, one after the other, the runs whose settings are listed (JSON) in the file argv[1]."""

import json
import sys

import torch.distributed as dist

from mpdemo.settings import Settings, checked
from mpdemo.training.loop import train
from mpdemo.world.env import claim_cores, process_group, where_am_i


def main():
    world = where_am_i()
    claim_cores(world)
    with open(sys.argv[1]) as file:
        runs = json.load(file)
    with process_group(world, timeout=120):
        for settings in runs:
            status = train(checked(Settings(**settings), world.world_size), world)
            assert status == 0, (settings, status)
            dist.barrier()  # rank 0 has written its files


if __name__ == "__main__":
    main()
