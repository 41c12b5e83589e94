"""The checks of notebooks/04_model_parallel.ipynb: moves, cuts, send and receive, memory, the idle device."""

import operator

from mpdemo.exercises import model_parallel_ranks as ranks
from mpdemo.exercises.answers import close, letters_of, refuse_mistakes
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.gradients import MISSING
from mpdemo.exercises.run import run_on_ranks

MIB, GIB = 2**20, 2**30
TOLERANCE = 0.02  # relative


def require_gradients(results):
    """Require every rank's gradients to be those of one process; a result is {name: ratio}, see `ratios`."""
    for rank, ratios in enumerate(results):
        for name, ratio in ratios.items():
            whose = f"the gradient of {name} on rank {rank}"
            require(ratio != MISSING, f"There is none: {whose} is still None after the step.")
            require(ratio is not None, f"The step ends, but {whose} has another direction than that of one process.")
            require(close(ratio, 1, 1e-3), f"The step ends, but {whose} is {ratio:.2f} times the right one.")


@exercise("04.1", expects="a program that defines train_step(first, second, devices, images, labels)")
def moves_between_devices(path):
    (result,) = run_on_ranks(path, ranks.drive_moves, processes=1, seconds=40)  # it waits for nobody
    require(not result["error"], f"On two different devices PyTorch refuses the step: {result['error']}.")
    require(not result["moved"], f"Now the weights of the {result['moved']} stage are on the other device.")
    require(result["device"], "It returns no loss.")
    require(result["device"] != "cpu:0", "It runs, and the loss is on device 0: so the outputs were sent back there.")
    require_gradients([result["ratios"]])
    return "One move forward, one for the labels; autograd makes the move of the gradient."


@exercise("04.2", expects="a function cut_point(sizes) that returns a whole number")
def cut_point(function):
    resnet18 = [9, 74, 74, 230, 295, 919, 1181, 3673, 4721, 5]
    for sizes in ([1, 1, 1, 1], [3, 1, 1, 1, 2, 2], [10, 1, 1, 1], [1, 1, 1, 10], resnet18):
        returned = function(list(sizes))
        try:
            point = operator.index(returned)  # that of a tensor, too
        except TypeError:
            raise Wrong(f"For {sizes} it returns {returned!r}, which is no whole number.") from None
        require(0 < point < len(sizes), f"For {sizes} it returns {point}: one of the two stages is empty.")
        first, second = sum(sizes[:point]), sum(sizes[point:])
        best = min(max(sum(sizes[:n]), sum(sizes[n:])) for n in range(1, len(sizes)))
        stages = f"For {sizes} it returns {point}, which makes stages of {first} and {second}"
        require(max(first, second) == best, f"{stages}; another cut has a smaller larger stage.")
    return "With bytes as sizes it balances memory, with seconds it balances time: notebook 05 does that."


@exercise("04.3", expects="a number (MiB)")
def bytes_over_the_boundary(answer):
    right = 2 * 64 * 16 * 192 * 4 / MIB
    mistakes = {
        right / 2: "That is the way forward. What comes back?",
        right / 4: "A float32 has 4 bytes.",
        right / 8: "A float32 has 4 bytes, and something comes back.",
        right / 64: "That is one image. How many are in the batch?",
        right / 16: "That is one token of each image. An image has 16.",
        right * MIB: "That is in bytes, and not in MiB.",
        right * MIB / 1e6: "That is in MB, of 1,000,000 bytes. A MiB has 1,048,576.",
        3_572_362 * 4 / MIB: "Those are the weights of the whole model. They stay where they are.",
    }
    refuse_mistakes(answer, mistakes, TOLERANCE)
    require(close(answer, right, TOLERANCE), f"{answer} MiB do not come out: images x tokens x width x bytes.")
    return "Two processes with DDP would send 13.6 MiB each: a cut model sends little, but everything waits for it."


@exercise("04.4", expects='letters in one text, such as "ab"')
def who_has_a_gradient(answer):
    letters = letters_of(answer, "abc")
    require("c" not in letters, "c: rank 1's backward pass would have to run in another process.")
    require("b" not in letters, "b: `torch.empty` made this tensor, and nobody asked autograd to watch it.")
    require("a" in letters, "a is missing: these weights took part in the forward pass on this very rank.")
    return "So the received tensor has to ask for a gradient, and somebody has to send this gradient back."


@exercise("04.5", expects="a program that defines train_step(stage, images, labels, rank)")
def send_and_receive(path):
    results = run_on_ranks(path, ranks.drive_step)
    for rank, result in enumerate(results):
        sent = result["sent"]
        require(sent, f"Rank {rank} sends nothing.")
        what = ("activations (8, 4)", "gradient of the activations (8, 4)")[rank]
        require(sent[0] == [8, 4], f"Rank {rank} sends a tensor of shape {sent[0]}, and not the {what}.")
        require(len(sent) == 1, f"In one step rank {rank} sends {len(sent)} tensors. One is enough.")
    require(results[1]["loss"] is not None, "Rank 1 returns no loss.")
    require_gradients([result["ratios"] for result in results])
    right, loss = results[1]["right_loss"], results[1]["loss"]
    require(close(loss, right, 1e-4), f"The gradients are right, but rank 1 returns the loss {loss:.3f}.")
    return "The gradients are those of one process. This is all of model parallelism: two messages and a backward pass."


@exercise("04.6", expects="a program that defines train_step(stage, images, rank, world_size)")
def step_hangs(path):
    require_gradients(run_on_ranks(path, ranks.drive_chain, processes=3))
    return (
        "It ran with three stages. For a stage boundary one rule holds: while one side receives, the other one sends."
    )


@exercise("04.7", expects="a program that defines loader(dataset, batch_size, rank, world_size)")
def labels_of_other_images(path):
    first, second = run_on_ranks(path, ranks.drive_loader)
    sizes = {len(batch) for batch in first + second}
    require(len(first) == len(second), f"Rank 0 makes {len(first)} steps and rank 1 makes {len(second)}: one waits.")
    for step, (images, labels) in enumerate(zip(first, second, strict=True)):
        problem = f"In step {step} rank 0 computes on the images {images}, and rank 1 has the labels of {labels}."
        require(images == labels, problem)
    require(sizes == {4}, f"With batch_size=4 a step has {min(sizes)} images: here the ranks do not share the batch.")
    require(sorted(sum(first[:3], [])) == list(range(12)), "An epoch does not hold each of the 12 images once.")
    require(first[0] != [0, 1, 2, 3], "The images are in their first order: not mixed.")
    require(
        first[:3] != first[3:], "The second epoch has the order of the first: nobody calls `set_epoch` on this loader."
    )
    return "A cut model needs the same batch on its first and its last rank; data parallelism needs another on each."


@exercise("04.8", expects="a number (GiB)")
def memory_of_a_stage(answer):
    right = 2e9 / 4 * 16 / GIB
    mistakes = {
        right * 4: "That is the whole model. It is cut over 4 devices.",
        right / 4: "Those are the weights alone.",
        right / 2: "That is right without the optimizer's state, two more numbers per parameter.",
        right * 3 / 4: "AdamW keeps two numbers per parameter, beside the weight and its gradient.",
        right * GIB / 1e9: "That is in GB, of 10^9 bytes. A GiB has 2^30.",
    }
    refuse_mistakes(answer, mistakes, TOLERANCE)
    require(close(answer, right, TOLERANCE), f"{answer} GiB do not come out: parameters of a stage x bytes each.")
    return "All of it, 29.8 GiB, would need a GPU of more than 24 GiB before the first image comes."


@exercise("04.9", expects='two texts, such as ("ab", "cd")')
def what_becomes_smaller(answer):
    accumulated, cut = (letters_of(text, "abcd") for text in answer)
    require("d" in accumulated, "Accumulation: a part of the batch has fewer images, and fewer outputs are kept.")
    require(not accumulated & set("abc"), "Accumulation: the whole model is still on the device, with all that it has "
            "per weight.")  # fmt: skip
    missing = {"a": "weights", "b": "gradients", "c": "optimizer's state"}
    for letter, name in missing.items():
        require(letter in cut, f"Cut: where are the {name} of the other device's layers?")
    require("d" in cut, "Cut: a device keeps the outputs of its own layers only.")
    return "First accumulate, it needs no second device. Cut where weights, gradients and optimizer are too large."


@exercise("04.10", expects="a list of three times True or False")
def who_computes_when(answer):
    forward, backward, update = (bool(value) for value in answer)
    require(not forward, "First: what would rank 1 compute on, before rank 0 has sent the activations?")
    require(not backward, "Second: rank 0's backward pass begins with the gradient that rank 1 has not sent yet.")
    require(
        update, "Third: when rank 1 has sent the gradient, its own gradients are complete. Whom should it wait for?"
    )
    return "Only the optimizer's steps overlap with something: a small gain, and the only one."


@exercise("04.11", expects="two numbers, such as (1.5, 2.5)")
def bound_of_the_speed_up(answer):
    two, four = answer
    require((two, four) != (2, 4), "So much faster would be devices that all compute at the same time.")
    require((two, four) != (0.5, 0.25), "Those are the shares of the time in which a device is busy.")
    require(two >= 1 and four >= 1, "Slower than one device? The same work is done, and messages take no time here.")
    require(two <= 1, f"{two} times as fast with 2 devices: which two operations run at the same time?")
    require(four <= 1, f"{four} times as fast with 4 devices: which two operations run at the same time?")
    return "More devices make room, and no speed: for that they have to work at the same time (notebook 05)."


@exercise("04.12", expects="a number (ms)")
def balanced_and_naive(answer):
    require(answer != 30, "That would be so if the slower stage set the pace. Here the stages take turns.")
    require(answer != 60, "60 ms is what one stage takes. The step has both, one after the other.")
    require(answer == 0, f"{answer} ms: add up the stages before the move, and after it.")
    return "So cut a naive model for its memory. As soon as stages work at the same time, equal times are what counts."
