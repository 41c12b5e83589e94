"""Which samples a rank draws from a data set whose samples have numbers."""

import ast
import collections

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from . import chance, private_torch
from .notes import ORDER, before, calling, finish, here, note, note_once, now, number_of, takes_one
from .rows import rows_of

MOST = 100_000  # samples of an epoch whose numbers are noted
ENOUGH = 8  # epochs in which a scheduler should have acted
WARM_UP = 16  # times as many batches at most, while a learning rate rises
loaders, datasets, fetchers, passes = {}, {}, set(), collections.Counter()
lines = {}  # by id of a loader: where it was made
trained = collections.defaultdict(set)  # by loader: the passes over it in which there was a step


class Noted:
    """Stands for a loader's batch sampler: notes the whole order of an epoch, and hands it out."""

    def __init__(self, loader, sampler):
        self.sampler, self.dataset = sampler, loader.dataset
        self.in_batches = loader.batch_sampler is not None
        kind = number_of(datasets, loader.dataset), loader.batch_size, type(loader.sampler).__name__
        self.key = loaders.setdefault(kind, len(loaders))  # many scripts build a new loader for each epoch
        self.number, self.line = 0, lines.get(id(loader), "")

    def __len__(self):
        return len(self.sampler)  # the script may compute a schedule from it; `take` ends the epoch

    def beginning(self):
        """Yield the batches of an epoch, or the first ones of an epoch that is very long, or has no end."""
        samples = 0
        for number, batch in enumerate(self.sampler):
            if number >= ORDER["batches"] and (samples >= MOST or not hasattr(self.sampler, "__len__")):
                break
            yield batch
            samples += len(batch) if self.in_batches else 1

    def __iter__(self):
        passes[self.key] += 1
        self.number = passes[self.key]
        epochs = len(trained[self.key])
        if epochs >= ORDER["epochs"] and (not now.waiting or epochs >= ENOUGH):
            finish()
        whole = list(self.beginning())
        batches = [[plain(index) for index in (batch if self.in_batches else [batch])] for batch in whole]
        root, samples = self.dataset, batches
        while isinstance(root, Subset):  # a sample's number in the whole data set, not in a part of it
            samples = [[plain(root.indices[index]) for index in batch] for batch in samples]
            root = root.dataset
        what = {"batches": batches, "samples": samples, "line": self.line, "taken_at": here()}
        note("pass", loader=self.key, number=self.number, **what)
        replayed = ORDER["replay"].get(str(self.key), [])
        if len(replayed) >= self.number and self.in_batches:
            given = [list(map(as_it_was, batch)) for batch in replayed[self.number - 1]]
            whole = given + whole[len(given) :]
        yield from whole


def plain(index):
    """Return a sample's number as JSON can hold it."""
    return int(index) if hasattr(index, "__index__") else repr(index)


def as_it_was(index):
    """Return a sample's number from what `plain` made of it, such as a tuple of epoch and sample."""
    return ast.literal_eval(index) if isinstance(index, str) else index


def watch():
    """Note which samples are drawn, which batches the script takes, and whether a scheduler has still to act."""
    next_batch, fetcher = private_torch.LoaderIterator.__next__, private_torch.Fetcher

    def noted(loader):
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return sampler if isinstance(loader.dataset, IterableDataset) else Noted(loader, sampler)

    def take(iterator):
        sampler, number = private_torch.batch_sampler(iterator), private_torch.yielded(iterator)
        warms_up = now.rising and number < WARM_UP * ORDER["batches"]
        if (
            isinstance(sampler, Noted)
            and number >= ORDER["batches"]
            and sampler.key not in now.whole
            and not warms_up
        ):
            if not takes_one():
                raise StopIteration
            now.whole.add(sampler.key)
            note_once("whole", sampler.key)
        try:
            batch = next_batch(iterator)
        except StopIteration:
            if iterator is now.trained_on:  # the other ranks have no more, either
                calling("end of data", f"batch {number}")
            raise
        now.batch = []
        if now.iterator is not iterator:
            now.iterator, now.epoch = iterator, now.epoch + 1
        if isinstance(sampler, Noted):
            now.read_from = sampler.key, sampler.number, number + 1
        if "draws" in ORDER["without"]:
            now.update(batch=rows_of(batch), draws=0)
            chance.seed(1 + now.steps)
        chance.look()
        return batch

    private_torch.replace_batch_samplers(noted)
    private_torch.LoaderIterator.__next__ = take
    fetcher.fetch = fetch(fetcher.fetch, "augmentation" in ORDER["without"])
    before(DataLoader, "__init__", made)
    before(torch.optim.lr_scheduler.LRScheduler, "step", scheduled)


def made(loader, *_, **__):
    """Note where a loader is made."""
    lines[id(loader)] = here()
    note_once("loader at", here())


def scheduled(*_, **__):
    """Count the steps of schedulers; until one has changed a learning rate, there is something to wait for."""
    now.scheduled += 1
    note_once("scheduler at", here())
    now.waiting = len(now.seen_rates) < 2


def fetch(function, off):
    """Note that a batch's samples are drawn by chance; switched off, a sample's number is its seed."""

    def watched(fetcher, index):
        before, now.states = chance.states(), None
        if off and fetcher.auto_collation:
            data = []
            for number in index:
                chance.seed(hash(number) % 2**32)
                data.append(fetcher.dataset[number])
            chance.restore(before)
            return fetcher.collate_fn(data)
        batch = noted_fetch(function, fetcher, index)
        if chance.states() != before:
            note_once("chance", "augmentation")
        return batch

    return watched


def noted_fetch(function, fetcher, index):
    """Fetch a batch; of the first one of each process note from which states its samples, not the batch, are drawn."""
    if now.steps or fetcher in fetchers:
        return function(fetcher, index)
    fetchers.add(fetcher)
    collate, before = fetcher.collate_fn, chance.others()

    def collated(data):
        if (after := chance.others()) != before:
            # both: a sample may have a seed of its own
            chance.note_drawn("augmentation", (before, after), 0)
        return collate(data)

    fetcher.collate_fn = collated
    now.update(drawing="augmentation", states=before)
    batch = function(fetcher, index)
    now.update(drawing="draws", states=None)
    fetcher.collate_fn = collate
    return batch
