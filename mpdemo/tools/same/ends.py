"""Says why several ranks hang or break off: the first call that not all of them make, and in which line."""

import itertools
import re

from mpdemo.tools.same.finding import Finding

# in an error that another rank may have caused: one has left, or the collectives don't fit together, as gloo says
OF_OTHERS = re.compile(
    r"Connection closed|Connection reset|closed by peer|recvValue|Broken pipe|"
    r"EnforceNotMet|op\.preamble|gloo/|terminate called|exit status -"
)
BATCH = re.compile(r"batch (\d+)")


def of_end(many):
    """Return why a world of several has not come to its end, or nothing."""
    if many.how == "ended" and not many.error:
        return None if many.steps else Finding("fails with several", "no step of an optimizer is seen")
    if many.error and not OF_OTHERS.search(many.error):
        return Finding("fails with several", many.error, many.error_line)
    return out_of_data(many) or first_call(many)


def out_of_data(many):
    """Return whether one rank has no more data while another still trains on its batches."""
    for number, rank in enumerate(many.ranks):
        for nth, end in enumerate(rank.of("end of data")):
            for k, other in enumerate(many.ranks):
                longest = in_pass(other, nth)
                if k != number and longest[0] > end["number"]:
                    what = f"rank {number} has no more data after {end['number']} batches, and rank {k} takes more"
                    return Finding("unequal steps", what, longest[1] or end["where"])
    return None


def in_pass(rank, nth) -> tuple:
    """Return the last batch that a rank has gone back for in a pass over its data, and in which line."""
    passed, last = 0, (0, "")
    for note in rank.notes:
        if note["kind"] == "end of data":
            passed += 1
        elif note["kind"] == "call" and passed == nth and (batch := BATCH.match(note["of"])):
            last = max(last, (int(batch[1]), note["where"]))
    return last


def first_call(many):
    """Return the first call of a rank where another makes another one, or none."""
    for k, calls in enumerate(itertools.zip_longest(*(rank.of("call") for rank in many.ranks))):
        made = [(call["name"], call["of"]) if call else None for call in calls]
        rank = next((number for number, call in enumerate(made) if call != made[0]), None)
        if rank:
            return of_call(many, k, calls, made, rank)
    last = [rank.of("call")[-1:] for rank in many.ranks]
    where = next((call["where"] for calls in last for call in calls), many.error_line)
    said = "; ".join(f"rank {k} {doing(*calls)}" for k, calls in enumerate(last) if calls)
    if many.error:
        return Finding("fails with several", f"{many.error}; {said}", where)
    what = f"nothing new for {many.order['limit']} s after {len(many.steps)} steps; {said}"
    return Finding("hangs", what.removesuffix("; "), where)


def of_call(many, k, calls, made, rank):
    """Name what two ranks do instead of the same call."""
    said = f"in call {k + 1}, rank 0 {doing(calls[0])}, where rank {rank} {doing(calls[rank])}"
    gone = 0 if made[0] is None else rank
    if made[gone] is None:  # it has ended, or waits in its last call, which the other has left
        name = "a rank leaves early" if many.statuses.get(gone) == 0 or many.how == "ended" else "hangs"
        return Finding(name, said, calls[rank - gone]["where"])
    if made[0][0] == made[rank][0] == "backward":
        return Finding("a rank skips", said, calls[0]["where"])
    odd = 0 if made[0][0] != "backward" else rank  # a collective that only some make
    return Finding("collectives differ", said, calls[odd]["where"])


def doing(call) -> str:
    """Say what a rank does in a call."""
    if call is None:
        return "makes none"
    if call["name"] == "backward":
        return f"goes back for {call['of'] or 'a loss'} ({call['where']})"
    return f"calls {call['name']}{' of ' * bool(call['of'])}{call['of']} ({call['where']})"
