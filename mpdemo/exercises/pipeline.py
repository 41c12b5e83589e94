"""The checks of notebooks/05_pipeline.ipynb: microbatches, the bubble, schedules and their memory, cuts."""

from itertools import pairwise

from mpdemo.errors import UserError, error_line
from mpdemo.exercises import pipeline_commands as commands  # noqa: F401 - it enters 05.8 and 05.13
from mpdemo.exercises import pipeline_ranks as ranks
from mpdemo.exercises.answers import close, refuse_mistakes
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.gradients import MISSING, ratio_of_all
from mpdemo.exercises.run import run_on_ranks
from mpdemo.plan import bubble, simulate
from mpdemo.plan.own_order import simulate_order

TOLERANCE = 0.005  # relative
COSTS = [4, 2, 2, 3, 1, 1, 5, 2]  # ms, of the blocks of exercise 05.12


@exercise("05.1", expects="a function step(first, second, loss_fn, images, labels, microbatches)")
def microbatch_loop(answer):
    from torch import nn

    sizes = {"first": [], "second": []}
    for microbatches in (3, 4):
        first, second, images, labels = ranks.two_stages()
        for name, stage in (("first", first), ("second", second)):
            stage.register_forward_hook(lambda _, inputs, __, name=name: sizes[name].append(len(inputs[0])))
        try:
            answer(first, second, nn.functional.cross_entropy, images, labels, microbatches)
        except (RuntimeError, TypeError) as error:
            raise Wrong(f"With {microbatches} microbatches it fails: {error_line(error)}.") from None
        for name, number, stage in (("first", 0, first), ("second", 1, second)):
            wanted = [12 // microbatches] * microbatches
            seen, sizes[name] = sizes[name], []
            require(
                seen == wanted, f"With {microbatches} microbatches stage {number} computed batches of {seen} images."
            )
            factor = ratio_of_all([parameter.grad for parameter in stage.parameters()], ranks.whole_batch(number))
            _judge(factor, microbatches, f"With {microbatches} microbatches, on stage {number},")
    return "One process did all of it, one thing after the other: it is a pipeline's arithmetic, without its speed."


def _judge(factor, microbatches, when):
    """Refuse gradients that are not those of the whole batch."""
    require(factor != MISSING, f"{when} a weight has no gradient.")
    require(factor is not None, f"{when} the gradients do not even point where those of the whole batch do.")
    require(
        not close(factor, microbatches, TOLERANCE),
        f"{when} the gradients are {factor:.0f} times those of the whole batch. Its loss is a mean.",
    )
    require(close(factor, 1, TOLERANCE), f"{when} the gradients are {factor:.2f} times those of the whole batch.")


def _judge_last_stage(path):
    """Run a program of the last stage; refuse it where a rank ends with other gradients."""
    for rank, factor in enumerate(run_on_ranks(path, ranks.drive_stages)):
        _judge(factor, ranks.MICROBATCHES, f"With {ranks.MICROBATCHES} microbatches, on rank {rank},")


@exercise("05.2", expects="a program that defines last_stage(stage, labels, microbatches)")
def forgets_to_divide(path):
    _judge_last_stage(path)
    return (
        "Nothing had failed before, with gradients M times as large. For SGD that is a learning rate M times as large; "
        "AdamW hides it, and clipping by norm does not."
    )


@exercise("05.3", expects="a share, such as 0.4")
def bubble_of_four(answer):
    mistakes = {
        3 / 8: "That is the idle time as a share of the *busy* time. The bubble is a share of the whole step.",
        4 / 11: "Four devices, and a device waits for how many others?",
        3 / 12: "A step is as long as M + P - 1 microbatches take on one device.",
        7 / 11: "That has P and M in each other's places.",
        8 / 11: "That is the busy share.",
    }
    refuse_mistakes(answer, mistakes, TOLERANCE)
    require(0 < answer < 1, f"A share of the time lies between 0 and 1, and {answer} does not.")
    right = bubble.idle_share("gpipe", 4, 8)
    require(
        abs(answer - right) < 0.005,
        f"With an idle share of {answer}, a step would be as long as {3 / answer:.1f} microbatches on one device.",
    )
    return "So four devices with eight microbatches are at most 2.9 times as fast as one."


@exercise("05.4", expects="a whole number")
def microbatches_for_a_small_bubble(answer):
    require(answer == int(answer) and answer > 0, f"{answer} is no number of microbatches.")
    share = bubble.idle_share("gpipe", 8, int(answer))
    require(answer != 133, "Then exactly 5 % are idle, which is not under 5 %.")
    require(share < 0.05, f"With {answer} microbatches {share:.1%} are idle.")
    fewer = bubble.idle_share("gpipe", 8, int(answer) - 1)
    require(fewer >= 0.05, f"With one microbatch fewer it is under 5 % as well: {fewer:.2%}.")
    return "A batch has to have that many images at least: long pipelines need large batches."


@exercise("05.5", expects="two whole numbers, such as (3, 5): GPipe, 1F1B")
def held_by_rank_zero(answer):
    gpipe, one_f_one_b = answer
    right = [max(simulate(name, [1] * 4, [2] * 4, 8, 4).peak_activations) for name in ("gpipe", "1f1b")]
    require((gpipe, one_f_one_b) != tuple(reversed(right)), "These are the right numbers in the wrong order.")
    require(gpipe == right[0], f"GPipe does no backward pass before its last forward pass: {gpipe} is not its number.")
    require(one_f_one_b != 8, "8 would need all forward passes first. When does 1F1B begin its first backward pass?")
    require(
        one_f_one_b != 1,
        "1 is right for the last rank. Rank 0 must wait until microbatch 0 comes back, and forwards others meanwhile.",
    )
    require(one_f_one_b != 3, "3 have left rank 0 before microbatch 0 is at the last rank. One more fits in.")
    require(
        one_f_one_b == right[1],
        f"With {one_f_one_b} rank 0 would not be busy, or would forward too much: see the rule.",
    )
    return "With 1F1B the number does not depend on M: more microbatches even need less memory, as each is smaller."


@exercise("05.6", expects='three lists of operations, such as [["F0", "B0"], ["F0", "B0"], ["F0", "B0"]]')
def own_order(answer):
    require(len(answer) == 3, f"There are three stages, and this answer has {len(answer)} lists.")
    try:
        rows = simulate_order(answer)
    except UserError as error:
        message = str(error)
        raise Wrong(message[0].upper() + message[1:] + ".") from None
    count = 1 + max(row["microbatch"] for row in rows)
    require(count == 4, f"There are four microbatches, and this order has {count}.")
    for stage, (limit, most) in enumerate(zip((3, 2, 1), _peaks(rows), strict=True)):
        require(most <= limit, f"It runs, and stage {stage} holds {most} microbatches; it has memory for {limit}.")
    step = max(row["end"] for row in rows)
    require(step <= 18, f"It runs and fits, and takes {step:g} units. 1F1B takes 18.")
    return "This is 1F1B, or as good as it. Draw it with the next cell."


def _peaks(rows) -> list[int]:
    """Return the most microbatches that each stage holds, from its operations in their order."""
    peaks = []
    for stage in range(1 + max(row["stage"] for row in rows)):
        microbatches = peak = 0
        for row in (row for row in rows if row["stage"] == stage):
            microbatches += 1 if row["kind"] == "F" else -1
            peak = max(peak, microbatches)
        peaks.append(peak)
    return peaks


@exercise("05.7", expects="a program that defines last_stage(stage, labels, microbatches)")
def hangs(path):
    _judge_last_stage(path)
    return (
        "Two orders that are each sensible do not always fit together. The library posts its messages without waiting."
    )


@exercise("05.9", expects="two whole numbers, such as (2, 6): one stage per rank, two stages per rank")
def messages_forward(answer):
    one, two = answer
    require((one, two) != (4, 8), "The last stage sends its output to nobody.")
    require((one, two) != (3, 6), "Two stages per rank are 8 stages in a row. How many boundaries lie between them?")
    require(one == 3, f"Four stages in a row do not have {one} boundaries.")
    require(two == 7, f"With two stages per rank, a microbatch crosses not {two} stage boundaries.")
    return "More than twice the messages halve the idle time: interleaving wants a fast connection."


@exercise("05.10", expects="a number, such as 1.5")
def most_of_the_story(answer):
    mistakes = {
        2: "2 would be without any bubble.",
        1.6: "1.6 is 1F1B with one stage per rank. Interleaving shortens the bubble.",
        1 / 9: "That is the idle share. How many times as fast as one device are two that work the rest of the time?",
        8 / 9: "That is the busy share of *each* device.",
        1.5: "A first microbatch reaches the second rank after a quarter of the model, not after half of it.",
    }
    refuse_mistakes(answer, mistakes, TOLERANCE)
    right = bubble.speedup("interleaved-1f1b", 2, 4, 2)
    require(abs(answer - right) < 0.02, f"A speed-up of {answer} means an idle share of {1 - answer / 2:.0%}.")
    return "The measured bound may be lower: the real stages are not quite equal, and the optimizer's step is added."


@exercise("05.11", expects="a whole number: 1, 2, 4, 8, 16 or 32")
def best_split(answer):
    times = {count: (count + 1) * (100 / count + 2) for count in (1, 2, 4, 8, 16, 32)}
    require(answer in times, f"The batch of 64 is cut into 1, 2, 4, 8, 16 or 32 microbatches, not {answer}.")
    best = min(times, key=times.get)
    reason = "the bubble is still large" if answer < best else "the fixed costs add up"
    require(answer == best, f"With {answer} a step takes {times[answer]:.1f} ms, and it can be shorter: {reason}.")
    return "With a fixed cost of half a millisecond it would be 16. It depends on model and device: measure it."


@exercise("05.12", expects="a list of two whole numbers: the first block of stage 1 and of stage 2")
def choose_the_cut(answer):
    points = [int(point) for point in answer]
    require(len(points) == 2, f"Three stages need two cuts, and this answer has {len(points)}.")
    edges = [0, *points, len(COSTS)]
    require(all(start < stop for start, stop in pairwise(edges)), f"The cut {points} leaves a stage without a block.")
    sums = [sum(COSTS[start:stop]) for start, stop in pairwise(edges)]
    require(
        max(sums) <= 7,
        f"The stages take {', '.join(map(str, sums))} ms. A slowest stage of less than {max(sums)} ms is possible.",
    )
    return "The stages take 6, 7 and 7 ms, and have 2, 4 and 2 blocks: equal numbers of blocks are not equal stages."
