"""Judge a prediction by its row of ``notebooks/checks/NN.toml``: no code, only values and what to say about them.

``right`` is a value, a list of them, or ``function:NAME`` of ``NN_answers.py``; ``within`` a relative tolerance.
``wrong`` holds pairs of a value ("*" stands for any part of a list) and its message; ``below`` and ``above`` pairs of a
limit and a message; ``otherwise`` a message for all else, or one for each part. ``choices`` are the allowed words;
``choose`` has a message for each letter or name that is wrongly in the answer or missing; ``parts`` names the keys of a
dictionary; the order of a list that is ``unordered`` doesn't count. A message may hold ``{answer}``, or its parts
``{_0}``, ``{_1}`` and so on.
"""

import math


def judge_prediction(row, answer):
    """Raise `AssertionError` with the message of what is wrong with an answer, if anything is."""
    if "choose" in row:
        return _judge_choice(row, answer)
    right, within = row["right"], row.get("within", 1e-9)
    if names := row.get("parts"):
        assert set(names) <= set(answer), f"The answer needs the names {', '.join(map(str, names))}."
        answer = [answer[name] for name in names]
    if row.get("unordered"):
        answer = sorted(answer)
    parts, wanted = (answer, right) if isinstance(right, list) else ([answer], [right])
    words = {"answer": answer} | {f"_{number}": part for number, part in enumerate(parts)}
    for part in parts if "choices" in row else []:
        assert part in row["choices"], f"{part!r} is none of: {', '.join(map(str, row['choices']))}."
    for value, message in row.get("wrong", []):
        assert not same(answer, value, within), message.format(**words)
    for limit, message in row.get("below", []):
        assert answer >= limit, message.format(**words)
    for limit, message in row.get("above", []):
        assert answer <= limit, message.format(**words)
    assert len(parts) == len(wanted), f"This answer has {len(parts)} parts instead of {len(wanted)}."
    otherwise = row.get("otherwise", "{answer} isn't it.")
    messages = otherwise if isinstance(otherwise, list) else [otherwise] * len(parts)
    for part, value, message in zip(parts, wanted, messages, strict=True):
        assert same(part, value, within), message.format(**words)
    return None


def _judge_choice(row, answer):
    """Judge a choice among letters or names; "ad", "a, d" and ["a", "d"] are the same answer."""
    messages = row["choose"]
    single = all(len(name) == 1 for name in messages)
    given = {answer} if isinstance(answer, str) and not single else set(answer)
    given = set("".join(given).lower()) - set(" ,;") if single else given
    assert given <= set(messages), f"{answer!r} holds something other than {', '.join(messages)}."
    for name, message in messages.items():
        assert (name in given) == (name in row["right"]), message


def same(answer, value, within) -> bool:
    """Whether an answer is a value of a row: numbers within a relative tolerance; "*" stands for any part."""
    if isinstance(value, list):
        return len(answer) == len(value) and all(same(a, v, within) for a, v in zip(answer, value, strict=True))
    if isinstance(value, str):
        return value in ("*", answer)
    return math.isclose(answer, value, rel_tol=within)
