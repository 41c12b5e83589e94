"""Which samples a rank draws, and what differs by nature: random numbers, and what depends on how a batch is cut."""

import collections
import itertools
import random

import torch

try:
    import numpy
except ImportError:  # the reader's environment has none
    numpy = None
from torch.nn import functional
from torch.utils.data import DataLoader, Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .notes import ORDER, finish, note, note_once, now, number_of

DROPOUT = ("dropout", "training", True, "input p training inplace")
NORM = "input running_mean running_var weight bias training momentum eps"
# Function -> what it draws by chance, name and default of the argument that switches it off, names of all arguments.
SWITCHES = dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), DROPOUT) | {
    "alpha_dropout": ("dropout", "training", False, DROPOUT[-1]),
    "feature_alpha_dropout": ("dropout", "training", False, DROPOUT[-1]),
    "scaled_dot_product_attention": ("dropout", "dropout_p", 0.0, "query key value attn_mask dropout_p is_causal"),
    "batch_norm": ("batchnorm", "training", False, NORM),
}
loaders, datasets, passes = [], {}, collections.Counter()
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
    """Note which samples are drawn, which batches the script takes, and what is drawn by chance."""
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
    for name, switch in SWITCHES.items():  # PyTorch's own modules call them by these names, too
        setattr(functional, name, switched(getattr(functional, name), *switch))
    functional.cross_entropy = cross_entropy(functional.cross_entropy)
    _MapDatasetFetcher.fetch = fetch(_MapDatasetFetcher.fetch, "augmentation" in ORDER["without"])


def switched(function, kind, name, default, names):
    """Note that a function draws by chance, or let it draw nothing."""

    def watched(*args, **options):
        given = dict(zip(names.split(), args, strict=False)) | options
        if given.get(name, default) and given.get("p", 0.5) > 0:
            note_once("chance", kind)
            if kind in ORDER["without"] and given.get("running_mean", 0) is not None:  # it has running statistics
                return function(**given | {name: type(default)()})
        return function(*args, **options)

    return watched


def cross_entropy(function):
    """Count the terms of a mean: a target that is ignored, such as padding, is none."""

    def watched(input, target, weight=None, size_average=None, ignore_index=-100, *args, **options):
        if torch.is_grad_enabled() and not target.is_floating_point() and not hasattr(target, "full_tensor"):
            now["terms"] += int((target != ignore_index).sum())
        return function(input, target, weight, size_average, ignore_index, *args, **options)

    return watched


def seed(number):
    """Seed each rank with another number, as unseeded processes would have; forked ranks would share one."""
    for one_of in (torch.manual_seed, random.seed, *([numpy.random.seed] if numpy else [])):
        one_of(number)


def states() -> list:
    """Return the states of the random numbers that data sets draw from."""
    state = [torch.get_rng_state().tolist(), random.getstate()]
    if numpy:
        name, key, *rest = numpy.random.get_state()
        state.append((name, key.tolist(), *rest))
    return state


def fetch(function, off):
    """Note that a batch's samples are drawn by chance; switched off, a sample's number is its seed."""

    def watched(fetcher, index):
        before = states()
        if not off or not fetcher.auto_collation:
            batch = function(fetcher, index)
            if states() != before:
                note_once("chance", "augmentation")
            return batch
        data = []
        for number in index:
            seed(hash(number) % 2**32)
            data.append(fetcher.dataset[number])
        torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
        random.setstate(before[1])
        for state in before[2:]:
            numpy.random.set_state(state)
        return fetcher.collate_fn(data)

    return watched
