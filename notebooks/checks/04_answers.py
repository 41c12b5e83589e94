"""Checks of notebook 04: where to cut, and what becomes smaller."""


def check_04_6(answer):
    accumulated, cut = (set(text.lower()) - set(" ,;") for text in answer)
    strange = (accumulated | cut) - set("abcd")
    assert not strange, f"{answer!r} holds a letter other than a, b, c, d."
    assert "d" in accumulated, "Accumulation: a part of the batch has fewer images, so fewer outputs are kept."
    whole = "Accumulation: the whole model is still on the device, with all that it has per weight."
    assert accumulated == {"d"}, whole
    for letter, name in {"a": "weights", "b": "gradients", "c": "optimizer's state"}.items():
        assert letter in cut, f"Cut: where are the {name} of the other device's layers?"
    assert "d" in cut, "Cut: a device keeps the outputs of its own layers only."
