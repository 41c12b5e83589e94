"""Check of notebook 70: how many sequences fit on a GPU."""

MODELS = {  # what is told of it: its arguments, and how many fit on each GPU
    "our model on eight GPUs": ((8_055_492_608, 40, 4096, 4096, 8), 2),
    "our model on 64 GPUs": ((8_055_492_608, 40, 4096, 4096, 64), 3),
    "1.3 billion parameters on one GPU": ((1_300_000_000, 24, 2048, 2048, 1), 15),
    "70 billion parameters on eight GPUs, whose shards need 130 GiB": (
        (70_000_000_000, 80, 8192, 1024, 8),
        0,
    ),
}


def check_70_2(sequences):
    for told, (arguments, right) in MODELS.items():
        number = sequences(*arguments)
        assert number == right, f"For {told}, {right} fit on each GPU, not {number}.{_why(number, right)}"
    assert (number := sequences(*MODELS["our model on eight GPUs"][0], room=20)) == 1, (
        f"If 20 GiB are to stay free, 1 fits on each of eight GPUs, not {number}."
    )


def _why(number, right):
    if number < 0:
        return " Fewer than none is no answer."
    if number > 2 * right:
        return " Activations aren't divided by the GPUs, and shards that don't fit leave room for none."
    return (
        " Only whole sequences count."
        if number != int(number)
        else " Who shares what, and what stays free?"
    )
