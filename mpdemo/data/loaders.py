"""The loaders: every sample once per epoch, and the same images in each step, whatever the number of ranks.

Taught in notebooks/12_one_step.ipynb and notebooks/22_data.ipynb.
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from mpdemo.data.datasets import SeededAugmentation
from mpdemo.errors import UserError


def labels_only(dataset) -> TensorDataset:
    """Return the labels without the images, which are never decoded: for a rank that computes a cut model's loss."""
    labels = labels_of(dataset)
    return TensorDataset(torch.empty(len(labels), 0), torch.tensor(labels))


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


def equal_batches(count, batch, replicas, replica) -> list[list[int]]:
    """Return which validation images are in each batch of a replica: each image once over all replicas.

    Every replica has as many batches as the others, because those of a sharded model compute each one together. A
    batch has at most `batch` images; where that is 1, a batch may have 2.
    """
    most = -(-count // replicas)  # some replicas have one image less
    own = torch.arange(replica, count, replicas, device="cpu")
    return [part.tolist() for part in own.tensor_split(-(-most // max(batch, 2)))]


class Batches:
    """The batches of a DataLoader, moved to a device, the images as bytes, and normalised there."""

    def __init__(self, loader, data, device=None):
        self.loader, self.data, self.device = loader, data, device

    def __iter__(self):
        for images, labels in self.loader:
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in (images, labels))
            yield self.data.prepare(images), labels


class Loaders:
    """Training and validation batches of one rank: iterate over `train` and `validation`.

    Of `batch_size` images per step each of `replicas` copies of the model takes an equal share; this rank belongs to
    number `replica`. Without `images` there are labels only, in the same order. Images are normalised on `device`, by
    default where they are.
    """

    def __init__(self, data, batch_size, replicas=1, replica=0, seed=0, images=True, device=None):
        train, validation = data.train, data.validation
        if len(train) < batch_size:
            wrong = f"batch of {batch_size} images, but only {len(train)} to train on"
            raise UserError(f"{wrong}; allowed: {len(train)} or fewer")
        if len(validation) < replicas:  # all replicas take part in each batch of a validation
            wrong = f"{replicas} replicas of the model, but only {len(validation)} images to validate on"
            raise UserError(f"{wrong}; allowed: {len(validation)} replicas or fewer")
        if not images:
            train, validation = labels_only(train), labels_only(validation)
        batch = batch_size // replicas
        self.steps_per_epoch = len(train) // batch_size  # a last, smaller batch is left out
        # in each epoch all ranks shuffle alike, and rank r of n takes images r, r + n, r + 2 n, ... of that order: so
        # the ranks together train on the same images in each step, whatever their number
        self.sampler = DistributedSampler(train, replicas, replica, seed=seed, drop_last=True)
        common = {
            # copies to a GPU run in the background
            "pin_memory": device is not None and device.type == "cuda",
            "generator": torch.Generator(),  # of its own: loading draws no random numbers from the training
        }
        own = DataLoader(train, batch, sampler=self.sampler, drop_last=True, **common)
        # every validation image exactly once over all replicas; DistributedSampler would repeat some to even out
        shares = equal_batches(len(validation), batch, replicas, replica)
        self.train = Batches(own, data, device)
        self.validation = Batches(DataLoader(validation, batch_sampler=shares, **common), data, device)

    def start_epoch(self, epoch):
        """Shuffle for this epoch."""
        self.sampler.set_epoch(epoch)  # without this every epoch has the same order
        dataset = self.train.loader.dataset
        if isinstance(dataset, SeededAugmentation):
            dataset.epoch = epoch
