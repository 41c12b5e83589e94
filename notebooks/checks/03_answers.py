"""Checks of notebook 03: a sampler, and the order of a step."""

import re


def check_03_9(share):
    def shares_of(world_size, epoch, images):
        return [[int(image) for image in share(rank, world_size, epoch, images)] for rank in range(world_size)]

    for images, ranks in ((12, 2), (12, 3), (13, 2)):
        shares, case = shares_of(ranks, 0, images), f"{images} images, {ranks} ranks"
        again = f"{case}: a second call for the same epoch gives another order. Which seed does it use?"
        assert shares == shares_of(ranks, 0, images), again
        lengths, taken = [len(own) for own in shares], sum(shares, [])
        assert len(set(lengths)) == 1, f"{case}: the ranks take {lengths} images. They must take equally many."
        twice = sorted(image for image in set(taken) if taken.count(image) > 1)
        assert not twice, f"{case}: image {twice[0]} is taken more than once."
        assert set(taken) <= set(range(images)), f"{case}: there is no image {max(taken, default=0)}."
        assert len(taken) > images - ranks, f"{case}: {images - len(taken)} images aren't taken by any rank."
    first, second = (shares_of(2, epoch, 100)[0] for epoch in (0, 1))
    unshuffled = list(range(0, 100, 2)), list(range(50))
    assert first not in unshuffled, "The images are in their original order: not shuffled."
    assert first != second, "Epoch 1 has the order of epoch 0."
    assert set(first) != set(second), "Rank 0 takes the same images in epoch 1, only in another order."


def check_03_12(answer):
    word = re.sub(r"[\s,;>-]", "", "".join(answer).lower())
    assert sorted(word) == list("abcd"), f"{answer!r} doesn't hold each of the letters a, b, c and d once."
    assert word[-1] == "d", "The optimizer needs all gradients, averaged: it comes last."
    assert word.index("a") < word.index("b"), "The backward pass goes from the last layer to the first."
    assert word.index("a") < word.index("c"), "A bucket can't be averaged before a gradient is in it."
    assert word == "acbd", "Then nothing would be sent during the backward pass. Why are there buckets?"
