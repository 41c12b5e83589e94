"""A training loop with nothing beside its work, in turn with which the package's loop and Lightning's are timed."""

import copy

from mpdemo import data
from torch.nn.functional import cross_entropy as loss_fn
from mpdemo.training.build import make_optimizer


def bare_epoch(dataset, model, settings):
    """Return a function that trains a copy of the model for one epoch, with nothing beside it."""
    model, loaders = copy.deepcopy(model), data.Loaders(dataset, settings.batch_size)
    optimizer = make_optimizer(model.parameters(), settings)

    def epoch():
        for images, labels in loaders.train:
            optimizer.zero_grad()
            loss_fn(model(images), labels).backward()
            optimizer.step()

    return epoch
