"""The options of ``python -m mpdemo train``: one a setting, with its default from `Settings`."""

import argparse

from mpdemo.settings import DATASETS, FORMS, MODELS, NORMS, PRECISIONS, RUNGS, Settings


def add_arguments(parser: argparse.ArgumentParser):
    """Add one option a setting to `parser`."""
    d = Settings()
    parser.add_argument("--rung", required=True, choices=RUNGS, help="how the training is spread over devices")
    parser.add_argument("--form", choices=FORMS, help="one process for all devices, or one process per device")
    parser.add_argument("--model", default=d.model, choices=MODELS)
    parser.add_argument("--norm", default=d.norm, choices=NORMS, help="normalisation of convolutional models")
    parser.add_argument("--dataset", default=d.dataset, choices=DATASETS)
    parser.add_argument("--data", metavar="PATH", help="folder of the data set (default: MPDEMO_DATA)")
    parser.add_argument("--image-size", type=int, metavar="N", help="pixels a side")
    parser.add_argument("--batch-size", type=int, default=d.batch_size, metavar="N", help="images a step, over all")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, metavar="N", help="passes over the training images")
    length.add_argument("--steps", type=int, metavar="N", help="stop after N steps")
    parser.add_argument("--lr", type=float, default=d.lr, metavar="X", help="learning rate")
    parser.add_argument("--seed", type=int, default=d.seed, metavar="N")
    parser.add_argument("--processes", type=int, metavar="N", help="outside torchrun and Slurm: how many to start")
    parser.add_argument("--devices", type=int, metavar="N", help="how many devices a one-process form drives")
    parser.add_argument("--microbatches", type=int, metavar="N", help="parts that the batch is cut into")
    parser.add_argument("--schedule", default=d.schedule, metavar="NAME", help="of the pipeline rung")
    parser.add_argument("--stages-per-rank", type=int, metavar="N", help="for the interleaved schedules: 2 or more")
    parser.add_argument("--cut", metavar="A,B,...", help="last block of each stage but the last: names or numbers")
    parser.add_argument("--precision", default=d.precision, choices=PRECISIONS)
    parser.add_argument("--out", default=d.out, metavar="DIR", help="run folder: metrics, summary, checkpoints")
    parser.add_argument("--checkpoint-every", type=int, metavar="N", help="steps between checkpoints")
    parser.add_argument("--resume", metavar="DIR", help="go on from the newest checkpoint of that run")
    parser.add_argument("--workers", type=int, default=d.workers, metavar="N", help="loader processes a rank")
    parser.add_argument("--log-every", type=int, default=d.log_every, metavar="N", help="steps between log flushes")
    parser.add_argument("--timeline", action="store_true", help="record what each rank did when")


def from_args(args) -> Settings:
    """Return the Settings that parsed arguments hold."""
    return Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
