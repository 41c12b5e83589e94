"""Check of notebook 31: an order of your own."""

from mpdemo.errors import UserError
from mpdemo.predict.simulate import simulate_order


def check_31_2(orders):
    texts = [row for row in orders if isinstance(row, str)]
    assert not texts, (
        f'A stage has a list of operations, such as ["F0", "B0"], and {texts[0]!r} is one text.'
    )
    try:
        rows = simulate_order(orders)
    except UserError as error:
        raise AssertionError(f"It doesn't run: {str(error).partition('; allowed')[0]}.") from None
    size = len(orders), 1 + max(row["microbatch"] for row in rows)
    assert size == (3, 4), (
        f"There are three stages and four microbatches; this order has {size[0]} and {size[1]}."
    )
    for stage, (limit, order) in enumerate(zip((3, 2, 1), orders, strict=True)):
        most = max(
            sum(1 if name[0] == "F" else -1 for name in order[:end]) for end in range(len(order) + 1)
        )
        assert most <= limit, (
            f"It runs, but stage {stage} holds {most} microbatches and has memory for {limit}."
        )
    step = max(row["end"] for row in rows)
    assert step <= 18, f"It runs and fits, but takes {step:g} units. 1F1B takes 18."
