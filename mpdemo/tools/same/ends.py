"""Says why several ranks hang or break off: the first call that not all of them make, and in which line."""

import itertools
import re

from mpdemo.tools.same.finding import Finding

# in an error that another rank may have caused: one has left, or the collectives don't fit together, as gloo says
OF_OTHERS = re.compile(
    r"Connection closed|Connection reset|closed by peer|recvValue|Broken pipe|"
    r"EnforceNotMet|op\.preamble|gloo/|terminate called|exit status -"
)
OF_DATA = {"backward": "goes back for", "end of data": "has no more data after"}


def of_end(many):
    """Return why a world of several has not come to its end, or nothing."""
    if many.how == "ended" and not many.error:
        return None if many.steps else Finding("fails with several", "no step of an optimizer is seen")
    if many.error and not OF_OTHERS.search(many.error):
        return Finding("fails with several", many.error, many.error_line)
    return first_call(many)


def first_call(many):
    """Return the first call of a rank where another makes another one, or the last calls of all."""
    for k, calls in enumerate(itertools.zip_longest(*(rank.of("call") for rank in many.ranks))):
        made = [call and (call["name"], call["of"]) for call in calls]
        rank = next((number for number, call in enumerate(made) if call != made[0]), None)
        if rank:
            said = f"in call {k + 1}, rank 0 {doing(calls[0])}, where rank {rank} {doing(calls[rank])}"
            return of_pair(many, {0: calls[0], rank: calls[rank]}, said)
    last = [rank.of("call")[-1:] for rank in many.ranks]
    where = next((call["where"] for calls in last for call in calls), many.error_line)
    said = "; ".join(f"rank {k} {doing(*calls)}" for k, calls in enumerate(last) if calls)
    if many.error:
        return Finding("fails with several", f"{many.error}; {said}", where)
    what = f"nothing new for {many.order['limit']} s after {len(many.steps)} steps; {said}"
    return Finding("hangs", what.removesuffix("; "), where)


def of_pair(many, calls, said):
    """Name what two ranks do instead of the same call."""
    made = [call for call in calls.values() if call]
    names = {call["name"] for call in made}
    if len(made) == 1:  # the other has ended, or waits in its last call, which this one has left
        gone = next(rank for rank, call in calls.items() if not call)
        ended = many.statuses.get(gone) == 0 or many.how == "ended"
        return Finding("a rank leaves early" if ended else "hangs", said, made[0]["where"])
    if names == {"backward"}:
        return Finding("a rank skips", said, made[0]["where"])
    name = "unequal steps" if names <= OF_DATA.keys() else "collectives differ"
    odd = max(made, key=lambda call: (call["name"] not in OF_DATA, call["name"] == "backward"))
    return Finding(name, said, odd["where"])  # where the one is that the other doesn't make


def doing(call) -> str:
    """Say what a rank does in a call."""
    if call is None:
        return "makes none"
    said = OF_DATA.get(call["name"], f"calls {call['name']}")
    return f"{' '.join(filter(None, (said, call['of'])))} ({call['where']})"
