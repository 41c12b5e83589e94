"""Test of a program in notebook 56: a stream with a shuffle buffer, resumed twice."""
# ruff: noqa: F821 - what the reader's program defines

import pickle
from itertools import count, islice

from checks.helpers import gathered

STOPS = 7, 16, 40  # after so many samples each rank stops
AHEAD = 400  # more than a buffer holds


def stream(opened):
    """Return a new stream; `opened` notes from which sample on it is read."""

    def read(first):
        opened.append(first)
        return count(first)

    return Shuffled(read)


def test_56_1(rank, n):
    whole, opened, got, state, at_once = list(islice(stream([]), STOPS[-1])), [], [], None, None
    both = sum(gathered(whole), [])
    twice = sorted({sample for sample in both if both.count(sample) > 1})
    assert not twice, (
        f"Without a stop, {len(twice)} samples come twice, such as {twice[0]}: which rank gets which?"
    )
    assert whole != sorted(whole), "It doesn't shuffle any more: the samples come in the stream's order."
    for life, stop in enumerate(STOPS):
        part, start, changes = stream(opened), len(got), state != at_once
        if life:
            part.load_state_dict(pickle.loads(state))
        samples = iter(part)
        got += islice(samples, stop - start)
        returned = part.state_dict()
        at_once, ahead = pickle.dumps(returned), list(islice(samples, AHEAD))
        state = pickle.dumps(returned)  # training has continued, as it does while a checkpoint is written
        if got == whole[:stop]:
            continue
        said = f"{('Started anew', 'After the first resume', 'After the second resume')[life]}, rank {rank}"
        assert not changes, (
            f"{said} gets other samples: what state_dict returned has changed while training continued."
        )
        again = sorted({*got[start:]} & {*got[:start]})
        assert not again, f"{said} gets sample {again[0]} again. What does the state count from?"
        lost = sorted({*whole} - {*got, *ahead})
        assert not lost, f"{said} never gets {lost}: they were in the buffer."
        twice = sorted(sample for sample in {*got} if [*got, *ahead].count(sample) > 1)
        assert not twice, f"{said} gets sample {twice[0]} twice: it was in the buffer, and is read again."
        first = [sample == other for sample, other in zip(got, whole, strict=False)].index(False)
        raise AssertionError(f"{said} gets {got[first]}, not {whole[first]}: another order.")
    far = f"It's right, but each resume reads the stream from sample {opened[2]} on: terabytes, in a real one."
    assert opened[2] > STOPS[1], far
