"""Which samples a rank draws, and what differs by nature: random numbers, and what depends on how a batch is cut."""

import collections
import itertools
import random
import sys

import torch
from mpdemo_watcher.notes import ORDER, finish, note, note_once, now, number_of
from torch.nn import functional
from torch.utils.data import DataLoader, Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
loaders, datasets, passes = [], [], collections.Counter()
trained = collections.defaultdict(set)  # by loader: the passes over it in which there was a step
taken = collections.Counter()  # batches of each pass over a loader


class Noted:
    """Stands for a loader's batch sampler: notes the whole order of an epoch, and hands out the first batches of it."""

    def __init__(self, loader, sampler):
        self.sampler, self.dataset, self.in_batches = sampler, loader.dataset, loader._auto_collation
        kind = number_of(datasets, loader.dataset), loader.batch_size, type(loader.sampler).__name__
        if kind not in loaders:  # many scripts build a new loader for each epoch
            loaders.append(kind)
        self.key, self.number = loaders.index(kind), 0

    def __len__(self):
        return min(len(self.sampler), ORDER["batches"])

    def __iter__(self):
        passes[self.key] += 1
        self.number = passes[self.key]
        if len(trained[self.key]) >= ORDER["epochs"]:
            finish()
        whole = list(itertools.islice(self.sampler, None if hasattr(self.sampler, "__len__") else ORDER["batches"]))
        batches = [[plain(index) for index in (batch if self.in_batches else [batch])] for batch in whole]
        root, samples = self.dataset, batches
        while isinstance(root, Subset):  # a sample's number in the whole data set, not in a part of it
            samples = [[plain(root.indices[index]) for index in batch] for batch in samples]
            root = root.dataset
        root = number_of(datasets, root)
        note("pass", loader=self.key, number=self.number, batches=batches, samples=samples, root=root)
        replayed = ORDER["replay"].get(str(self.key), [])
        if len(replayed) >= self.number and self.in_batches:
            whole = replayed[self.number - 1]
        yield from whole[: ORDER["batches"]]


def plain(index):
    """Return a sample's number as JSON can hold it."""
    return int(index) if hasattr(index, "__index__") else repr(index)


def watch():
    """Note which samples are drawn, and which batches the script takes."""
    index_sampler, next_batch = DataLoader._index_sampler.fget, _BaseDataLoaderIter.__next__

    def noted(loader):
        if loader._dataset_kind == 0:  # a map: samples have numbers
            return Noted(loader, index_sampler(loader))
        note_once("unseen", type(loader.dataset).__name__)
        return index_sampler(loader)

    def take(iterator):
        batch = next_batch(iterator)
        if isinstance(iterator._index_sampler, Noted):
            now["pass"] = (iterator._index_sampler.key, iterator._index_sampler.number)
            taken[now["pass"]] += 1
        return batch

    DataLoader._index_sampler = property(noted)
    _BaseDataLoaderIter.__next__ = take


def watch_chance():
    """Put the watched functions in the place of PyTorch's own, which its modules call by these names, too."""
    without = ORDER["without"]
    for name in DROPOUTS.split():
        setattr(functional, name, dropout(getattr(functional, name), "dropout" in without))
    functional.scaled_dot_product_attention = attention(functional.scaled_dot_product_attention, "dropout" in without)
    functional.batch_norm = batch_norm(functional.batch_norm, "batchnorm" in without)
    functional.cross_entropy = cross_entropy(functional.cross_entropy)
    _MapDatasetFetcher.fetch = fetch(_MapDatasetFetcher.fetch, "augmentation" in without)


def dropout(function, off):
    def watched(input, p=0.5, training=True, inplace=False):
        if training and p > 0:
            note_once("chance", "dropout")
        return function(input, p, training and not off, inplace)

    return watched


def attention(function, off):
    def watched(query, key, value, attn_mask=None, dropout_p=0.0, *args, **options):
        if dropout_p > 0:
            note_once("chance", "dropout")
        return function(query, key, value, attn_mask, 0.0 if off else dropout_p, *args, **options)

    return watched


def batch_norm(function, off):
    def watched(input, running_mean, running_var, weight=None, bias=None, training=False, *args, **options):
        if training:
            note_once("chance", "batchnorm")
        training = training and not (off and running_mean is not None)
        return function(input, running_mean, running_var, weight, bias, training, *args, **options)

    return watched


def cross_entropy(function):
    """Count the terms of a mean: a target that is ignored, such as padding, is none."""

    def watched(input, target, weight=None, size_average=None, ignore_index=-100, *args, **options):
        if torch.is_grad_enabled() and not target.is_floating_point() and not hasattr(target, "full_tensor"):
            now["terms"] += int((target != ignore_index).sum())
        return function(input, target, weight, size_average, ignore_index, *args, **options)

    return watched


def seed(number):
    """Seed as a process that nobody seeded: another number in each rank, which forked ranks would not have."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def states() -> list:
    """Return the states of the random numbers that data sets draw from."""
    numpy = sys.modules.get("numpy")
    state = [torch.get_rng_state(), random.getstate()]
    return [*state, numpy.random.get_state()] if numpy else state


def restore(state):
    """Put them back."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    for numpy_state in state[2:]:
        sys.modules["numpy"].random.set_state(numpy_state)


def fetch(function, off):
    """Note that a batch's samples are drawn by chance; switched off, a sample's number is its seed."""

    def seeded(fetcher, index):
        data = []
        for number in index:
            seed(hash(number) % 2**32)
            data.append(fetcher.dataset[number])
        return fetcher.collate_fn(data)

    def watched(fetcher, index):
        before = states()
        batch = seeded(fetcher, index) if off and fetcher.auto_collation else function(fetcher, index)
        after = states()
        used = [not torch.equal(before[0], after[0]), before[1] != after[1]]
        used += (
            [before[2][2] != after[2][2] or (before[2][1] != after[2][1]).any()] if len(after) > 2 < len(before) else []
        )
        if any(used) and not off:
            note_once("chance", "augmentation")
        if off:
            restore(before)
        return batch

    return watched
