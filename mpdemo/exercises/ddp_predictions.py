"""The checks of the predictions in notebooks/03_ddp.ipynb: numbers, orders and letters; the programs are in ddp.py."""

import re
from functools import partial

from mpdemo.exercises import answers
from mpdemo.exercises.check import exercise, require

TOLERANCE = 0.02  # relative
close = partial(answers.close, tolerance=TOLERANCE)


@exercise("03.1", expects="a list of two numbers")
def reduced_twice(answer):
    answer = [float(value) for value in answer]
    require(len(answer) == 2, f"The tensor has two numbers, and this answer has {len(answer)}.")
    require(
        answer != [3, 10], "That is the tensor after the first all-reduce. The second one adds up what then is there."
    )
    require(answer not in ([1.5, 5], [0.75, 2.5]), "An all-reduce adds up; it divides by nothing.")
    require(answer[1] != 5, "The 5 is the same on both ranks, and is added up like every other number.")
    require(answer == [6, 20], f"Write down both ranks' tensors before and after each all-reduce: not {answer}.")
    return "A sum that all ranks have is counted once per rank: so reduce a number once, and know who has done it."


@exercise("03.5", expects="a number (MiB)")
def sent_per_step(answer):
    model = 25_557_032 * 4 / 2**20
    mistakes = {
        model: "That is the size of the gradients. How often does a part of them travel?",
        2 * model: "That is 2, and not 2 (N - 1) / N, times the gradients: a rank keeps one of its own chunks.",
        7 / 8 * model: "That is one round. After the reduce-scatter comes the all-gather.",
        14 * model: "That would be every rank's whole tensor, sent to all others. The ring sends chunks.",
        14 / 8 * 25_557_032 * 4e-6: "That is in MB, of 1,000,000 bytes. A MiB has 1,048,576.",
        14 / 8 * model / 4: "A float32 has 4 bytes.",
    }
    answers.refuse_mistakes(answer, mistakes, TOLERANCE)
    require(
        close(answer, 14 / 8 * model), f"{answer} MiB is {answer / model:.2f} times the gradients. Count the chunks."
    )
    return "With 8,000 GPUs it would be 195 MiB: hardly more. So data parallelism scales, as far as volume counts."


@exercise("03.7", expects="a number and True or False, such as (5.0, True)")
def buffers(answer):
    value, equal = answer
    require(value != 5, "5.0 is what rank 1 had before. Which rank's buffers does the wrapper keep?")
    require(value != 2.5, "Nothing is averaged here: a broadcast hands on what one rank has.")
    require(value == 0, f"No rank had a running mean of {value}.")
    require(
        not equal,
        "Each rank's forward pass moves its running mean towards the mean of its *own* images, and these differ.",
    )
    return "Before a validation or a checkpoint somebody has to decide whose buffers count: rank 0's."


@exercise("03.10", expects="a whole number")
def images_seen(answer):
    require(answer != 12, "12 images are there. Do those of rank 0 change from epoch to epoch?")
    require(answer not in (60, 120), "That counts an image again in each epoch. How many *different* ones are there?")
    require(answer == 6, f"In one epoch rank 0 takes half of the images. Not {answer} different ones in ten epochs.")
    return "Each rank knows only its half, the mean of the gradients all: it trains, but with the same batches again."


@exercise("03.12", expects='a text of four letters, such as "abcd"')
def order_of_a_step(answer):
    word = re.sub(r"[\s,;>-]", "", "".join(answer).lower())
    require(sorted(word) == list("abcd"), f"{answer!r} does not hold each of the letters a, b, c and d once.")
    require(word[-1] == "d", "The optimizer needs all gradients, averaged: it comes last.")
    require(word.index("a") < word.index("b"), "The backward pass goes from the last layer to the first.")
    require(word.index("a") < word.index("c"), "A bucket cannot be averaged before a gradient is in it.")
    require(word == "acbd", "Then nothing would be sent during the backward pass. Why are there buckets?")
    return "The step waits for the last bucket only, that of the first layers."


@exercise("03.13", expects='a text of letters, such as "ad"')
def equal_to_one_device(answer):
    letters = answers.letters_of(answer, "abcd")
    require("d" not in letters, "d: between two averages each rank follows the gradients of its own images.")
    require("c" not in letters, "c: the loss of half of the images has another gradient.")
    require("a" in letters, "a is missing: the mean of the gradients of equal shares is that of the batch.")
    require("b" in letters, "b is missing: gradients add up, before the all-reduce as well as in it.")
    return "What is averaged, and how often, decides whether it is the same training."


@exercise("03.14", expects="two whole numbers, such as (64, 12)")
def shares_of_the_story(answer):
    images, steps = answer
    require(images != 64, "64 is the global batch, of both processes together.")
    require(images == 32, f"Two processes with {images} images each make a step of {2 * images}.")
    require(steps != 12, "Each process has half of the images, in batches of half the size.")
    require(steps != 48, "48 would be batches of 32 in all. The batch of both processes has 64.")
    require(steps == 24, f"{steps} steps of 64 images are {64 * steps} images; there are 1,536.")
    return "The same steps as on one device: that is why the losses can be compared step by step."


@exercise("03.15", expects="a number (ms)")
def waits_for_the_network(answer):
    whole = 14 / 8 * 25_557_032 * 4 * 8 / 10e9 * 1000
    require(not close(answer, whole), "That is the whole all-reduce. 80 ms of it can be hidden.")
    require(answer > 0, "The all-reduce takes longer than the 80 ms that hide it.")
    require(not close(answer, whole / 8), "A network of 10 Gbit/s carries 10,000,000,000 bits, and a byte has 8.")
    require(answer < whole, f"The all-reduce takes {whole:.0f} ms; a step cannot wait longer for it.")
    require(abs(answer - (whole - 80)) < 2, f"Bits to send / bits per second, less what is hidden: not {answer} ms.")
    return "With gradients in 16 bits and 100 Gbit/s it takes 7 ms, and hides completely."
