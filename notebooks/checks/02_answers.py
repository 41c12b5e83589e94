"""Check of notebook 02: a learning rate that warms up."""

import math


def check_02_6(learning_rate):
    rates = [learning_rate(step, 0.02, 8, 10) for step in range(20)]
    strange = [rate for rate in rates if not isinstance(rate, int | float)]
    assert not strange, f"It returned {strange[0]!r}, which is no number."
    first, tenth, after = (rates[step] for step in (0, 9, 15))
    assert not math.isclose(after, 0.02), "After the warm-up the rate is still that of the small batch."
    full = f"After the warm-up the rate is {after:.3g} (base 0.02, batch 8 times as large)."
    assert math.isclose(after, 0.16, rel_tol=0.01), full
    assert first > 0, "The first step has the rate 0, so it changes nothing: step 0 is the first of ten."
    assert not math.isclose(first, 0.16), "The first step already has the full rate: nothing warms up."
    ten = f"The first of ten steps has {first:.3g}, and the full rate is 0.16."
    assert math.isclose(first, 0.016, rel_tol=0.01), ten
    last = f"The tenth and last step of the warm-up has {tenth:.3g}, not the full rate."
    assert math.isclose(tenth, 0.16, rel_tol=0.01), last
    assert max(rates) < 0.17, f"The rate grows to {max(rates):.3g} and never stops at the full rate."
    growth = [later - earlier for earlier, later in zip(rates[:9], rates[1:10], strict=True)]
    assert max(growth) - min(growth) < 1e-3, "The rate doesn't grow by the same amount in each step of the warm-up."
    try:
        constant = learning_rate(0, 0.02, 8, 0)
    except ZeroDivisionError:
        raise AssertionError("With warmup = 0 it divides by zero.") from None
    assert math.isclose(constant, 0.16, rel_tol=0.01), f"With warmup = 0 the first step has {constant:.3g}."
