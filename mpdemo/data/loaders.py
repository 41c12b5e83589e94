"""The loaders: every sample once an epoch, whatever the number of ranks, and the same batches of images for all.

The data sets themselves are opened by mpdemo/data/sets.py. Taught in notebooks/01_single_device.ipynb and 03_ddp.ipynb.
"""

import signal

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from mpdemo.data.sets import PerSample
from mpdemo.errors import UserError


class LabelsOnly(Dataset):
    """The labels without the images, which are never decoded: for a rank that computes the loss of a cut model."""

    def __init__(self, dataset):
        self.labels = labels_of(dataset)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.empty(0), self.labels[index]


def labels_of(dataset) -> list[int]:
    """All labels of a data set, in order."""
    if isinstance(dataset, PerSample):
        return labels_of(dataset.dataset)
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset)
        return [labels[i] for i in dataset.indices]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1].tolist()
    return [int(label) for label in dataset.targets]  # torchvision's data sets


class Sampler(DistributedSampler):
    """PyTorch's DistributedSampler, able to start an epoch where an interrupted run left it."""

    start = 0  # samples of this rank that were used before the interruption

    def __iter__(self):
        indices = list(super().__iter__())
        return iter(indices[self.start :])

    def __len__(self):
        return self.num_samples - self.start


def ignore_stop_signal(worker):
    """Let a loader process live on when Slurm sends SIGUSR1 to all processes: the rank decides when to stop."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Loaders:
    """Training and validation batches of one rank.

    Parameters
    ----------
    data : Data
    batch_size : int
        Images a step over all replicas together; each replica takes ``batch_size / replicas`` of them.
    replicas, replica : int
        How many copies of the model train side by side, and which of them this rank belongs to.
    seed, workers, pin_memory
        Of the order; loader processes; page-locked memory, for copies to a GPU that do not wait.
    images : bool
        False: labels only, in the same order.

    Raises
    ------
    UserError
        The batch does not divide by the replicas, or there are fewer training images than one batch.
    """

    def __init__(self, data, batch_size, replicas=1, replica=0, seed=0, workers=0, pin_memory=False, images=True):
        if batch_size % replicas:
            raise UserError(f"batch of {batch_size} images does not divide by {replicas} replicas of the model")
        if len(data.train) < batch_size:
            raise UserError(
                f"batch of {batch_size} images, but only {len(data.train)} to train on; allowed: up to that"
            )
        train, validation = data.train, data.validation
        if not images:
            train, validation = LabelsOnly(train), LabelsOnly(validation)
        self.batch = batch_size // replicas
        self.steps_per_epoch = len(train) // batch_size  # a last, smaller batch is left out
        self.sampler = Sampler(train, replicas, replica, shuffle=True, seed=seed, drop_last=True)
        common = {
            "num_workers": workers,
            "pin_memory": pin_memory,
            "worker_init_fn": ignore_stop_signal,
            "generator": torch.Generator(),  # of its own: the model's random numbers stay where they are
        }
        self.train = DataLoader(train, self.batch, sampler=self.sampler, drop_last=True, **common)
        # every validation image exactly once over all replicas; DistributedSampler would repeat some to even out
        mine = Subset(validation, range(replica, len(validation), replicas))
        self.validation = DataLoader(mine, self.batch, **common)

    def start_epoch(self, epoch, steps_done=0):
        """Shuffle for this epoch; skip the batches of `steps_done` steps that were trained on already."""
        self.sampler.set_epoch(epoch)  # without this every epoch has the same order
        self.sampler.start = steps_done * self.batch
        if isinstance(self.train.dataset, PerSample):
            self.train.dataset.epoch = epoch
