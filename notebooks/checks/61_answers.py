"""Check of notebook 61: the first call that differs between ranks."""

CASES = {
    "In the run above": (
        {0: ["average", "log", "average", "average"], 1: ["average", "average", "average", "barrier"]},
        (2, {"log": [0], "average": [1]}),
    ),
    "Where rank 2 of four broadcasts": (
        {0: ["a", "a"], 1: ["a", "a"], 2: ["a", "b"], 3: ["a", "a"]},
        (2, {"a": [0, 1, 3], "b": [2]}),
    ),
    "Where rank 1 has made a call less": (
        {0: ["average", "average"], 1: ["average"]},
        (2, {"average": [0], "not called": [1]}),
    ),
    "Where rank 0 has made none": ({0: [], 1: ["average"]}, (1, {"not called": [0], "average": [1]})),
    "Where all agree": ({0: ["average"], 1: ["average"]}, None),
}


def check_61_1(first_difference):
    for where, (calls, right) in CASES.items():
        own = first_difference({rank: [*made] for rank, made in calls.items()})
        assert not (right is None and own is not None), f"{where} it returns {own!r} instead of None."
        assert not (right and own is None), (
            f"{where} it returns None, but call {right[0]} differs. How far does it look?"
        )
        if right is None:
            continue
        what = f"{where} it returns {own!r}"
        assert isinstance(own, tuple | list) and len(own) == 2, f"{what}, not a number and a dictionary."
        number, groups = own
        assert number != right[0] - 1, f"{what}: count the calls from 1."
        assert number == right[0], f"{what}: the first call that differs is number {right[0]}."
        assert dict(groups) == right[1], f"{what}: call {number} was {right[1]}."
