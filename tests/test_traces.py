"""Traces of torch.profiler become one step of all ranks: what each computed, whom it waited for, what it stored."""

import gzip
import json
import math

import pytest

from mpdemo.errors import UserError
from mpdemo.measure import timeline, traces, transfers

MS = 1000.0  # of a trace's microseconds
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def span(name, start, end, cat="cpu_op", thread=1, **args):
    """Return a row of a trace; times in ms."""
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "tid": thread,
        "ts": start * MS,
        "dur": (end - start) * MS,
        "args": args,
    }


def memory(time, address, bytes_, device=0, total=0):
    args = {"Device Type": device, "Addr": address, "Bytes": bytes_, "Total Allocated": total}
    return {"ph": "i", "name": "[memory]", "ts": time * MS, "args": args}


def gloo(name, start, end, shape, ask=None, thread=7, **args):
    """Return what the thread that trains asked for, and what gloo's thread did."""
    asked = span(
        f"c10d::{name}", start if ask is None else ask, (start if ask is None else ask) + 0.01, **args
    )
    carried = {"allreduce_": "all_reduce", "_reduce_scatter_base_": "all_reduce", "recv_": "recv"}.get(
        name, name
    )
    dims = {"Input Dims": [shape], "Input type": ["c10::BFloat16"]}
    return [asked, span(f"gloo:{carried}", start, end, "user_annotation", thread, **dims)]


@pytest.fixture
def written(tmp_path):
    """A function that writes the rows of each rank into a file, and returns the pattern of their names."""

    def write(*ranks):
        for old in tmp_path.glob("trace-rank*"):
            old.unlink()
        for rank, rows in enumerate(ranks):
            trace = {"distributedInfo": {"rank": rank, "world_size": len(ranks)}, "traceEvents": rows}
            (tmp_path / f"trace-rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
        return str(tmp_path / "trace-rank*.json.gz")

    return write


def seen(step, rank, lane="compute"):
    rows = [row for row in step["events"] if row["rank"] == rank and row["lane"] == lane]
    return [(row["kind"], round(1e3 * row["start"], 2), round(1e3 * row["end"], 2)) for row in rows]


def waits(step, rank):
    rows = [row for row in timeline.waiting(step["events"]) if row["rank"] == rank]
    return [
        (row["kind"], row["on"], round(1e3 * row["start"], 2), round(1e3 * row["end"], 2)) for row in rows
    ]


def ddp(late):
    """A step of one rank whose forward pass takes `late` ms more; the bytes are reduced while it computes."""
    mark = "mpdemo: kind=F layer=3"
    return [
        span("ProfilerStep#5", 0, 30, "user_annotation"),
        span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 1, "user_annotation"),
        span(mark, 1, 5 + late, "user_annotation"),
        span("aten::mm", 2, 3, **{"Sequence number": 41}),
        span(BACKWARD, 5 + late, 10 + late, **{"Sequence number": 41}),
        span(BACKWARD, 10 + late, 15 + late),
        *gloo("allreduce_", 10 + late, 22, [8, 16]),
        span("Optimizer.step#AdamW.step", 22, 26, "user_annotation"),
    ]


def test_the_bytes_of_a_collective_move_once_the_last_rank_has_joined_and_until_then_the_others_wait_for_it(
    written,
):
    step = traces.read(written(ddp(0), ddp(6)))
    assert (step["ranks"], step["end"]) == (2, 0.03)
    assert seen(step, 0) == [("L", 0, 1), ("F", 1, 5), ("B", 5, 15), ("O", 22, 26)]
    assert seen(step, 1) == [("L", 0, 1), ("F", 1, 11), ("B", 11, 21), ("O", 22, 26)]
    assert [row.get("layer") for row in step["events"] if row["lane"] == "compute"] == 2 * [
        None,
        3,
        3,
        None,
    ]
    for rank, start in ((0, 0.01), (1, 0.016)):
        (row,) = (row for row in step["events"] if row["lane"] == "comm" and row["rank"] == rank)
        assert (row["kind"], row["start"], row["moves"], row["end"]) == ("A", start, 0.016, 0.022)
        assert row["bytes"] == 8 * 16 * 2 and row["group"] == "g0"
    assert waits(step, 0) == [("waits", 1, 15, 16), ("exposed", None, 16, 22)]
    assert waits(step, 1) == [("exposed", None, 21, 22)]


def test_all_reduces_that_two_threads_begin_in_another_order_than_asked_are_told_apart_by_their_sizes(
    written,
):
    def rank(first, second):
        small = gloo("allreduce_", first, 30, [4], ask=1, **{"Input Dims": [[[4]], []]})
        large = gloo("allreduce_", second, 29, [64], ask=2, thread=8, **{"Input Dims": [[[64]], []]})
        return [span("ProfilerStep#1", 0, 40, "user_annotation"), *small, *large]

    step = traces.read(written(rank(3, 4), rank(20, 5)))
    assert {row["bytes"]: row["moves"] for row in step["events"]} == {8: 0.02, 128: 0.005}


def test_of_several_steps_the_one_of_median_length_is_shown_and_with_memory_none_at_an_end(written):
    def rows(*more):
        steps = [(0, 10), (20, 24), (30, 36), (40, 48)]
        spans = [
            [span("ProfilerStep#1", *times, "user_annotation"), span("aten::mm", *times)] for times in steps
        ]
        return [row for pair in spans for row in pair] + [*more]

    step = traces.read(written(rows(), rows()))
    assert step["end"] == 0.006 and step["memory"] is None
    assert step["note"] == "From trace-rank0.json.gz and 1 more: of 4 steps the one of median length."
    assert traces.read(written(rows(memory(1, 1, 1))))["end"] == 0.004  # of the two in the middle


def test_a_thread_that_gathers_or_waits_for_a_tensor_computes_nothing(written):
    rows = [
        span("aten::mm", 0, 10),
        span("FSDP::all_gather (block.0)", 2, 4, "user_annotation"),
        span("_c10d_functional::wait_tensor", 6, 7),
        *gloo("_reduce_scatter_base_", 2, 4, [4]),
    ]
    step = traces.read(written(rows, rows))
    assert seen(step, 0) == [("F", 0, 2), ("F", 4, 6), ("F", 7, 10)]
    assert seen(step, 0, "comm") == [("R", 2, 4)]
    assert "gloo makes it of an all-reduce" in step["events"][1]["name"]


def test_a_message_is_one_event_of_the_rank_that_the_sender_names_and_its_receiver_waits(written):
    def send(to):
        return gloo("send", 4, 9, [2], **{"Concrete Inputs": ["", "", str(to), "0"]})

    def receive(source, start):
        return gloo("recv_", start, 9, [2], **{"Concrete Inputs": ["", "", str(source), "0"]})

    begin = [span("aten::mm", 0, 1)]
    step = traces.read(
        written([*begin, *send(2)], [*begin, *receive(2, 2)], [*begin, *receive(0, 1), *send(1)])
    )
    rows = [row for row in step["events"] if row["lane"] == "comm"]
    assert [(row["rank"], row["to"], row["bytes"]) for row in rows] == [(0, 2, 4), (2, 1, 4)]
    assert (rows[0]["posted"], rows[0]["start"], rows[0]["moves"], rows[0]["end"]) == (
        0.001,
        0.004,
        0.004,
        0.009,
    )
    assert waits(step, 1) == [("waits", 2, 2, 4), ("exposed", None, 4, 9)]
    alone = [[*begin, row] for row in (send(1)[1], receive(0, 2)[1])]  # without what c10d was asked for
    (row,) = (row for row in traces.read(written(*alone))["events"] if row["lane"] == "comm")
    assert (row["rank"], row["to"]) == (0, 1)


def test_on_gpus_a_kernel_belongs_to_the_operation_that_launched_it_and_nccls_kernels_name_their_group(
    written,
):
    def on_gpu(rank, late):
        pair = [0, 1] if rank < 2 else [2, 3]
        launches = [span("cudaLaunchKernel", at, at + 0.1, "cuda_runtime", thread, correlation=number)
                    for number, (at, thread) in enumerate([(0.2, 1), (1.2, 9), (2.2, 9), (3.2, 1)])]  # fmt: skip
        operations = [
            span("aten::mm", 0, 1),
            span(BACKWARD, 1, 2, thread=9),
            span("c10d::allreduce_", 2, 3, thread=9),
        ]
        operations += [span("Optimizer.step#SGD.step", 3, 4, "user_annotation")]
        told = {"Collective name": "allreduce", "In msg nelems": 10, "dtype": "BFloat16", "External id": 5}
        told |= {"Process Group Ranks": str(pair), "Process Group Name": "1"}
        told = [span("record_param_comms", 2, 3, thread=9, **told)]
        kernels = [
            (5, 7, "gemm"),
            (7, 9, "gemm"),
            (7.5 + late, 12, "ncclDevKernel_AllReduce_Sum_bf16"),
            (12, 13, "adam"),
        ]
        kernels = [span(name, *times, "kernel", 70 + rank, device=rank, correlation=number, **{"External id": 5})
                   for number, (*times, name) in enumerate(kernels)]  # fmt: skip
        return [*launches, *operations, *told, *kernels]

    step = traces.read(written(*(on_gpu(rank, late) for rank, late in enumerate((0, 2, 0, 0)))))
    assert seen(step, 0) == [("F", 0, 2), ("B", 2, 4), ("O", 7, 8)]  # from the first kernel on
    comm = [row for row in step["events"] if row["lane"] == "comm"]
    assert [(row["kind"], row["bytes"], row["moves"]) for row in comm] == 2 * [("A", 20, 0.0045)] + 2 * [
        ("A", 20, 0.0025)
    ]
    assert len({row["group"] for row in comm}) == 2
    assert waits(step, 0) == [("waits", 1, 4, 4.5), ("exposed", None, 4.5, 7)]


def test_memory_knows_gradients_by_what_outlives_the_backward_pass_and_fsdps_weights_by_its_spans(written):
    rows = [
        span("aten::mm", 0, 10),
        span("FSDP::all_gather (block.0)", 1, 2, "user_annotation"),
        span(BACKWARD, 10, 20),
        span("Optimizer.step#SGD.step", 20, 30, "user_annotation"),
        memory(1.5, 100, 64), memory(3, 200, 8), memory(4, 100, -64), memory(11, 300, 16), memory(12, 400, 2),
        memory(13, 200, -8), memory(13.5, 400, 2), memory(14, 400, -2),  # 400 was freed by a thread of gloo
    ]  # fmt: skip
    step = traces.read(written(rows))
    levels = [tuple(row[1:]) for row in step["memory"][0]]
    assert levels[:3] == [(64, 0, 0, 0), (64, 0, 0, 8), (0, 0, 0, 8)]
    assert (0, 0, 16, 10) in levels and levels[-1] == (0, 0, 16, 0)
    on_gpu = traces.read(
        written([span("aten::mm", 0, 10), memory(1, 7, 8, 1, total=108), memory(2, 8, 8, 0)])
    )
    assert on_gpu["memory"][0][-1] == [0.001, 0, 100, 0, 8] and on_gpu["parts"][1] == "there before"


def test_what_is_no_trace_or_not_of_all_ranks_is_refused_in_one_line(written, tmp_path):
    bad = tmp_path / "bad.json"
    for text in ("", "[]", '{"traceEvents": 3}', "\x1f\x8bnot gzip"):
        bad.write_text(text, encoding="latin-1")
        with pytest.raises(UserError, match=r"bad.json is no trace of torch.profiler") as refused:
            traces.read([bad])
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="no trace .*none"):
        traces.read(str(tmp_path / "none*.json"))
    written(ddp(0), ddp(0))
    with pytest.raises(UserError, match="traces of ranks 1 of 2; give one of each"):
        traces.read([tmp_path / "trace-rank1.json.gz"])
    one, two = tmp_path / "trace-rank0.json.gz", tmp_path / "of another run"
    written(ddp(0), ddp(0), ddp(0))
    (tmp_path / "trace-rank1.json.gz").rename(two)
    written(ddp(0), ddp(0))
    with pytest.raises(UserError, match="traces of ranks 0, 1 of 3; give one of each"):
        traces.read([one, two])
    step, other, day = ddp(0), span("ProfilerStep#900", 0, 30, "user_annotation"), 24 * 3600e3

    def later(rows, milliseconds):
        return [row | {"ts": row["ts"] + milliseconds * MS} for row in rows]

    for rank0, rank1, said in [
        (
            step,
            [other, *step[1:]],
            "begin with other steps: ProfilerStep#5, ProfilerStep#900; give traces of the",
        ),
        (step[:4], later(step[:4], day), "no time in common: they are of several runs"),
        (step, later(step, 20), "the traces' clocks differ"),
        (step, step[:4], "all-reduce number 1 of ranks 0, 1 has no like in all of their traces"),
        *(
            (
                step,
                [*step, span("aten::mm", time, 2)],
                "is no trace of torch.profiler .*'aten::mm' has no finite time",
            )
            for time in (math.nan, math.inf)
        ),
    ]:
        with pytest.raises(UserError, match=said):
            traces.read(written(rank0, rank1))


@pytest.mark.parametrize(
    ("text", "size", "ranks"),
    [
        ("[1, 3]", 2, (1, 3)),
        (f"[{', '.join(map(str, range(30)))}, ...]", 64, tuple(range(64))),
        (f"[{', '.join(map(str, range(1, 60, 2)))}, ...]", 32, tuple(range(1, 65, 2))),
    ],
)
def test_a_group_of_which_pytorch_writes_thirty_ranks_is_known_by_its_size(text, size, ranks):
    assert transfers.group_of(text, size, tuple(range(64))) == ranks


def test_a_large_group_that_is_no_range_is_refused():
    with pytest.raises(
        UserError, match="a group of 40 ranks is written as .*doesn't say who the others are"
    ):
        transfers.group_of("[0, 1, 5, ...]", 40, tuple(range(64)))


def test_a_trace_of_one_gpu_that_the_course_ships_is_read():
    step = traces.read(["notebooks/gpu/2026-11-27-h100-trace.json.gz"])
    seconds = {
        kind: sum(r["end"] - r["start"] for r in step["events"] if r["kind"] == kind) for kind in "FBO"
    }
    assert step["ranks"] == 1 and 1.5 < seconds["B"] / seconds["F"] < 3.5 and seconds["O"] > 0
