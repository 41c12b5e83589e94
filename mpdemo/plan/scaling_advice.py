"""How many devices are worth their hours, by a fitted model of the time. Taught in notebooks/08_scaling.ipynb."""

from collections.abc import Callable
from dataclasses import dataclass

from mpdemo.errors import UserError

EFFICIENCY = 0.7
REACH = 4  # a fit is asked for no more than so many times the devices that it has seen


def same_batch(batch) -> Callable:
    """Return the batch for any number of devices where it stays the same: each device gets a smaller share."""
    return lambda devices: batch


def same_share(share) -> Callable:
    """Return the batch for any number of devices where the share of one device stays the same."""
    return lambda devices: share * devices


@dataclass(frozen=True)
class Advice:
    """How many devices to take.

    Attributes
    ----------
    efficient : int
        The largest number with the wanted efficiency.
    fastest : int
        The number with the least time.
    most : int
        The largest number that was looked at; a `fastest` of `most` may lie further on.
    """

    efficient: int
    fastest: int
    most: int


def advise(model, batch, efficiency=EFFICIENCY, most=None) -> Advice:
    """Say how many devices are worth their hours.

    Parameters
    ----------
    model : Model
    batch : callable
        Devices -> global batch: `same_batch` or `same_share`.
    efficiency : float
        Of the useful hours among all that are paid: above 0, at most 1.
    most : int, optional
        Devices to look at; default: `REACH` times the most that were measured.

    Raises
    ------
    UserError
        An efficiency that is not allowed.
    """
    if not 0 < efficiency <= 1:
        raise UserError(f"efficiency {efficiency} is not allowed; allowed: above 0, at most 1, such as {EFFICIENCY}")
    most = most or REACH * model.largest
    numbers = [n for n in range(1, most + 1) if batch(n) >= n]  # each device needs an image
    good = [n for n in numbers if model.efficiency(n, batch(n)) >= efficiency]
    return Advice(max(good), min(numbers, key=lambda n: model.time(n, batch(n))), most)
