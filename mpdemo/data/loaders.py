"""The loaders: every sample once per epoch, and the same images in each step, whatever the number of ranks.

Taught in notebooks/01_single_device.ipynb and notebooks/03_ddp.ipynb.
"""

import signal

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from mpdemo.data.datasets import SeededAugmentation
from mpdemo.data.sampler import ResumableDistributedSampler
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
    """Return all labels of a data set, in order."""
    if isinstance(dataset, SeededAugmentation):
        return labels_of(dataset.dataset)
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset)
        return [labels[index] for index in dataset.indices]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1].tolist()
    return [int(label) for label in dataset.targets]  # torchvision's data sets


def ignore_stop_signal(worker):
    """Keep a loader process alive when Slurm sends SIGUSR1 to all processes: the rank decides when to stop."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Loaders:
    """Training and validation batches of one rank.

    Parameters
    ----------
    data : SplitDataset
    batch_size : int
        Images per step over all replicas together; each replica takes ``batch_size / replicas`` of them.
    replicas, replica : int
        How many copies of the model train side by side, and which of them this rank belongs to.
    seed : int
        Of the order of the training images.
    workers : int
        Loader processes.
    pin_memory : bool
        Use page-locked memory, from which copies to a GPU run in the background.
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
        train, validation, count = data.train, data.validation, len(data.train)
        if count < batch_size:
            raise UserError(f"batch of {batch_size} images, but only {count} to train on; allowed: {count} or fewer")
        if not images:
            train, validation = LabelsOnly(train), LabelsOnly(validation)
        self.batch = batch_size // replicas
        self.steps_per_epoch = count // batch_size  # a last, smaller batch is left out
        self.sampler = ResumableDistributedSampler(train, replicas, replica, shuffle=True, seed=seed, drop_last=True)
        common = {
            "num_workers": workers,
            "pin_memory": pin_memory,
            "worker_init_fn": ignore_stop_signal,
            "generator": torch.Generator(),  # of its own: loading draws no random numbers from the training
        }
        self.train = DataLoader(train, self.batch, sampler=self.sampler, drop_last=True, **common)
        # every validation image exactly once over all replicas; DistributedSampler would repeat some to even out
        share = Subset(validation, range(replica, len(validation), replicas))
        self.validation = DataLoader(share, self.batch, **common)

    def start_epoch(self, epoch, steps_done=0):
        """Shuffle for this epoch; skip the batches of `steps_done` steps that are done already."""
        self.sampler.set_epoch(epoch)  # without this every epoch has the same order
        self.sampler.start = steps_done * self.batch
        if isinstance(self.train.dataset, SeededAugmentation):
            self.train.dataset.epoch = epoch
