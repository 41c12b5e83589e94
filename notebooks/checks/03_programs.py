"""Tests of the programs in notebook 03: collectives, averaged gradients, samples split among ranks."""
# ruff: noqa: F821 - what the reader's program defines

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from checks.helpers import COLLECTIVES, close, gathered, gradients, require_gradients, watch


def test_03_1(rank, n):
    calls = watch(program, *COLLECTIVES)
    value = report(1.0 + rank, rank, n)
    if rank > 0:
        assert value is None, f"Rank {rank} reports too: every line would appear in the log once per rank."
        return
    right = close(float(value), 1.5, 0.02)
    assert calls or right, "It no longer hangs, but nothing is added up: rank 0 reports without asking rank 1."
    assert right, f"Of the losses 1 and 2 rank 0 makes {float(value):g}."


def test_03_2(rank, n):
    torch.manual_seed(0)
    model, inputs, labels, calls = nn.Linear(5, 3), torch.randn(12, 5), torch.arange(12) % 3, []
    cross_entropy(model(inputs), labels).backward()
    right, ddp = gradients(model), DistributedDataParallel(model)

    def note(state, bucket):
        calls.append(1)
        work = dist.all_reduce(bucket.buffer().div_(n), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, note)
    accumulate(ddp, list(zip(inputs[rank::2].chunk(3), labels[rank::2].chunk(3), strict=True)))
    reduced = len(calls)
    assert reduced != 3, "The gradients are all-reduced of each of the 3 microbatches: two of these are wasted."
    assert reduced == 1, f"DDP makes {reduced} all-reduces: it makes one in each backward pass outside of no_sync."
    own = gradients(model)
    same = all(torch.allclose(*pair, atol=1e-6) for pair in zip(*gathered(own), strict=True))
    assert same, "There is one all-reduce, but of the wrong microbatch: what came after it differs between the ranks."
    require_gradients(own, right, "In three microbatches")


def test_03_3(rank, n):
    files = [list(range(first, first + 4)) for first in (0, 4, 8)]
    for workers in (0, 2):
        options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        parts = gathered([int(sample) for sample in DataLoader(Stream(files, rank, n), batch_size=None, **options)])
        read, sizes, where = sorted(sum(parts, [])), [len(part) for part in parts], f"With num_workers={workers}"
        often = next((sample for sample in read if read.count(sample) > 1), None)
        assert often is None, f"{where} an epoch of both ranks has sample {often} {read.count(often)} times."
        assert read == [*range(12)], f"{where} both ranks together read {len(read)} of 12 samples."
        unequal = f"{where} rank 0 reads {sizes[0]} samples and rank 1 reads {sizes[1]}: one of them runs out first."
        assert sizes == [6, 6], unequal


def test_03_4(rank, n):
    torch.manual_seed(rank)
    train, check = ([int(sample) for sample in part] for part in split(list(range(12))))
    assert (len(train), len(check)) == (9, 3), f"Rank {rank} gets {len(train)} and {len(check)} samples, not 9 and 3."
    trained, checked = gathered(train), gathered(check)
    leaks = sorted(set(trained[0]) & set(checked[1]) | set(trained[1]) & set(checked[0]))
    assert not leaks, f"One rank trains on the samples {leaks}, with which the other validates."
    draws = gathered(float(torch.rand(1)))
    assert draws[0] != draws[1], "After the split both ranks draw the same random numbers, for dropout as well."


def test_03_5(rank, n):
    """Rank 0 has 3 images with the sum 3, rank 1 has 5 with the sum 13."""
    value = float(mean_loss((3.0, 13.0)[rank], (3, 5)[rank]))
    assert not close(value, 1.8), "1.8 is the mean of the two means 1.0 and 2.6. But they are of 3 and of 5 images."
    assert not close(value, 8), "The sum of the losses is divided by the number of ranks, not of images."
    assert close(value, 2), f"Of 3 images with sum 3 and 5 with sum 13 rank {rank} makes {value:.2f}."


def test_03_6(rank, n):
    """The first number of an input says which one it is; the ranks' models begin with different weights."""
    inputs, labels = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
    inputs[:, 0] = torch.arange(24) / 24
    torch.manual_seed(rank)
    model, own = nn.Linear(5, 3), []
    single = copy.deepcopy(model)
    for parameter in single.parameters():
        dist.broadcast(parameter.data, 0)
    model.register_forward_pre_hook(lambda _, taken: own.append((24 * taken[0][:, 0]).round().int().tolist()))
    train(model, inputs, labels, 6, 8)
    generator, optimizer = torch.Generator().manual_seed(0), torch.optim.AdamW(single.parameters(), lr=0.01)
    for step, parts in enumerate(zip(*gathered(own), strict=True)):
        rows = torch.randint(24, (8,), generator=generator)
        sizes, together, right = [len(part) for part in parts], sorted(sum(parts, [])), sorted(rows.tolist())
        assert sizes == [4, 4], f"In step {step} the ranks compute {sizes[0]} and {sizes[1]} of the batch's 8 rows."
        assert together == right, f"In step {step} the ranks compute the rows {together}, and one device {right}."
        optimizer.zero_grad()
        cross_entropy(single(inputs[rows]), labels[rows]).backward()
        torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        optimizer.step()
    apart = (single.weight - model.weight).abs().max().item()
    assert apart < 1e-4, f"Rank {rank} ends with other weights than one device that computes the same batches."
