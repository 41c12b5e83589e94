"""Test of the program in notebook 20: metrics that all ranks average, and decide by."""
# ruff: noqa: F821 - what the reader's program defines

from checks.helpers import close, gathered

EPOCHS = [  # each rank's loss and accuracy, and the best loss before
    ((0.4, 0.9), (0.8, 0.7), 0.7),
    ((0.6, 0.8), (0.9, 0.5), 0.7),
    ((0.25, 0.9), (0.35, 0.8), 0.5),
]


def test_20_2(rank, n):
    for number, (*values, best) in enumerate(EPOCHS):
        own = dict(zip(("loss", "accuracy"), values[rank], strict=True))
        own = own if rank == 0 else dict(reversed(own.items()))
        answer = end_of_epoch(own, best)
        wait_for_all(f"the end of epoch {number}")
        told = gathered(answer)
        where = f"In epoch {number}, where the losses are {values[0][0]} and {values[1][0]}, and the best was {best},"
        for who, returned in enumerate(told):
            pair = (
                isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], dict)
            )
            assert pair, (
                f"{where} rank {who} returns {returned!r}. Each rank returns the means, and a truth value."
            )
        for place, name in enumerate(("loss", "accuracy")):
            right = (values[0][place] + values[1][place]) / 2
            for who, (returned, _) in enumerate(told):
                require_mean(returned.get(name), right, f"{where} rank {who} returns", name, values)
        decisions = [bool(goes) for _, goes in told]
        apart = f"{where} rank 0 returns {decisions[0]} and rank 1 {decisions[1]}: one of them will wait for the other."
        assert decisions[0] == decisions[1], apart
        right = sum(loss for loss, _ in values) / 2 < best
        assert decisions[0] == right, f"{where} both ranks return {decisions[0]}. What is the mean loss?"


def require_mean(own, right, said, name, values):
    """Require a rank's mean of a metric to be right, and say which mistake gives another one."""
    assert own is not None, f"{said} no {name}."
    mixed = [(values[0][first] + values[1][1 - first]) / 2 for first in (0, 1)]
    crossed = f"{said} {own:.3g} as the mean of {name}: a loss and an accuracy were added up. Which call met which?"
    assert not any(close(own, mean, 1e-4) for mean in mixed), crossed
    assert not close(own, 2 * right, 1e-4), f"{said} {own:.3g} as the mean of {name}, which is the sum."
    assert close(own, right, 1e-4), f"{said} {own:.3g} as the mean of {name}. It is {right:.3g}."
