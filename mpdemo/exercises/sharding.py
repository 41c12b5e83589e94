"""The checks of notebooks/07_sharding.ipynb: what a device stores, who gathers what, layers split inside, bytes."""

from mpdemo.exercises import sharding_ranks as ranks
from mpdemo.exercises.answers import close, refuse_mistakes
from mpdemo.exercises.check import exercise, require
from mpdemo.exercises.gradients import MISSING
from mpdemo.exercises.run import run_on_ranks

HALVES = ["reduce_scatter_tensor", "all_gather_into_tensor"]


@exercise("07.1", expects="two numbers of GB, such as (100, 50)")
def stored_by_a_device(answer):
    copied, sharded = answer
    mistakes = {
        112e9 / 2**30: "That is in GiB, of 2**30 bytes. A GB has 10**9.",
        28: "This is the weights alone. What else does a device keep from step to step?",
        56: "Weights and gradients: and the optimizer's two numbers for each weight?",
        84: "Weights and the optimizer's states: and the gradients?",
        14: "In DDP every device has the whole model, with all that belongs to it.",
    }
    refuse_mistakes(copied, mistakes)
    require(close(copied, 112), f"{copied} GB with DDP: how many numbers of 4 bytes belong to one weight?")
    mistakes = {
        14e9 / 2**30: "That is in GiB, of 2**30 bytes. A GB has 10**9.",
        112: "Nothing of it is stored twice now: all devices together hold it once.",
        28 / 8 + 84: "Not only the weights are shared out, also what belongs to them.",
        28 + 84 / 8: "The weights are shared out as well; they are gathered only for a moment.",
    }
    refuse_mistakes(sharded, mistakes)
    require(close(sharded, 14), f"{sharded} GB with sharding: 112 GB are shared by how many devices?")
    return "A GPU of 80 GB cannot hold 112 GB. Eight hold it together, 14 GB each, with much room for activations."


@exercise("07.2", expects="a program that defines all_reduce(tensor, world_size)")
def all_reduce_of_two_halves(path):
    results = run_on_ranks(path, ranks.drive_all_reduce, processes=3)
    for rank, result in enumerate(results):
        other = sorted(set(result["collectives"]) - set(HALVES))
        require(not other, f"Rank {rank} calls {', '.join(other)}: use {' and '.join(HALVES)}.")
        value = [round(number) for number in result["value"]]
        own = [number * 10**rank for number in range(1, 7)]
        require(value != own, f"Rank {rank} still has its own numbers: the result must go into the tensor itself.")
        where = f"On rank {rank} the tensor is {value}"
        require(value != [number * 37 for number in range(1, 7)], f"{where}: this is the mean, an all-reduce adds up.")
        require(value == [number * 111 for number in range(1, 7)], f"{where}, which is not the sum over all ranks.")
        unused = [name for name in HALVES if name not in result["collectives"]]
        require(not unused, f"It is the sum, and rank {rank} does not call {' and '.join(unused)}.")
    return "Two collectives, each with half of the work: FSDP uses the first for gradients, the second for weights."


@exercise("07.3", expects="a program that defines gradient(rows, images, targets, world_size)")
def gradient_of_own_rows(path):
    for rank, result in enumerate(run_on_ranks(path, ranks.drive_gradient)):
        where, used = f"On rank {rank}", result["collectives"]
        require(
            {"all_gather", "all_gather_into_tensor"} & set(used),
            f"{where} the weight is never gathered from all ranks.",
        )
        require(result["shape"] is not None, f"{where} no tensor is returned.")
        shape = tuple(result["shape"])
        require(shape != (ranks.ROWS, 4), f"{where} the whole gradient is returned: a rank keeps that of its rows.")
        require(shape == (ranks.ROWS // 2, 4), f"{where} the gradient has the shape {shape}, and the rows another one.")
        factor = result["factor"]
        mixed = "It is not that of the whole batch: whose images, and which rows are in it?"
        require(factor is not None, f"{where} the gradient has another direction. {mixed}")
        require(not close(factor, 2), f"{where} the gradient is the sum over the ranks; the loss is a mean.")
        require(close(factor, 1), f"{where} the gradient is {factor:.2f} times that of the whole batch.")
        require("all_reduce" not in used, f"{where} an all-reduce brings all rows, to keep some: use reduce-scatter.")
    return "This is FSDP for one layer. The library does it for a block at a time, while another one computes."


@exercise("07.4", expects="a program that defines prepare(model, mesh)")
def prepared_for_training(path):
    (result, *_) = run_on_ranks(path, ranks.drive_prepare)
    require(any(result["blocks"]) or result["model"], "Nothing is sharded: every rank still has the whole model.")
    moved = "After a step no weight has changed: the optimizer holds tensors that the model no longer uses."
    require(any(result["moved"]), moved)
    require(all(result["moved"]), "After a step some of the weights have not changed: who trains them?")
    at_once = "The blocks are gathered all at once, so each rank holds the whole model in every step."
    require(all(result["blocks"]), at_once)
    alone = "Each block is a root of its own, and by default a root keeps its gathered weights after the forward pass."
    require(result["model"], alone)
    return "First the blocks, then the model, then the optimizer. None of the mistakes raises an error."


@exercise("07.5", expects="two shapes, such as ((10, 20), (20, 10))")
def shapes_of_parts(answer):
    columns, rows = (tuple(shape) for shape in answer)
    whole = {(768, 192), (192, 768)}
    require(not {columns, rows} & whole, "One of these is a whole weight: each device holds a half.")
    require(columns != (192, 384), "PyTorch stores a weight as outputs x inputs.")
    require(columns != (768, 96), "These are all outputs, of half of the inputs: this is the split by rows.")
    require(columns == (384, 192), f"{columns} is no half of a weight of 768 outputs x 192 inputs.")
    require(rows != (96, 768), "This is half of the outputs. The first layer left only half of the inputs here.")
    require(rows == (192, 384), f"{rows} is no half of a weight of 192 outputs x 768 inputs.")
    return "Half of the outputs of the first are half of the inputs of the second: between them nothing is sent."


@exercise("07.6", expects="a program that defines mlp(x, up, up_bias, down, down_bias)")
def mlp_in_two_parts(path):
    for rank, result in enumerate(run_on_ranks(path, ranks.drive_mlp)):
        where = f"On rank {rank}"
        require("output" in result, f"{where} the output has the shape {result.get('shape')}, and not that of x.")
        factor = result["output"]
        require(result["forward"], f"{where} nothing is added up: each rank has the sum over its own inputs alone.")
        apart = "is not that of one device. Is every bias in it, and once?"
        require(factor is not None and close(factor, 1, 1e-3), f"{where} the output {apart}")
        require(result["forward"] == 1, f"{where} the forward pass has {result['forward']} all-reduces; one is enough.")
        for name, value in result["gradients"].items():
            gradient = f"{where} the gradient of {name}"
            require(value != MISSING, f"{gradient} is missing.")
            half = "of this rank's half of the hidden layer alone" if name == "x" else "not that of one device"
            require(value is not None, f"{gradient} is {half}.")
            require(close(value, 1, 1e-3), f"{gradient} is {value:.2f} times that of one device.")
        require(result["backward"] == 1, f"{where} the backward pass has {result['backward']} all-reduces, not one.")
    return "One all-reduce forward, one backward, however large the hidden layer is."


@exercise("07.7", expects="a list of numbers, such as [3, 5]")
def devices_for_six_heads(answer):
    numbers = sorted(answer)
    require(4 not in numbers and 5 not in numbers, "A head computes as a whole: it cannot lie on two devices.")
    require(numbers == [2, 3, 6], f"With {numbers}, is one missing or too many? Six heads, equally many for each.")
    return "This bounds tensor parallelism: not more devices than heads. Large models have 32 to 128."


@exercise("07.8", expects="two numbers, such as (2.5, 0.5)")
def times_the_bytes_of_ddp(answer):
    always, never = answer
    require(not close(always, 3), "Compare with an all-reduce: it is worth two of the three.")
    require(not close(always, 1), "The weights are gathered for the forward pass, and once more for the backward pass.")
    require(not close(always, 2), "An all-gather moves half as much as an all-reduce, not as much.")
    require(close(always, 1.5), f"{always}: an all-gather or a reduce-scatter is worth half an all-reduce.")
    require(not close(never, 1.5), "If the weights stay whole, what is saved in the backward pass?")
    require(close(never, 1), f"{never}: one all-gather and one reduce-scatter make which collective?")
    return "Half as much again, for a part of the memory. Where the weights may stay, sharding the rest costs nothing."


@exercise("07.9", expects="a number of MB, such as 12.5")
def megabytes_of_tensor_parallelism(answer):
    once = 64 * 16 * 192 * 4 / 1e6  # MB: the activations of a batch, between two layers
    mistakes = {
        once: "This is one message. How many does a block have, forward and backward, and how many blocks?",
        8 * once: "Not all of it. Is there one all-reduce in a block, and has a number one byte?",
        4 * once: "This is one block: the model has eight.",
        16 * once: "Not all of it: both parts of a block count, both passes, and every device has the whole batch.",
        32 * once * 1e6 / 2**20: "That is in MiB, of 1,048,576 bytes. A MB has 1,000,000.",
        64 * once: "Two devices in a ring: each sends a tensor of an all-reduce once, in two halves.",
    }
    refuse_mistakes(answer, mistakes)
    require(close(answer, 32 * once), f"{answer} MB: batch x tokens x width x 4 bytes, times how many all-reduces?")
    return "More than DDP's 14.3 MB, and the next layer waits for each message: it wants devices of one node."
