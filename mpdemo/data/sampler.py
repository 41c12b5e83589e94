"""The sampler: which images a rank trains on, and in which order. Taught in notebooks/03_ddp.ipynb."""

from torch.utils.data import DistributedSampler


class ResumableDistributedSampler(DistributedSampler):
    """PyTorch's DistributedSampler, able to start an epoch where an interrupted run stopped.

    In each epoch all ranks shuffle the images in the same way, and rank r of n takes images r, r + n, r + 2 n, ... of
    that order. So every image is used once per epoch, and the ranks together train on the same images in each step
    whatever their number. ``set_epoch`` gives each epoch an order of its own.
    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler.

    Attributes
    ----------
    start : int
        Samples of this rank that were used before the interruption and are skipped.
    """

    start = 0

    def __iter__(self):
        return iter(list(super().__iter__())[self.start :])

    def __len__(self):
        return self.num_samples - self.start
