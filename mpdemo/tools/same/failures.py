"""Says why a world of several processes hangs or breaks off: which rank makes which call, and in which line."""

import ast
import itertools
import re
from pathlib import Path

from mpdemo.tools.same.finding import Finding

# a rank that waits in them has left the loop
AFTER = {"barrier", "monitored_barrier", "destroy_process_group"}
LEFT = ("Connection closed", "Connection reset", "closed by peer", "recvValue", "Broken pipe")
# of collectives, in gloo
MISFIT = ("EnforceNotMet", "op.preamble", "gloo/", "terminate called", "exit status -")
BATCH = re.compile(r"batch (\d+)")


def of_failure(many):
    """Return why a world of several has not come to its end, or nothing."""
    if many.how == "ended" and not many.error:
        return None if many.steps else Finding("fails with several", "no step of an optimizer is seen")
    error = many.error
    if error and not any(text in error for text in LEFT + MISFIT):
        return Finding("fails with several", error, many.error_line)
    return out_of_data(many) or other_calls(many) or left_early(many) or waiting(many)


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


def other_calls(many):
    """Return the first call of a rank where another makes another one."""
    sequences = [rank.of("call") for rank in many.ranks]
    for k, calls in enumerate(itertools.zip_longest(*sequences)):
        made = [(call["name"], call["of"]) if call else None for call in calls]
        if None in made:
            return None
        rank = next((number for number, call in enumerate(made) if call != made[0]), None)
        if rank:
            said = [f"rank {n} {doing(calls[n])}" for n in (0, rank)]
            same = made[0][0] == made[rank][0] == "backward"
            odd = 0 if made[0][0] != "backward" else rank  # a collective that only some make
            name = "a rank skips" if same else "collectives differ"
            more = len(many.ranks[odd].of("end of data")) > len(many.ranks[rank - odd].of("end of data"))
            if (
                more
                and made[rank - odd][0] == "backward"
                and has_left_loop(many, calls[odd], calls[rank - odd])
            ):
                what = f"rank {odd} has left the loop and {doing(calls[odd])}, rank {rank - odd} is still in it"
                return Finding("unequal steps", what, calls[rank - odd]["where"])
            return Finding(name, f"in call {k + 1}, {said[0]}, where {said[1]}", calls[odd]["where"])
    return None


def has_left_loop(many, call, backward) -> bool:
    """Whether a call is made after the loop in which another rank still goes back, by the lines of both."""
    pairs = zip(call["stack"][::-1], backward["stack"][::-1], strict=False)
    after, inside = next(((a, b) for a, b in pairs if a != b), ("", ""))
    (file, _, line), (other, _, within) = after.rpartition(":"), inside.rpartition(":")
    path = Path(many.order["cwd"]) / file
    if not file or file != other or not path.is_file():
        return False
    loops = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.For | ast.While)
    ]
    around = [loop for loop in loops if loop.lineno <= int(within) <= loop.end_lineno]
    return bool(around) and not around[-1].lineno <= int(line) <= around[-1].end_lineno


def doing(call) -> str:
    """Say what a rank does in a call."""
    what = (
        f"goes back for {call['of'] or 'a loss'}" if call["name"] == "backward" else f"calls {call['name']}"
    )
    shape = f" of {call['of']}" if call["of"] and call["name"] != "backward" else ""
    return f"{what}{shape} ({call['where']})"


def left_early(many):
    """Return whether a rank has ended while another waits for it."""
    ended = [rank for rank, status in many.statuses.items() if status == 0]
    if not ended or many.how == "ended" and not any(text in many.error for text in LEFT + MISFIT):
        return None
    other = next(rank for rank in range(many.processes) if rank not in ended)
    what = (
        f"rank {ended[0]} ends after {len(many.ranks[ended[0]].steps)} steps, and rank {other} waits for it"
    )
    last = many.ranks[other].of("call")
    return Finding("a rank leaves early", what, last[-1]["where"] if last else "")


def waiting(many):
    """Return where the ranks wait, or the error that is all there is."""
    if many.error:
        last = next((rank.of("call")[-1] for rank in many.ranks if rank.of("call")), None)
        what = f"{many.error}; the last call is {last['name']}" if last else many.error
        return Finding("fails with several", what, last["where"] if last else many.error_line)
    waits = [rank.waits(many.folder) for rank in many.ranks]
    where = ", ".join(f"rank {k} waits in {name} ({line})" for k, (name, line) in enumerate(waits) if line)
    what = f"nothing new for {many.order['limit']} s after {len(many.steps)} steps; {where}".removesuffix(
        "; "
    )
    names, line = (
        {name for name, _ in waits},
        next((line for _, line in waits if line), "").replace(" line ", ":"),
    )
    return Finding("a rank leaves early" if len(names) > 1 and names & AFTER else "hangs", what, line)
