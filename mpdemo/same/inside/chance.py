"""Notes what draws random numbers or depends on how a batch is cut, and can switch it off."""

import random
import sys

import torch
from torch.nn import functional
from torch.utils.data._utils.fetch import _MapDatasetFetcher

DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"


def watch(order, note_once, now):
    """Put the watched functions in the place of PyTorch's own, which its modules call by these names, too."""
    for name in DROPOUTS.split():
        setattr(functional, name, dropout(getattr(functional, name), "dropout" in order["without"], note_once))
    functional.scaled_dot_product_attention = attention(
        functional.scaled_dot_product_attention, "dropout" in order["without"], note_once
    )
    functional.batch_norm = batch_norm(functional.batch_norm, "batchnorm" in order["without"], note_once)
    functional.cross_entropy = cross_entropy(functional.cross_entropy, now)
    _MapDatasetFetcher.fetch = fetch(_MapDatasetFetcher.fetch, "augmentation" in order["without"], note_once)


def dropout(function, off, note_once):
    def watched(input, p=0.5, training=True, inplace=False):
        if training and p > 0:
            note_once("chance", "dropout")
        return function(input, p, training and not off, inplace)

    return watched


def attention(function, off, note_once):
    def watched(query, key, value, attn_mask=None, dropout_p=0.0, *args, **options):
        if dropout_p > 0:
            note_once("chance", "dropout")
        return function(query, key, value, attn_mask, 0.0 if off else dropout_p, *args, **options)

    return watched


def batch_norm(function, off, note_once):
    def watched(input, running_mean, running_var, weight=None, bias=None, training=False, *args, **options):
        if training:
            note_once("chance", "batchnorm")
        training = training and not (off and running_mean is not None)
        return function(input, running_mean, running_var, weight, bias, training, *args, **options)

    return watched


def cross_entropy(function, now):
    """Count the terms of a mean: a target that is ignored, such as padding, is none."""

    def watched(input, target, weight=None, size_average=None, ignore_index=-100, *args, **options):
        if torch.is_grad_enabled() and not target.is_floating_point() and not hasattr(target, "full_tensor"):
            now["terms"] += int((target != ignore_index).sum())
        return function(input, target, weight, size_average, ignore_index, *args, **options)

    return watched


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


def fetch(function, off, note_once):
    """Note that a batch's samples are drawn by chance; switched off, a sample's number is its seed."""

    def seeded(fetcher, index):
        data = []
        for number in index:
            torch.manual_seed(hash(number) % 2**32)
            random.seed(hash(number))
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(hash(number) % 2**32)
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
