"""Test of the program in notebook 61, which hangs until it is repaired."""
# ruff: noqa: F821 - what the reader's program defines


def test_61_2(rank, n):
    """The mean loss first rises in epoch 5. Rank 1's own rises in epoch 3, and rank 0's never."""
    losses = ((1.0, 0.5, 0.4, 0.3, 0.2, 0.1), (1.0, 0.9, 0.95, 0.6, 0.9, 0.1))[rank]
    epochs, best = train(losses, n)
    assert epochs != 3, (
        f"Rank {rank} stops after epoch 3, where only rank 1's own loss rises. The mean falls."
    )
    assert epochs != 6, (
        f"Rank {rank} trains all 6 epochs. The mean loss rises in epoch 5, although rank 0's falls."
    )
    assert epochs == 5, (
        f"Rank {rank} returns {epochs} epochs. The mean loss falls up to epoch 4 and rises in epoch 5."
    )
    best = round(float(best), 4)
    assert best != 0.9, f"Rank {rank} returns 0.9 as the best mean of two ranks: that is a sum."
    assert best == 0.45, f"Rank {rank} returns {best} as the best mean loss, and it is 0.45, in epoch 4."
