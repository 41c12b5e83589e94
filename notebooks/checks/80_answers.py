"""Checks of notebook 80: the reader's script, run as it is, must fit, stay the same training, and waste little."""

from functools import cache

from checks.own_job import text_of
from checks.own_runs import FOUND, judged, losses, run


@cache
def found():
    """What the script that you found prints, and what it does."""
    printed, (seen, *_) = run(FOUND, 1)
    return losses(printed), seen


def check_80_1(script):
    (_, was), (printed, (noted, *_)) = found(), run(script, 1)
    assert losses(printed), "It prints no loss any more."
    for name in ("parameters", "tokens", "steps"):
        changed = (
            f"With one process it has {noted[name]:,} {name}, and the script that you found {was[name]:,}."
        )
        assert noted[name] == was[name], f"{changed} Only how it computes may change, not what."
    before, now = (seen["losses"] / seen["backwards"] for seen in (was, noted))
    changed = (
        f"With one process its mean loss is {now:.4f}, and the script that you found has {before:.4f}."
    )
    assert abs(now - before) < 0.1, f"{changed} Only how it computes may change, not what."
    assert "--bf16" in text_of(script), "It has no option --bf16 yet."
    seen = run(script, 2, "--bf16")[1][0]
    whole, stored = seen["parameters"], seen["stored"]
    assert stored < 0.6 * whole, (
        f"Each of two ranks stores {stored:,} of {whole:,} parameters: nothing is sharded."
    )
    built = f"Each rank builds all {whole:,} parameters before it shards them. With --size wanted that's 26 GB a rank"
    assert seen.get("built", 0) < whole, f"{built} on the host: build the model under torch.device('meta')."
    once = "FSDP gathers all of the model at once: 26 GB in float32, beside the activations."
    assert seen["units"] > 1, f"Only the whole model is wrapped. {once}"
    assert not seen.get("low"), (
        "With --bf16 the optimizer's own weights are bf16, which rounds small updates away."
    )
    types = " and ".join(seen["types"])
    assert "bfloat16" in seen["types"], f"With --bf16 its Linears still compute in {types}."
    assert seen.get("recomputed"), (
        "The backward pass recomputes nothing: each layer still keeps its activations."
    )


def check_80_2(script):
    judged(script, "--strict", "--batches=4")
    _, (_, other) = run(script, 2)
    assert not losses(other["printed"]), "Both processes print losses: let only rank 0 print."


def check_80_3(script):
    printed, seen = run(script, 2)
    steps, noted = seen[0]["steps"], seen[0]
    assert len(losses(printed)) > 1, "It prints no losses any more: read them seldom, but read them."
    assert not noted.get("collected"), (
        f"In {steps} steps it still calls gc.collect() {noted['collected']} times."
    )
    emptied = f"In {steps} steps it still calls torch.cuda.empty_cache() {noted.get('emptied')} times"
    assert not noted.get("emptied"), (
        f"{emptied}: it waits for the GPU, and the next step asks for the memory again."
    )
    assert noted["opened"] < 2, f"It still opens text.txt in {noted['opened']} of {steps} steps."
    every = f"It still reads a number of the device in {noted['reads']} of {steps} steps"
    assert noted["reads"] <= steps // 4, (
        f"{every}: a GPU waits there for Python, and then has nothing to do."
    )
    first, now = found()[0], losses(printed)
    both = f"{', '.join(map(str, now[:4]))}, and the script that you found {', '.join(map(str, first))}"
    same = len(now) == len(first) and all(abs(a - b) < 0.1 for a, b in zip(first, now, strict=True))
    assert same, f"It prints the losses {both}: the running mean takes in the loss of every step."
