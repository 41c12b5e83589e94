"""Judge a prediction by its row of ``notebooks/checks/NN.toml``: no code, only values and what to say about them.

``right`` is a value or a list of them, ``within`` a relative tolerance. ``wrong`` holds pairs of a value ("*" stands
for any part of a list) and its message; ``otherwise`` is a message for all else, or one for each part. ``choices`` are
the allowed words. A message may hold ``{answer}``, or its parts ``{_0}``, ``{_1}`` and so on.
"""

import math


def judge_prediction(row, answer):
    """Raise `AssertionError` with the message of what is wrong with an answer, if anything is."""
    right, within = row["right"], row.get("within", 1e-9)
    parts, wanted = (answer, right) if isinstance(right, list) else ([answer], [right])
    words = {"answer": answer} | {f"_{number}": part for number, part in enumerate(parts)}
    for part in parts if "choices" in row else []:
        assert part in row["choices"], f"{part!r} is none of: {', '.join(map(str, row['choices']))}."
    for value, message in row.get("wrong", []):
        assert not same(answer, value, within), message.format(**words)
    assert len(parts) == len(wanted), f"This answer has {len(parts)} parts instead of {len(wanted)}."
    otherwise = row.get("otherwise", "{answer} isn't it.")
    messages = otherwise if isinstance(otherwise, list) else [otherwise] * len(parts)
    for part, value, message in zip(parts, wanted, messages, strict=True):
        assert same(part, value, within), message.format(**words)


def same(answer, value, within) -> bool:
    """Whether an answer is a value of a row: numbers within a relative tolerance; "*" stands for any part."""
    if isinstance(value, list):
        return len(answer) == len(value) and all(same(a, v, within) for a, v in zip(answer, value, strict=True))
    if isinstance(value, str):
        return value in ("*", answer)
    return math.isclose(answer, value, rel_tol=within)
