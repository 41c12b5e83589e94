"""Check of notebook 74: numbers in one byte, with a scale for each block."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Undefined(TorchDispatchMode):
    """Notes whether an operation's result holds a number that is none, which int8 would hide."""

    found = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.found = self.found or bool(result.detach().isnan().any())
        return result


def check_74_2(in_blocks):
    numbers = torch.tensor([0.1, -0.2, 0.3, 0.25, 0.1, -0.2, 0.3, 25.4])
    small, scales = _answer(in_blocks, numbers)
    back = small.view(2, 4) * scales.view(2, 1)
    first = (back[0] - numbers[:4]).abs().max()
    assert first < 0.01, (
        f"0.1, -0.2, 0.3 and 0.25 come back as {_rounded(back[0])}: a block's scale must be its own."
    )
    worst = ((back - numbers.view(2, 4)).abs() / scales.view(2, 1)).max()
    assert worst <= 0.501, (
        "A number is off by more than half a scale: round, instead of cutting digits off."
    )
    with Undefined() as undefined:
        small, scales = _answer(in_blocks, torch.zeros(8))
    assert not undefined.found, "A block of zeros gives 0 / 0, which is no number: what is its scale?"
    back = small.view(2, 4) * scales.view(2, 1)
    assert torch.equal(back, torch.zeros(2, 4)), (
        f"Blocks of zeros come back as {_rounded(back[0])}: what is their scale?"
    )
    small, scales = _answer(in_blocks, torch.tensor([-4.0, 1.0, 2.0, 3.0] * 2))
    assert small.min() >= -127 and (scales > 0).all(), (
        "Where a block's largest number is negative, scale or numbers are wrong: take its size, without sign."
    )
    assert abs(small.view(-1)[0] * scales.view(-1)[0] + 4) < 0.01, (
        f"-4 comes back as {small.view(-1)[0] * scales.view(-1)[0]:.2f}: the largest may be a negative number."
    )


def _answer(in_blocks, numbers):
    small, scales = in_blocks(numbers.clone(), 4)
    assert small.dtype == torch.int8, f"The numbers have type {small.dtype}, not torch.int8."
    assert small.numel() == 8 and scales.numel() == 2, (
        f"8 numbers in blocks of 4 need 8 numbers and 2 scales, not {small.numel()} and {scales.numel()}."
    )
    return small, scales


def _rounded(row):
    return [round(number, 3) for number in row.tolist()]
