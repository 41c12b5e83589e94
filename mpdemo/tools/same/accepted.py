"""What a project accepts: ``same.toml`` beside the script or in the current folder, a reason for each code.

[accepted]
S201 = "DiLoCo: the ranks average their weights every 50 steps, by design"
"""

import os
import tomllib
from pathlib import Path

from mpdemo import foreign
from mpdemo.errors import UserError, did_you_mean, one_line
from mpdemo.tools.same.finding import TABLE

NAME = "same.toml"


def reasons(script) -> dict:
    """Return why each code is accepted; refuse a file that doesn't say it."""
    places = [place / NAME for place in (Path(script).parent, Path()) if os.path.lexists(place / NAME)]
    if not places:
        return {}
    with foreign.faults(f"{places[0]} can't be read"), foreign.opened(places[0]) as file:
        data = tomllib.loads(file.read(foreign.BLOCK).decode())
    found, codes = data.pop("accepted", None), [row["code"] for row in TABLE.values()]
    if data or not isinstance(found, dict):
        what = f"holds {', '.join(data)}" if data else "has no table [accepted]"
        raise UserError(
            f'{places[0]} {what}; allowed: [accepted], and below it lines such as S101 = "the reason"'
        )
    for code, reason in found.items():
        if code not in codes:
            raise UserError(f"{places[0]}: {code!r} is the code of no finding{did_you_mean(code, codes)}")
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(f'{places[0]}: {code} has no reason; write {code} = "why it is right here"')
    return {code: one_line(reason) for code, reason in found.items()}


def set_aside(verdicts, reasons) -> list:
    """Set aside in each verdict what is accepted; return the codes of what was found in none."""
    for verdict in verdicts:
        found = {kind: [(f, f.record()) for f in verdict[kind]] for kind in ("findings", "harmless")}
        rows = [row for pairs in found.values() for _, row in pairs if row["code"] in reasons]
        verdict["accepted"] = [row | {"reason": reasons[row["code"]]} for row in rows]
        verdict |= {
            kind: [f for f, row in pairs if row["code"] not in reasons] for kind, pairs in found.items()
        }
        if found["findings"] and not verdict["findings"]:
            verdict |= {"verdict": "accepted", "said": f"{verdict['said']}, as {NAME} accepts"}
    return [
        code for code in reasons if not any(row["code"] == code for v in verdicts for row in v["accepted"])
    ]


def told(row) -> str:
    """Return what is printed of an accepted finding."""
    return "  {name}: {what}\n    Accepted ({code}): {reason}".format(**row)


def stale(record) -> list:
    """Return a line for each code that is accepted and was not found."""
    return [
        f"{NAME} accepts {code}, which is not found any more: take it out" for code in record["unmatched"]
    ]
