"""Slurm's job arrays: which elements an array has, as ``--array`` takes them. https://slurm.schedmd.com/job_array.html"""

import re

INDEX = "{index}"  # in the command of an array it stands for the element's number
MOST = 1000  # elements: Slurm's own limit (MaxArraySize) is 1001, unless a site says otherwise
ELEMENTS = re.compile(r"(\d{1,4}(-\d{1,4}(:\d{1,4})?)?)(,\d{1,4}(-\d{1,4}(:\d{1,4})?)?)*(%[1-9]\d{0,3})?", re.ASCII)


def indices(text) -> list[int]:
    """Return the numbers of an array's elements, rising.

    Raises
    ------
    ValueError
        It is no array, or has too many elements.

    Examples
    --------
    >>> indices("1-3,8%2")
    [1, 2, 3, 8]
    >>> indices("0-6:2")
    [0, 2, 4, 6]
    """
    if not ELEMENTS.fullmatch(text):
        raise ValueError("is not allowed; allowed: numbers and ranges, then how many at a time: 1-8, 0-6:2, 1,3,5%2")
    numbers = set()
    for part in text.partition("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1, max(1, int(step or 1))))
    if not 0 < len(numbers) <= MOST or max(numbers) > MOST:
        raise ValueError(f"is not allowed; allowed: rising ranges, of at most {MOST} elements in all")
    return sorted(numbers)


def chosen(text, numbers) -> str:
    """Return the array of some of its elements, with the limit of the whole: of ``1-8%2`` and 2, 5 ``2,5%2``."""
    _, limit, most = text.partition("%")
    return ",".join(map(str, numbers)) + limit + most
