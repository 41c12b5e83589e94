"""Checks of notebook 04: what becomes smaller."""


def check_04_6(answer):
    accumulated, split = (set(text.lower()) - set(" ,;") for text in answer)
    assert "d" in accumulated, "Accumulation: a part of the batch has fewer images, so fewer outputs are kept."
    assert accumulated == {"d"}, "Accumulation: the whole model is still on the device, with gradients and state."
    for letter, name in {"a": "weights", "b": "gradients", "c": "optimizer's state", "d": "outputs"}.items():
        assert letter in split, f"Split: the {name} of the other device's layers are no longer here."
