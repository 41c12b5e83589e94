"""Check of notebook 02: a learning rate that warms up."""

import math


def check_02_3(learning_rate):
    rates = [learning_rate(step, 0.02, 8, 10) for step in range(20)]
    assert rates[0] > 0, "The first step has the rate 0, so it changes nothing: step 0 is the first of ten."
    assert not math.isclose(rates[0], 0.16), "The first step already has the full rate: nothing warms up."
    for step, rate in enumerate(rates):
        wanted = 0.016 * min(step + 1, 10)
        case = "(base 0.02, a batch 8 times as large, ten steps of warm-up)"
        assert math.isclose(rate, wanted, rel_tol=0.01), f"Step {step} has {rate:.3g}, and not {wanted:.3g} {case}."
    try:
        constant = learning_rate(0, 0.02, 8, 0)
    except ZeroDivisionError:
        raise AssertionError("With warmup = 0 it divides by zero.") from None
    assert math.isclose(constant, 0.16, rel_tol=0.01), f"With warmup = 0 the first step has {constant:.3g}."
