"""The checks of the programs of notebooks/03_ddp.ipynb: collectives, averaged gradients, the sampler, the script."""

from mpdemo.exercises import ddp_ranks as ranks
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.ddp_predictions import close  # the module enters the other exercises of 03
from mpdemo.exercises.run import run_on_ranks


@exercise("03.2", expects="a program that defines mean(tensor, rank, world_size)")
def mean_by_send_and_recv(path):
    results = run_on_ranks(path, ranks.drive_mean, processes=3)
    used = results[0]["collectives"]
    require(not used, f"It calls dist.{used and used[0]}. The task is to do it with send and recv only.")
    for rank, result in enumerate(results):
        value = result["value"]
        require(value is not None, f"Rank {rank} returns no tensor.")
        require(value != [18.0, 30.0], f"Rank {rank} has the sum {value} of the three tensors; nobody divided it.")
        own = value == [1.0 + 3 * rank**2, 10.0]
        require(not own, f"Rank {rank} returns its own tensor {value}: nothing came back to it.")
        require(value == [6.0, 10.0], f"Of [1, 10], [4, 10] and [13, 10], rank {rank} makes the mean {value}.")
    most = max(result["sent"] for result in results)
    return f"The busiest rank sent {most} tensors, and received as many. With 100 ranks that would be a bottleneck."


@exercise("03.3", expects="a program that defines report(loss, rank, world_size)")
def report_hangs(path):
    first, second = run_on_ranks(path, ranks.drive_report)
    value = first["value"]
    asked = first["reduced"] or (value is not None and close(value, 1.5))  # send and recv do, too
    require(asked, "It hangs no more, but no sum is made: rank 0 reports without asking rank 1.")
    require(value is not None, "Rank 0 now returns nothing.")
    require(value != 3.0, "Rank 0 returns 3.0, the sum of the losses 1 and 2.")
    require(close(value, 1.5), f"Of the losses 1 and 2 rank 0 makes {value}.")
    require(second["value"] is None, "Rank 1 reports too: every line would stand in the log once per rank.")
    return "Every rank calls the collective; only what is done with the result may depend on the rank."


@exercise("03.4", expects="a program that defines shift and reduce_scatter(chunks, rank, world_size)")
def ring_reduce_scatter(path):
    results = run_on_ranks(path, ranks.drive_ring, processes=3)
    used = results[0]["collectives"]
    require(not used, f"It calls dist.{used and used[0]}. The task is to build it from shift.")
    numbers = [result["number"] for result in results]
    for rank, number in enumerate(numbers):
        require(number in (0, 1, 2), f"Rank {rank} returns {number}, not the number of one of its three chunks.")
    for rank, result in enumerate(results):
        missing, double = result["missing"], result["double"]
        where = f"In chunk {result['number']} of rank {rank}"
        require(not double, f"{where} the numbers of rank {double and double[0]} are counted more than once.")
        require(not missing, f"{where} the numbers of rank {missing and missing[0]} are missing.")
        require(result["right"], f"{where} is not the sum over all ranks of that chunk.")
    require(len(set(numbers)) == 3, f"The complete chunks are {numbers}: together the ranks do not have all three.")
    sent = max(result["sent"] for result in results)
    require(sent <= 2, f"It is right, and a rank sends {sent:g} chunks. Two steps with one chunk each are enough.")
    return "Each of the 3 ranks sent 2 of its 3 chunks. Two more steps hand the complete ones round: an all-reduce."


@exercise("03.6", expects="a program that defines average_gradients(model, world_size)")
def forgets_to_divide(path):
    rows = run_on_ranks(path, ranks.drive_average)
    for name in rows[0]:
        ratios = [row[name] for row in rows]
        require(None not in ratios, f"The gradient of {name} on one rank is still that of its own share.")
        ratio = ratios[0]
        require(not close(ratio, 2), f"The gradient of {name} is 2 times that of the whole batch. Two ranks took part.")
        require(not close(ratio, 0.5), f"The gradient of {name} is half of that of the whole batch: divided twice?")
        require(all(close(ratio, 1) for ratio in ratios), f"The gradient of {name} is {ratio:.2f} times the right one.")
    return "A forgotten division is a learning rate N times as large: it may even train, and worse with every device."


@exercise("03.8", expects="a program that defines accumulate(ddp, parts)")
def no_sync(path):
    rows = run_on_ranks(path, ranks.drive_accumulate)
    calls, right, other = (rows[0][name] for name in ("calls", "ratio", "equal"))
    require(calls != 3, "The gradients are all-reduced in each of the 3 parts: 2 of these are for nothing.")
    require(calls != 0, "DDP makes no all-reduce: every backward pass runs inside no_sync.")
    require(calls == 1, f"There are {calls} all-reduces.")
    require(other, "There is one all-reduce, but of the wrong part: what was added after it differs between the ranks.")
    require(not close(right, 3), "The gradients are 3 times those of the whole batch: one loss per part, 3 parts.")
    require(close(right, 1), f"The gradients are {right:.2f} times those of the whole batch.")
    return "With 3 parts the volume per image is a third: accumulation also helps where the network is slow."


@exercise("03.9", expects="a function share(rank, world_size, epoch, images)")
def sampler(function):
    def share(*arguments):
        return [int(image) for image in function(*arguments)]  # they may be tensors

    for images, world_size in ((12, 2), (12, 3), (13, 2)):
        shares = [share(rank, world_size, 0, images) for rank in range(world_size)]
        case = f"{images} images, {world_size} ranks"
        require(shares == [share(rank, world_size, 0, images) for rank in range(world_size)],
                f"{case}: a second call for the same epoch gives another order. Which seed does it use?")  # fmt: skip
        lengths, taken = [len(own) for own in shares], sum(shares, [])
        require(len(set(lengths)) == 1, f"{case}: the ranks take {lengths} images. They must take equally many.")
        twice = sorted(image for image in set(taken) if taken.count(image) > 1)
        require(not twice, f"{case}: image {twice and twice[0]} is taken more than once.")
        require(set(taken) <= set(range(images)), f"{case}: there is no image {max(taken, default=0)}.")
        require(len(taken) > images - world_size, f"{case}: {images - len(taken)} images are taken by no rank.")
    orders = [share(0, 2, epoch, 100) for epoch in (0, 1)]
    require(
        orders[0] not in (list(range(0, 100, 2)), list(range(50))), "The images are in their first order: not mixed."
    )
    require(orders[0] != orders[1], "Epoch 1 has the order of epoch 0.")
    require(set(orders[0]) != set(orders[1]), "Rank 0 takes the same images in epoch 1, only in another order.")
    return "Nobody handed the images out: each rank computed its own share, from numbers that all ranks know."


@exercise("03.11", expects="a program that defines batches(images, batch_size, epochs)")
def same_images_everywhere(path):
    require_shared_epochs(run_on_ranks(path, ranks.drive_batches), images=12, batch_size=4)
    return "None of the three mistakes gave an error. Count the images of an epoch, once, in every new program."


def require_shared_epochs(batches, images, batch_size):
    """Require two ranks to share so many images, mixed anew, in two epochs; `batches` are those of each rank."""
    sizes = [len(batch) for own in batches for batch in own]
    epochs = [[sum(own[first : first + len(own) // 2], []) for own in batches] for first in (0, len(batches[0]) // 2)]
    shared, together = set(epochs[0][0]) & set(epochs[0][1]), len(sum(epochs[0], []))
    require(not shared, f"In the first epoch both ranks train on image {shared and min(shared)}, and on others.")
    require(together == images, f"An epoch of both ranks has {together} images instead of {images}.")
    require(
        set(sizes) == {batch_size // 2},
        f"A batch of one rank has {max(sizes)} images: both together make a step of {2 * max(sizes)}, and batch_size "
        f"is {batch_size}.",
    )
    require(epochs[0] != epochs[1], "The second epoch has the order of the first.")
    require(epochs[0][0] != sorted(epochs[0][0]), "The images are in their first order: not mixed.")


@exercise("03.16", expects="a program that defines mean_loss(loss_sum, count)")
def loss_of_all(path):
    values = run_on_ranks(path, ranks.drive_loss)
    for rank, value in enumerate(values):
        require(value is not None, f"Rank {rank} returns nothing.")
        own = (1.0, 2.6)[rank]
        require(not close(value, own), f"Rank {rank} returns {value:.1f}, the mean of its own images.")
        require(
            not close(value, 1.8), "1.8 is the mean of the two means 1.0 and 2.6. But they are of 3 and of 5 images."
        )
        require(not close(value, 16), "16 is the sum of the losses. Divide it by the number of images.")
        require(not close(value, 8), "The sum of the losses is divided by the number of ranks, not of images.")
        require(close(value, 2), f"Of 3 images with sum 3 and 5 with sum 13 rank {rank} makes {value:.2f}.")
    return (
        "Add up sums and counts, then divide once: it is right for shares of any size. Accuracy works in the same way."
    )


@exercise("03.17", expects="a program that defines save(model, path, rank)")
def save_once(path):
    first, second = run_on_ranks(path, ranks.drive_save)
    require(first["saved"] + second["saved"] > 0, "No rank saves anything.")
    require(second["saved"] == 0, "Rank 1 writes the same file, at the same time as rank 0.")
    require(first["keys"], "The file holds no weights by name.")
    prefixed = [key for key in first["keys"] if key.startswith("module.")]
    require(not prefixed, f"The file holds {prefixed and prefixed[0]!r}: the plain model does not know this name.")
    names = ", ".join(first["keys"])
    require(
        set(first["keys"]) == {"weight", "bias"}, f"The plain model has the names weight and bias; the file, {names}."
    )
    if not second["there"]:
        raise Wrong("Rank 1 went on before the file was there. If it loads it now, it fails.")
    return "One writes, all wait. The wait is a collective: every rank has to call it, outside the if."


@exercise("03.18", expects="a program that defines train(model, dataset, epochs, batch_size)")
def training_made_ddp(path):
    rows = run_on_ranks(path, ranks.drive_training)
    batches = [row["batches"] for row in rows]
    require(all(batches), "A rank computes no batch at all.")
    require_shared_epochs(batches, images=24, batch_size=8)
    for rank, row in enumerate(rows):
        right = row["apart"] < 1e-4
        require(right, f"Rank {rank} ends with other weights than one device that takes the batches of both ranks.")
    return "The same training, in two processes. Your own takes the same lines; a launcher starts the processes."
