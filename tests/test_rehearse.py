"""rehearse.py: one rank alone exchanges, and stores, what it does beside real ones."""

import meshes
import pytest
import torch
from home_scripts import SCRIPTS, names_of
from meshes import rehearsed, run_mesh, world_of

from mpdemo.labs.layer_pictures import on_ranks
from mpdemo.labs.meshes import flags_of, sent

BY_NIGHT = ["shard2 cp2", "pp2 zbv", "pp2 tp2 --recompute", "replicate2 shard2", "pp2 cp2 interleaved"]


def same_as_real(folder, mesh):
    """Compare the calls of the first and the last rank, and their memory within 5 %, with those of real processes."""
    flags, world = [*flags_of(mesh)[0], "--width=128"], world_of(mesh)
    run_mesh(folder, flags, world, meshes.count_instead)
    for rank in (0, world - 1):
        peak, calls = torch.load(folder / f"counted-{rank}.pt")
        alone, own, _ = rehearsed(folder, flags, world, rank)
        print(
            f"{mesh}, rank {rank}: {len(calls)} calls, {sum(call[2] for call in calls)} bytes; peak {peak}, {alone}"
        )
        assert own == calls and len(calls) > (8 if "zbv" in mesh else 20)
        assert alone == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    ("collective", "ranks", "times"),
    [("allreduce", 4, 1.5), ("allgatherbase", 2, 0.5), ("reducescattertensor", 8, 7 / 8)]
    + [("send", 2, 1), ("alltoallsingle", 4, 1), ("send", 1, 0), ("allreduce", 1, 0)],
)
def test_in_a_ring_a_rank_sends_a_part_of_the_whole_tensor(collective, ranks, times):
    assert sent(collective, ranks) == times


def test_on_more_ranks_what_two_have_halved_shrinks_and_what_both_have_stays():
    two = {
        "one device": [{"MLP": 16, "norms": 8}],
        "tp": [{"MLP": 8, "norms": 8}],
        "recomputation": [{"MLP": 9}],
    }
    eight = on_ranks(two, 8, "tp", "recomputation")
    assert eight == {"tp": 2 * [{"MLP": 2, "norms": 8}], "recomputation": [{"MLP": 9}]}


def test_a_rank_alone_counts_what_four_real_ones_do(tmp_path):
    same_as_real(tmp_path, "pp2 tp2")


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", BY_NIGHT)
def test_a_rank_alone_counts_what_real_ones_do(tmp_path, mesh):
    same_as_real(tmp_path, mesh)


@pytest.mark.parametrize("ranks", [0, -1, 10_000_000])
def test_ranks_that_cannot_be_are_refused_in_one_line(monkeypatch, ranks):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=f"^--ranks {ranks}: 1 to 131072$"):
        names_of(SCRIPTS / "rehearse.py")["main"]([f"--ranks={ranks}", "--rank=0"])


# ten blocks of a stage are those of a model of 64 billion weights
@pytest.mark.parametrize("held", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_a_rank_of_a_thousand_holds_its_shards_of_its_blocks(tmp_path, held):
    flags = ["--pp=8", "--shard=16", "--tp=8", "--width=8192", f"--blocks={8 * held}", "--microbatches=8"]
    peak, calls, printed = rehearsed(tmp_path, flags, 1024, 517)
    assert "rank 517 of 1024 (pp 4, replicate 0, fsdp 0, tp 5): stages [4]" in printed
    weights = held * (12 * 8192**2 // 8 + 2 * 8192) // 16 * 4  # the blocks' share, in float32
    assert f"{6 * held} shards, {weights / 2**20:,.1f} MiB in all;" in printed and peak > 4 * weights
    gathered = [size for dimension, name, size in calls if (dimension, name) == ("fsdp", "allgather_base")]
    assert len(gathered) == held and sum(gathered) == 16 * weights
    assert sum(call[:2] == ("pp", "send") for call in calls) == 2 * 8
