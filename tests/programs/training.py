"""Run under torchrun: train, one after the other, the runs whose settings are listed (JSON) in the file argv[1]."""

import json
import sys

import torch.distributed as dist

from mpdemo.run import train
from mpdemo.settings import Settings, checked
from mpdemo.world.env import join_world


def main():
    with open(sys.argv[1]) as file:
        runs = json.load(file)
    with join_world() as world:
        for settings in runs:
            train(checked(Settings(**settings), world.world_size), world)
            dist.barrier()  # rank 0 has written its files


if __name__ == "__main__":
    main()
