"""The model of the time on N devices: recovered where it is known, checked on a real cluster, and its advice."""

import math

import pytest

from mpdemo.errors import UserError
from mpdemo.plan import imagenet
from mpdemo.plan.scaling import Run, advise, fit, same_batch, same_share

IMAGES = 1_000_000


def made(terms, batch, numbers=(1, 2, 8, 32)):
    """Return runs whose times are made from known terms."""
    compute, communication, start = terms
    times = [start + compute / n + communication * math.log2(n) * IMAGES / batch(n) for n in numbers]
    return [Run(n, seconds, batch(n)) for n, seconds in zip(numbers, times, strict=True)]


@pytest.mark.parametrize("batch", [same_batch(1024), same_share(64)], ids=["same batch", "same share"])
@pytest.mark.parametrize("terms", [(9000, 0.02, 40), (9000, 0, 40), (9000, 0.02, 0), (9000, 0, 0)], ids=str)
def test_known_terms_are_recovered(terms, batch):
    model = fit(made(terms, batch), IMAGES)
    assert (model.compute, model.communication, model.start) == pytest.approx(terms, rel=1e-6, abs=1e-9)
    assert model.time(128, batch(128)) == pytest.approx(made(terms, batch, (128,))[0].seconds)


def test_no_term_falls_below_zero():
    faster_than_ideal = [Run(1, 1000, 64), Run(2, 480, 64), Run(4, 235, 64), Run(8, 110, 64)]
    model = fit(faster_than_ideal, IMAGES)
    assert model.communication == model.start == 0
    assert 900 < model.compute < 1000


def test_a_real_cluster_is_predicted_from_its_first_three_runs():
    model = fit(imagenet.RUNS[:3], imagenet.IMAGES)
    errors = {run.devices: model.time(run.devices, run.batch) / run.seconds - 1 for run in imagenet.RUNS}
    assert all(abs(errors[devices]) < 0.01 for devices in (1, 4, 16))
    assert abs(errors[32]) < 0.1 and abs(errors[64]) < 0.1
    assert errors[128] == pytest.approx(-0.288, abs=0.002)  # something that three runs do not show
    assert fit(imagenet.RUNS[:4], imagenet.IMAGES).start > 30


def test_speedup_and_efficiency_of_one_model():
    model = fit(made((3600, 0, 0), same_batch(64)), IMAGES)
    assert model.efficiency(8, 64) == pytest.approx(1)
    half = fit(made((3600, 0, 3600), same_batch(64)), IMAGES)
    assert 10**9 * half.efficiency(10**9, 64) == pytest.approx(2)  # Amdahl: what does not shrink is half of the work


def test_advice_is_the_largest_efficient_number_and_the_least_time():
    batch = same_batch(1000)  # 1000 steps: time = 1000 / N + 10 log2(N)
    model = fit(made((1000, 0.01, 0), batch), IMAGES)
    advice = advise(model, batch, efficiency=0.7)
    assert advice.efficient == max(n for n in range(1, 129) if 1000 / n / (1000 / n + 10 * math.log2(n)) >= 0.7)
    assert advice.fastest == pytest.approx(1000 * math.log(2) / 10, abs=1)  # where the derivative is zero
    assert advice.most == 4 * 32
    assert advise(model, batch, efficiency=1).efficient == 1


GOOD = [Run(1, 100.0, 64), Run(2, 55.0, 64), Run(4, 30.0, 64)]
REFUSED = [
    (GOOD[:2], IMAGES, "2 runs are too few for a fit; allowed: 3 or more"),
    ([*GOOD[:2], Run(4, math.nan, 64)], IMAGES, "seconds nan is not allowed in a fit; allowed: more than 0"),
    ([*GOOD[:2], Run(4, 30.0, 0)], IMAGES, "batch 0 is not allowed"),
    ([GOOD[1], GOOD[0], GOOD[2]], IMAGES, "devices 2, 1, 4 do not rise"),
    ([*GOOD, GOOD[2]], IMAGES, "devices 1, 2, 4, 4 do not rise"),
    (GOOD, 0, "images 0 is not allowed"),
]


@pytest.mark.parametrize(("runs", "images", "message"), REFUSED, ids=str)
def test_runs_without_a_fit_are_refused_in_one_line(runs, images, message):
    with pytest.raises(UserError) as refusal:
        fit(runs, images)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("efficiency", [0, 1.5, math.nan])
def test_an_efficiency_that_cannot_be_is_refused(efficiency):
    with pytest.raises(UserError, match="allowed: above 0, at most 1"):
        advise(fit(GOOD, IMAGES), same_batch(64), efficiency)
