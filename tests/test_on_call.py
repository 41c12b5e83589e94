"""On call: the faults fit the program, and exactly one chain of clues fits each recorded incident.

The recorded clues are real ones. By night every incident is recorded again, most also on a
throw-away Slurm.
"""

import base64
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from project import python_path
from worker_jobs import came, processes_in

from mpdemo.errors import UserError
from mpdemo.labs.on_call import case as cases
from mpdemo.labs.on_call import clues, faults, record
from mpdemo.labs.on_call.incidents import (
    COST,
    INCIDENTS,
    NEXT,
    OLDER,
    PLACES,
    answer_to,
    causes_of,
    filled,
    seal,
    unseal,
)
from mpdemo.labs.on_call.job import Job
from mpdemo.paths import root

RECORDED = json.loads((Path(__file__).parent / "logs" / "on_call.json").read_text())  # by kind


def each(pattern, text, kind=float):
    """Return what a pattern finds at each of the four ranks; an empty list if it finds fewer or more."""
    found = [kind(value) for value in re.findall(pattern, text, re.M)]
    return found if len(found) == 4 else []


def above(values, rank, factor):
    """Whether the rank's value is more than `factor` times each other's."""
    return bool(values) and all(
        values[rank] > factor * value for i, value in enumerate(values) if i != rank
    )


def column(name, factor):
    """The rank's number in this column of the times is `factor` times each other's."""
    return lambda text, rank: above(each(rf"^rank .*{name} ([\d.]+|nan)", text), rank, factor)


def slow_computer(text, rank):
    """The rank computes longer than each other, and its own all-reduce is the shortest: the others wait for it."""
    waited, steps = each(r"^rank .*all-reduce ([\d.]+) ms", text), each(r"^rank \d: (\d+) steps", text, int)
    ran = bool(waited and steps) and min(steps) >= 20
    return ran and waited[rank] == min(waited) and column("compute", 1.4)(text, rank)


def latest(text, rank):
    """The rank comes last in most collectives."""
    return above(each(r"in (\d+)%", text), rank, 1.5)


def waits(where):
    """The others wait in a collective of the loop, and the rank's own stack holds `where`."""

    def test(text, rank):
        rows = dict(re.findall(r"^rank (\d): (.*)", text, re.M))  # of the second dump
        waiting = [
            re.search(r"all_reduce.*(average|train)", row) for i, row in rows.items() if int(i) != rank
        ]
        return all(waiting) and bool(re.search(where, rows[str(rank)]))

    return test


def fewer(text, rank):
    """The rank has the fewest images."""
    found = each(r"train-\d.npz: .*images \((\d+)", text, int)
    return bool(found) and all(found[rank] < number for i, number in enumerate(found) if i != rank)


def first_nan(text, rank):
    """In some step the rank alone has no number."""
    rows = re.findall(r"^step \d+: (.*)", text, re.M)
    return [rank] in [[int(i) for i in re.findall(r"rank (\d) (?:nan|inf)", row)] for row in rows]


def repeated(text, rank):
    """Epochs 0 and 1 begin alike on all ranks."""
    orders = re.findall(r"epoch 0 (\[.*?\]), epoch 1 (\[.*?\])", text)
    return len(orders) == 4 and all(one == other for one, other in orders)


def behind(text, rank):
    """In the first steps the loss of both ranks of the node is above both of the other's."""
    means = each(r"rank \d ([\d.]+|nan)", text.rpartition("mean of the first")[2])
    mine, other = (means[:2], means[2:]) if rank < 2 else (means[2:], means[:2])
    return bool(means) and min(mine) > 1.5 * max(other)


def parted(text, rank):
    """The two ranks of a node have equal weights, and those of the other node have others."""
    norms = each(r"norm\^2 (\S+)", text, str)
    return bool(norms) and norms[0] == norms[1] != norms[2] == norms[3] and "nan" not in norms


SHOWS = {  # what a clue's text must be: a pattern for this rank, or a function of the text and the rank
    ("early", "stacks"): waits("barrier"),
    ("early", "files"): fewer,
    ("alone", "stacks"): waits("evaluate"),
    ("straggler", "times"): slow_computer,
    ("straggler", "recorder"): latest,
    ("loader", "times"): column("load", 4),
    ("loader", "files"): r"train-{r}\.npz: .*256, 256",
    ("bad_sample", "losses"): first_nan,
    ("split", "weights"): parted,
    ("split", "losses"): behind,
    ("requeue", "log"): r"FloatingPointError: step 41: loss nan",
    ("requeue", "files"): r"step040.*weights nan",
    ("swapped", "stacks"): waits("^broadcast"),
    ("same_order", "order"): repeated,
    ("node_dies", "state"): r"rank {a}: no answer; rank {b}: no answer(?s:.*)node{n} down",
    ("node_dies", "files"): r"node{n}/saving\.tmp",
    ("full", "log"): r"{a}: (RuntimeError|OSError): .*(iostream error|unexpected pos|No space left)",
    ("full", "node"): r"node {n}: own disk 100% used, 0 MB",
    ("port", "log"): r"{r}: .*EADDRINUSE",
    ("frozen", "stacks"): waits("no answer: its process is there"),
    ("frozen", "node"): r"rank {r} stands still",
    ("xid31", "state"): r"rank {r}: exit code -6",
    ("xid31", "gpu"): r"Xid .*: 31,",
    ("xid79", "gpu"): r"node {n}, dmesg:\n.*Xid .*: 79,",
}


def found(told):
    """Return the kind and the place of every chain that fits some clues."""
    fitting = ((kind, rank) for kind in INCIDENTS for rank in range(4) if fits(kind, told["clues"], rank))
    return {place(*one) for one in fitting}


def fits(kind, clues, rank):
    """Whether every clue of an incident's chain shows it, if the fault is at this rank (or its node)."""
    tests = [(test, clues[clue]) for (of, clue), test in SHOWS.items() if of == kind]
    return all(
        test(text, rank) if callable(test) else re.search(filled(test, rank), text) for test, text in tests
    )


@pytest.mark.parametrize("kind", INCIDENTS)
def test_a_fault_and_its_disguise_fit_the_program(kind, monkeypatch):
    """Several programs of each incident, of which none says by its changes alone what is wrong."""
    monkeypatch.setattr(
        Job, "resume", lambda job: [(job.out / f"node{n}/step040.pt").touch() for n in (1, 2)]
    )
    monkeypatch.setattr(faults.torch, "load", lambda file: {"model": {}})
    monkeypatch.setattr(faults.subprocess, "run", lambda *_, **__: None)
    incident = INCIDENTS[kind]
    assert incident.then in NEXT and set(answer_to(kind, 3).where) <= set(sum(PLACES, ()))
    assert answer_to(kind, 3).evidence <= set(COST) - {"diff"}
    for seed in range(2):
        job = Job(np.random.default_rng(seed))
        try:
            getattr(faults, kind)(job)
            faults.disguise(job)
            compile(job.program, kind, "exec")
            assert clues.diff(job).count("@@ ") >= 3
        finally:
            job.close()


@pytest.mark.parametrize("kind", INCIDENTS)
def test_exactly_one_chain_fits_a_recorded_incident(kind):
    require_found(RECORDED[kind])


def require_found(told):
    assert found(told) == {place(told["kind"], told["rank"])}, told["clues"]


def place(kind, rank) -> tuple:
    """Return an incident and where it is."""
    return kind, answer_to(kind, rank).where[0]


@pytest.mark.parametrize("kind", INCIDENTS)
def test_a_page_has_six_causes_and_the_incident_is_one_of_them(kind):
    causes = causes_of(kind)
    assert len(set(causes)) == 6 and INCIDENTS[kind].cause in causes
    assert INCIDENTS[kind].page in RECORDED[kind]["page"]


@pytest.fixture
def case():
    entries = [{"collective_seq_id": number, "profiling_name": "nccl:all_reduce"} for number in range(1, 9)]
    dump = base64.b64encode(pickle.dumps({"entries": entries})).decode()
    return cases.Case(seal(RECORDED["early"] | {"dumps": {"0": dump}}))


RIGHT = {"cause": "uneven data", "then": "repair that rank's data, resume", "because": "files"}


def test_a_right_answer_says_what_was_spent_and_on_what(case, capsys):
    where = f"rank {RECORDED['early']['rank']}"
    case.ask("files")
    assert "images (210, " in capsys.readouterr().out
    said = case.answer(where, **RIGHT)
    assert said.startswith("Right. You spent 3 min (files 3), or 3.2 GPU hours of 64 GPUs. stacks: ")
    assert f"{where} is at the barrier" in said
    for clue in "order", "weights", "diff", "diff":
        case.ask(clue)
    assert "(0 min, 20 in all)\n" in capsys.readouterr().out  # what was asked before costs nothing
    case.answer("rank 0", **RIGHT)
    bill = "50 min (files 3, order 4, weights 5, diff 8, wrong answers 30), or 53.3 GPU hours"
    assert bill in case.answer(where, **RIGHT)
    with pytest.raises(UserError, match="because='log' is none of: files; order; weights; diff$"):
        case.answer(where, **{**RIGHT, "because": "log"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"where": "rank 0"}, "Wrong: where it is. "),
        ({"where": "node 1"}, "Wrong: where it is, since a rank is meant. "),
        ({"cause": "a slow network"}, "Wrong: the cause. "),
        ({"then": "resubmit as it is"}, "Wrong: what to do next."),
        ({"because": "gpu"}, "Wrong: the evidence, since gpu doesn't show this cause."),
    ],
)
def test_a_wrong_answer_says_which_part_is_wrong_and_costs_half_an_hour(changes, said, case):
    for clue in ("files", "gpu"):
        case.ask(clue)
    answer = case.answer(**{"where": f"rank {RECORDED['early']['rank']}", **RIGHT, **changes})
    assert answer.startswith(said) and case.minutes == 36


def test_the_words_for_a_place_say_when_a_node_is_meant(capsys):
    case = cases.Case(seal(RECORDED["split"]))
    case.choices("where")
    assert "node 1, node 2: a machine and its disk" in capsys.readouterr().out
    case.ask("files")
    answer = case.answer("all ranks", "different checkpoints", OLDER, "files")
    assert answer.startswith("Wrong: where it is, since a node is meant. ")
    for of in "clue", "cause", "then":
        case.choices(of)
    said = capsys.readouterr().out
    assert "weights  5 min: " in said and "slow loading" in said and "a full disk" not in said
    with pytest.raises(UserError, match="^no choices of 'clues'; there are: clue, where, cause, then$"):
        case.choices("clues")


def test_what_nobody_asked_is_no_evidence_and_an_unknown_word_costs_nothing(case):
    with pytest.raises(UserError, match="because='files' is none of: nothing that you have asked for"):
        case.answer("rank 0", **RIGHT)
    with pytest.raises(UserError, match="no clue 'logs'; there are: log, "):
        case.ask("logs")
    with pytest.raises(UserError, match="where='rank 7' is none of: rank 0; "):
        case.answer("rank 7", **RIGHT)
    assert case.minutes == 0 and case.answer("rank 0") is ...


def test_neither_the_object_nor_what_is_sent_gives_the_incident_away(case):
    told = RECORDED["early"]
    shown = f"{case!r} {vars(type(case))} {[getattr(case, name) for name in case.__slots__]}"
    assert not any(secret in shown for secret in ("early", f"rank {told['rank']}", "barrier", "210"))
    draws = {record.draw(number)[0] for number in range(200)}
    assert INCIDENTS.keys() - {"full"} <= draws


def test_the_last_collectives_are_drawn_from_the_recorders(case):
    with pytest.raises(UserError, match=r'who_waits .*; do: case.ask\("recorder"\)$'):
        case.who_waits()
    case.ask("recorder")
    said = "Collectives 4 to 8 of each rank. rank 0 waits in number 8, all_reduce."
    assert case.who_waits()._repr_mimebundle_()[1]["image/png"]["alt"] == said
    for most in 0, 1e9, float("nan"), [1]:
        with pytest.raises(UserError, match="^most=.* is not allowed; allowed: 1 to 40 collectives$"):
            case.who_waits(most)


def test_a_real_incident_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    require_found(unseal(cases.recorded(4)))  # a bad sample
    assert not processes_in(tmp_path) and not list(tmp_path.glob("on-call-*"))


def test_a_job_whose_notebook_is_gone_ends(tmp_path):
    """The recording process is ended in the middle, as an interrupted cell ends it."""
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": python_path(root())}
    words = [sys.executable, "-m", "mpdemo.labs.on_call.record"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
    process.stdin.write(b'{"number": 1}')
    process.stdin.close()
    came(lambda: len(processes_in(tmp_path)) >= 4, 60)
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    assert not processes_in(tmp_path) and not list(tmp_path.glob("on-call-*"))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", INCIDENTS)
def test_the_clues_of_a_new_run_still_tell_what_it_is(kind):
    if kind == "full" and os.geteuid():
        pytest.skip("mounting a small disk takes root")
    require_found(record.record(kind, np.random.default_rng(time.time_ns())))
