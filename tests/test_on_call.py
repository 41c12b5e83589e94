"""On call: the faults fit the program, and exactly one chain of clues fits each recorded incident.

The recorded clues are real ones. By night every incident is recorded again, most also on a
throw-away Slurm.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path

import numpy as np
import psutil
import pytest

from mpdemo.cluster import Cluster
from mpdemo.errors import UserError
from mpdemo.labs.on_call import case as cases
from mpdemo.labs.on_call import clues, faults, record
from mpdemo.labs.on_call.incidents import CAUSES, COST, INCIDENTS, NEXT, PAR, fits, seal, unseal
from mpdemo.labs.on_call.job import Job
from mpdemo.paths import root

RECORDED = json.loads((Path(__file__).parent / "logs" / "on_call.json").read_text())  # by kind
ON_A_NODE, EVERYWHERE = ("split", "node_dies", "full", "xid79"), ("same_order", "requeue", "port")
ON_SLURM = [kind for kind in INCIDENTS if kind not in faults.ONLY_LOCAL]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPDEMO_ROOT", str(tmp_path))


def found(told):
    """Return the kind and the place of every chain that fits some clues."""
    fitting = [(kind, rank) for kind in INCIDENTS for rank in range(4) if fits(INCIDENTS[kind], told["clues"], rank)]
    return {(kind, place(kind, rank)) for kind, rank in fitting}


def place(kind, rank):
    """Return what a chain of this kind tells of a rank: itself, its node, or nothing."""
    return rank // 2 if kind in ON_A_NODE else 0 if kind in EVERYWHERE else rank


@pytest.mark.parametrize("kind", INCIDENTS)
def test_a_fault_and_its_disguise_fit_the_program(kind, monkeypatch):
    """Several programs of each incident, of which none says by its changes alone what is wrong."""
    monkeypatch.setattr(Job, "resume", lambda job: [(job.out / f"node{n}/step040.pt").touch() for n in (1, 2)])
    monkeypatch.setattr(faults.torch, "load", lambda file: {"model": {}})
    monkeypatch.setattr(faults.subprocess, "run", lambda *_, **__: None)
    incident = INCIDENTS[kind]
    assert incident.cause in CAUSES and incident.next in NEXT
    assert {*incident.also, *(name for name, *_ in incident.chain)} <= set(COST) - {"diff"}
    for seed in range(2):
        job = Job(np.random.default_rng(seed))
        try:
            assert getattr(faults, kind)(job) in cases.PLACES
            faults.disguise(job)
            compile(job.program, kind, "exec")
            assert clues.diff(job).count("@@ ") >= 3
        finally:
            job.close()


@pytest.mark.parametrize("kind", INCIDENTS)
def test_exactly_one_chain_fits_a_recorded_incident(kind):
    require_found(RECORDED[kind])


def require_found(told):
    rank = 0 if told["where"] == "rank 0" else told["rank"]
    assert found(told) == {(told["kind"], place(told["kind"], rank))}, told["clues"]


@pytest.mark.parametrize("page", ["requeued", "ended as", "has ended,", "stopped making", "hasn't begun"])
def test_par_is_the_best_order_of_questions_for_such_a_page(page):
    """Who asks knows all chains, sees the page, and stops at the first chain that is complete."""
    told = {kind: t["clues"] for kind, t in RECORDED.items() if page in t["page"]}
    if page == "ended as":
        told = {kind: said for kind, said in told.items() if "requeued" not in RECORDED[kind]["page"]}
    chains = {kind: {name for name, *_ in INCIDENTS[kind].chain} for kind in told}
    names = sorted(set().union(*chains.values()))

    def minutes(order, kind):
        asked = max(map(order.index, chains[kind]))
        return sum(COST[name][0] for name in order[: asked + 1])

    best = min(permutations(names), key=lambda order: sum(minutes(order, kind) for kind in told))
    assert told and {kind: minutes(best, kind) for kind in told} == {kind: PAR[kind] for kind in told}


@pytest.fixture
def case():
    return cases.Case(seal(RECORDED["early"] | {"dumps": {"0": "AAAA"}}))


RIGHT = {"cause": "uneven data", "then": "repair that rank's data, resume", "because": "files"}


def test_a_right_answer_is_scored_and_a_guess_is_not_below_par(case, capsys):
    where = RECORDED["early"]["where"]
    case.ask("files")
    assert "images (210, " in capsys.readouterr().out
    said = case.answer(where, **RIGHT)
    assert said.startswith("Right. 3.2 GPU hours lost on 64 GPUs. The best order of questions loses ")
    assert "score 100%" in said and f"{where} is at the barrier" in said
    for _ in range(3):
        case.ask("diff")
    assert f"score {PAR['early'] / 27:.0%}" in case.answer(where, **RIGHT)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"where": "node 1"}, "Wrong: where it is."),
        ({"cause": "a slow network"}, "Wrong: the cause."),
        ({"then": "resubmit as it is"}, "Wrong: what to do next."),
        ({"because": "gpu"}, "Wrong: the evidence, since gpu doesn't show this cause."),
    ],
)
def test_a_wrong_answer_says_which_part_is_wrong_and_costs_half_an_hour(changes, said, case):
    for clue in ("files", "gpu"):
        case.ask(clue)
    answer = case.answer(**{"where": RECORDED["early"]["where"], **RIGHT, **changes})
    assert answer.startswith(said) and case.minutes == 36


def test_what_nobody_asked_is_no_evidence_and_an_unknown_word_costs_nothing(case):
    with pytest.raises(UserError, match="because='files' is none of: nothing that you have asked for"):
        case.answer("rank 0", **RIGHT)
    with pytest.raises(UserError, match="no clue 'logs'; there are: log 1, "):
        case.ask("logs")
    with pytest.raises(UserError, match="where='rank 7' is none of: rank 0; "):
        case.answer("rank 7", **RIGHT)
    assert case.minutes == 0 and case.answer("rank 0") is ...


def test_neither_the_object_nor_what_is_sent_gives_the_incident_away(case):
    told = RECORDED["early"]
    shown = f"{case!r} {vars(type(case))} {[getattr(case, name) for name in case.__slots__]}"
    assert not any(secret in shown for secret in ("early", told["where"], "barrier", "210"))
    draws = {record.draw(number)[0] for number in range(200)}
    assert {kind for kind in INCIDENTS if kind not in faults.ONLY_SLURM} - {"full"} <= draws
    assert record.draw(1, slurm=True)[0] in ON_SLURM


def test_a_recorder_is_left_for_torchfrtrace(case, tmp_path):
    case.ask("recorder")
    assert (tmp_path / "runs/on_call/rank_0").read_bytes() == b"\0\0\0"


def test_a_real_incident_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    require_found(unseal(cases.recorded(4, slurm=False)))  # a bad sample
    assert not processes_in(tmp_path) and not list(tmp_path.glob("on-call-*"))


def test_a_job_whose_notebook_is_gone_ends(tmp_path):
    """The recording process is ended in the middle, as an interrupted cell ends it."""
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(root())}
    words = [sys.executable, "-m", "mpdemo.labs.on_call.record"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
    process.stdin.write(b'{"number": 1, "slurm": false}')
    process.stdin.close()
    deadline = time.monotonic() + 60
    while len(processes_in(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    assert not processes_in(tmp_path) and not list(tmp_path.glob("on-call-*"))


def processes_in(folder):
    """Return the processes whose command names a folder."""
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if str(folder) in " ".join(process.info["cmdline"] or [])]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind for kind in INCIDENTS if kind not in faults.ONLY_SLURM])
def test_the_clues_of_a_new_run_still_tell_what_it_is(kind):
    if kind == "full" and os.geteuid():
        pytest.skip("mounting a small disk takes root")
    require_found(record.record(kind, np.random.default_rng(time.time_ns())))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ON_SLURM)
def test_the_clues_of_a_job_of_slurm_tell_what_it_is(kind, slurm_programs):
    with Cluster.up(nodes=2, cpus=2, gpus=0) as cluster:
        require_found(record.record(kind, np.random.default_rng(time.time_ns()), cluster))
