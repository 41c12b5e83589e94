"""The loaders: every sample once per epoch, and the same images in each step, whatever the number of ranks.

Taught in notebooks/01_single_device.ipynb and notebooks/03_ddp.ipynb.
"""

import ctypes
import signal

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from mpdemo.data.datasets import SeededAugmentation
from mpdemo.errors import UserError


class ResumableDistributedSampler(DistributedSampler):
    """PyTorch's DistributedSampler, able to start an epoch where an interrupted run stopped.

    In each epoch all ranks shuffle the images in the same way, and rank r of n takes images r, r + n, r + 2 n, ... of
    that order. So the ranks together train on the same images in each step, whatever their number.
    """

    start = 0  # samples of this rank that were used before the interruption

    def __iter__(self):
        return iter(list(super().__iter__())[self.start :])

    def __len__(self):
        return self.num_samples - self.start


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


def keep_freed_memory():
    """Let this process keep memory that it frees for the next image: glibc would hand it back to the system."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library than glibc
        return
    mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes that may stay free
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks come from the kernel; this is the most that it takes


def prepare_worker(worker):
    """Set up a loader process; PyTorch calls this with its number."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to all processes: the rank decides when to stop
    keep_freed_memory()


class Batches:
    """The batches of a DataLoader, their images moved to a device as bytes and normalised there.

    A bad file is one line here also where a loader process met it: PyTorch puts its traceback around the message.
    """

    def __init__(self, loader, data, device=None):
        self.loader, self.data, self.device = loader, data, device

    def __iter__(self):
        try:
            for images, labels in self.loader:
                if self.device is not None:
                    images = images.to(self.device, non_blocking=True)
                yield self.data.prepare(images), labels
        except UserError as error:
            raise UserError(str(error).rstrip().rpartition("UserError: ")[2]) from None


def equal_batches(count, batch, replicas, replica) -> list[list[int]]:
    """Return which validation images are in each batch of a replica: each image once over all replicas.

    Every replica has as many batches as the others, because those of a sharded model compute each one together. A
    batch has at most `batch` images; where that is 1, a batch may have 2.
    """
    most, own = -(-count // replicas), list(range(replica, count, replicas))  # some replicas have one image less
    if most % batch == 1 % batch:  # and would have one batch less
        parts = torch.tensor(own, device="cpu").tensor_split(-(-most // max(batch, 2)))
        return [part.tolist() for part in parts if len(part)]
    return [own[start : start + batch] for start in range(0, len(own), batch)]


class Loaders:
    """Training and validation batches of one rank: iterate over `train` and `validation`.

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
    device : torch.device, optional
        Where the images are normalised; by default where they were read.
    """

    def __init__(
        self, data, batch_size, replicas=1, replica=0, seed=0, workers=0, pin_memory=False, images=True, device=None
    ):
        train, validation = data.train, data.validation
        _check(len(train), len(validation), batch_size, replicas)
        if not images:
            train, validation = LabelsOnly(train), LabelsOnly(validation)
        self.batch = batch_size // replicas
        self.steps_per_epoch = len(train) // batch_size  # a last, smaller batch is left out
        self.sampler = ResumableDistributedSampler(train, replicas, replica, seed=seed, drop_last=True)
        common = {
            "num_workers": workers,
            "pin_memory": pin_memory,
            "worker_init_fn": prepare_worker,
            "generator": torch.Generator(),  # of its own: loading draws no random numbers from the training
        }
        own = DataLoader(train, self.batch, sampler=self.sampler, drop_last=True, **common)
        # every validation image exactly once over all replicas; DistributedSampler would repeat some to even out
        shares = equal_batches(len(validation), self.batch, replicas, replica)
        self.train = Batches(own, data, device)
        self.validation = Batches(DataLoader(validation, batch_sampler=shares, **common), data, device)

    def start_epoch(self, epoch, steps_done=0):
        """Shuffle for this epoch; skip the batches of `steps_done` steps that are done already."""
        self.sampler.set_epoch(epoch)  # without this every epoch has the same order
        self.sampler.start = steps_done * self.batch
        dataset = self.train.loader.dataset
        if isinstance(dataset, SeededAugmentation):
            dataset.epoch = epoch


def _check(images, validation_images, batch_size, replicas):
    """Refuse a batch that does not divide by the replicas, or for which there are too few images."""
    if batch_size % replicas:
        raise UserError(f"batch of {batch_size} images does not divide by {replicas} replicas of the model")
    if images < batch_size:
        raise UserError(f"batch of {batch_size} images, but only {images} to train on; allowed: {images} or fewer")
    if validation_images < replicas:  # all replicas take part in each batch of a validation
        raise UserError(
            f"{replicas} replicas of the model, but only {validation_images} images to validate on; "
            f"allowed: {validation_images} replicas or fewer"
        )
