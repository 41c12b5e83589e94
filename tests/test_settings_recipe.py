"""The course model's settings work on every rung, and are the same training on all of them."""

import pytest

from mpdemo.settings import RUNG_FORMS, Settings, checked, equal_cut, recipe
from mpdemo.settings.cuts import block_names, resolve_cut
from mpdemo.settings.train import RECIPE

FORMS = [(rung, form) for rung, forms in RUNG_FORMS.items() for form in (None, *forms)]


@pytest.mark.parametrize(("rung", "form"), FORMS)
def test_every_rung_and_form(rung, form):
    settings = recipe(rung, form=form, lr=0.5)
    s = checked(Settings(**settings))
    assert s == checked(Settings(rung=rung, form=form, lr=0.5, recipe="course"))
    assert {name: getattr(s, name) for name in RECIPE} == RECIPE | {"lr": 0.5}  # changes come last
    assert s.out == f"runs/train_{rung}"
    assert s.timeline == (s.form == "per-device" and rung in ("model_parallel", "pipeline", "hybrid"))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_equal_cut(stages):
    points = resolve_cut(block_names("transformer"), equal_cut(stages), stages)
    assert points == [1 + number * 8 // stages for number in range(1, stages)]
