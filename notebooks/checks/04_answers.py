"""Checks of notebook 04: where to cut, and what becomes smaller."""

import operator


def check_04_2(cut_point):
    resnet18 = [9, 74, 74, 230, 295, 919, 1181, 3673, 4721, 5]
    for sizes in ([1, 1, 1, 1], [3, 1, 1, 1, 2, 2], [10, 1, 1, 1], [1, 1, 1, 10], resnet18):
        returned = cut_point(list(sizes))
        try:
            point = operator.index(returned)  # a tensor's as well
        except TypeError:
            raise AssertionError(f"For {sizes} it returns {returned!r}, which is no whole number.") from None
        assert 0 < point < len(sizes), f"For {sizes} it returns {point}: one of the two stages is empty."
        first, second = sum(sizes[:point]), sum(sizes[point:])
        best = min(max(sum(sizes[:n]), sum(sizes[n:])) for n in range(1, len(sizes)))
        stages = f"For {sizes} it returns {point}, which makes stages of {first} and {second}"
        assert max(first, second) == best, f"{stages}; another split point has a smaller largest stage."


def check_04_9(answer):
    accumulated, cut = (set(text.lower()) - set(" ,;") for text in answer)
    strange = (accumulated | cut) - set("abcd")
    assert not strange, f"{answer!r} holds a letter other than a, b, c, d."
    assert "d" in accumulated, "Accumulation: a part of the batch has fewer images, so fewer outputs are kept."
    whole = "Accumulation: the whole model is still on the device, with all that it has per weight."
    assert accumulated == {"d"}, whole
    for letter, name in {"a": "weights", "b": "gradients", "c": "optimizer's state"}.items():
        assert letter in cut, f"Cut: where are the {name} of the other device's layers?"
    assert "d" in cut, "Cut: a device keeps the outputs of its own layers only."
