"""Which rung: every leaf of the tree is what `choose` answers for some case, and rules join in with their rung."""

from dataclasses import replace

import pytest

from mpdemo import settings
from mpdemo.errors import UserError
from mpdemo.jobs import train_command
from mpdemo.predict import memory
from mpdemo.predict.request import MIB, RESERVE, PlanRequest, settled
from mpdemo.tools.plan import strategies
from mpdemo.tools.plan.choose import NOTHING, choose

# Weights and states of these models: 4 MiB (beside 15 MiB of activations), 171 MiB, 56 MiB.
SMALL = PlanRequest("convnet", batch=4, image_size=112, classes=10)
LARGE = PlanRequest("resnet18", batch=8, image_size=112, classes=10)
SPLIT = PlanRequest("transformer", batch=1, image_size=112, classes=10)


def limited(case, mib, **changes):
    """Return the case on devices that leave PyTorch so many MiB."""
    return replace(case, memory=RESERVE + mib * MIB, **changes)


CASES = [
    (limited(SMALL, 20), "single"),
    (limited(SMALL, 10), "single, gradient accumulation"),
    (limited(SMALL, 8.5), "single, bf16"),
    (limited(SMALL, 8), "single, activation checkpointing"),
    (limited(SMALL, 3), NOTHING),
    (limited(SMALL, 14, devices=2), "ddp"),
    (limited(SMALL, 11, devices=2), "ddp, gradient accumulation"),
    (limited(SMALL, 9.2, devices=2), "ddp, bf16"),
    (limited(SMALL, 8.6, devices=2), "ddp, activation checkpointing"),
    (limited(LARGE, 170, devices=2), "fsdp"),
    pytest.param(
        limited(replace(LARGE, norm="group"), 140, devices=2),
        "fsdp, bf16, activation checkpointing",
        marks=pytest.mark.nightly,
    ),
    (limited(LARGE, 190, devices=2, batch=32), "fsdp, gradient accumulation"),
    (limited(LARGE, 140, devices=2), "fsdp, activation checkpointing"),
    (limited(SPLIT, 45, devices=2), "tensor"),
    (limited(LARGE, 170, devices=2, batch=7), "pipeline"),
    (limited(LARGE, 170, devices=2, batch=1), "model_parallel"),
    (limited(LARGE, 170, devices=4, nodes=2, batch=6), "hybrid"),
    (limited(LARGE, 114, devices=4, batch=6, optimizer="adamw"), "hybrid, sharded"),
    (limited(LARGE, 20, devices=2), NOTHING),
]


@pytest.mark.parametrize(("case", "answer"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_an_answer_is_that_of_a_rule_and_fits_and_its_settings_are_those_of_a_training(case, answer):
    choice = choose(case)
    assert choice.answer == answer
    assert choice.why.endswith(".") and "{" not in choice.why
    if answer == NOTHING:
        assert choice.rung is None
        return
    assert choice.predicted.memory <= case.limit
    train_command(model=case.model, image_size=case.image_size, **choice.settings)
    chosen = settings.Settings(model=case.model, image_size=case.image_size, norm=case.norm, **choice.settings)
    checked = settings.checked(chosen)
    assert checked.devices * (checked.replicas or 1) == choice.settings.get("processes", 1)


def test_the_reason_names_the_options():
    assert choose(limited(SMALL, 8)).why.endswith("per device, by --activation-checkpointing --microbatches 4.")
    assert choose(limited(SMALL, 8.5)).why.endswith("by --precision bf16 --microbatches 4.")
    assert choose(limited(SMALL, 20)).why.endswith("per device.")


def test_one_device_counts_what_a_plan_counts():
    whole = memory.processes(SMALL.spec, settled(SMALL.spec, "single", 4), 2)[0].devices[0]
    assert choose(limited(SMALL, 20)).predicted.memory == pytest.approx(whole.peak, rel=0.001)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"devices": 3}, "allowed: a multiple of 3, such as 6"), ({"devices": 4, "nodes": 3}, "equally many in each")],
)
def test_what_cannot_be_shared_out_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        choose(limited(SMALL, 100, **changes))


def test_what_fits_comes_first_and_the_table_says_by_how_much_the_others_are_too_large():
    tight = replace(SMALL, devices=2, memory=RESERVE + 9 * MIB)
    rows = strategies.compare(tight)
    assert rows[0].answer == choose(tight).answer
    fits = [row.fits for row in rows]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    for row in rows:
        assert row.predicted is None or (row.predicted.memory <= tight.limit) == row.fits
    text = strategies.table(tight, rows).splitlines()
    assert text[3].startswith("->") and " yes " in text[3]  # below the headers of two lines
    assert any("MiB over" in line for line in text)
    assert ["tensor", "cannot"] in [line.split() for line in text]  # no layer of a convolutional net is split
