"""An order of one's own: it runs as the library's does, and one that cannot run is named."""

import pytest

from mpdemo.errors import UserError
from mpdemo.plan import simulate
from mpdemo.plan.simulate import order, simulate_order


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 4), (4, 8)])
def test_the_order_of_a_schedule_gives_its_simulation(schedule, ranks, microbatches):
    orders = [[f"{kind}{m}" for kind, _, m in lane] for lane in order(schedule, ranks, microbatches)]
    simulation = simulate(schedule, [1] * ranks, [2] * ranks, microbatches, ranks)
    assert simulate_order(orders, forward=1, backward=2) == simulation.events


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ([["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]], "stage 0 wants to do B0, and waits for B0 of stage 1"),
        ([["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]], "stage 1 wants to do F1, and waits for F1 of stage 0"),
        ([["B0", "F0"], ["F0", "B0"]], "waits for F0 of itself"),
        ([["F0", "F1", "B0", "B1"], ["F0", "B0"]], "stage 1 has F1 0 times"),
        ([["F0", "B0", "B0"]], "stage 0 has B0 2 times"),
        ([["F0", "W0"]], "stage 0 has 'W0'; allowed: F or B"),
        ([[], []], "there is no operation"),
    ],
)
def test_an_order_that_cannot_run_is_named(orders, said):
    with pytest.raises(UserError) as error:
        simulate_order(orders)
    assert said in str(error.value) and "\n" not in str(error.value)
