"""The checks of notebooks/06_hybrid.ipynb: the grid of ranks, who averages with whom, what crosses between nodes."""

from mpdemo.errors import UserError
from mpdemo.exercises import hybrid_ranks as ranks
from mpdemo.exercises.answers import close, refuse_mistakes
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.run import run_on_ranks
from mpdemo.settings import Settings, checked

GRIDS = [(4, 2), (6, 2), (6, 3), (8, 2), (3, 1)]  # world size, replicas


@exercise("06.1", expects="two numbers and a list of numbers, such as (1, 2, [0, 3])")
def place_of_a_rank(answer):
    before, after, same_stage = answer
    require({before, after} != {1, 3}, "The grid has two rows of three: in which of them does rank 4 stand?")
    require((before, after) != (5, 3), "The images enter on the left: in which order does a row count?")
    require(before == 3, f"Rank {before} is not the one to the left of rank 4.")
    require(after == 5, f"Rank {after} is not the one to the right of rank 4.")
    same_stage = sorted(same_stage)
    require(same_stage != [3, 4, 5], "These are the ranks of one pipeline: each has other weights.")
    require(same_stage == [1, 4], f"Of the ranks {same_stage}, do all hold the stage of rank 4, and no others?")
    return "A rank has neighbours in its row, to send to, and partners in its column, to average with."


@exercise("06.2", expects="a function groups(rank, world_size, replicas) that returns two lists of ranks")
def two_groups(answer):
    for world_size, replicas in GRIDS:
        stages = world_size // replicas
        for rank in range(world_size):
            where = f"Rank {rank} of {world_size}, {replicas} replicas:"
            pipeline, same_stage = (sorted(group) for group in answer(rank, world_size, replicas))
            require(rank in pipeline and rank in same_stage, f"{where} it is missing in one of its own groups.")
            sizes = f"{where} {len(pipeline)} ranks in its pipeline and {len(same_stage)} with its stage"
            require((len(pipeline), len(same_stage)) == (stages, replicas), f"{sizes}; is that the size of the grid?")
            first = rank - rank % stages
            require(pipeline == list(range(first, first + stages)), f"{where} {pipeline} is no row of the grid.")
            wanted = list(range(rank % stages, world_size, stages))
            require(same_stage == wanted, f"{where} {same_stage} is no column of the grid.")
    return "Two lines of arithmetic. A device mesh does the same, and makes the process groups as well."


@exercise("06.3", expects="a program that defines average(gradients, pipeline, same_stage)")
def average_in_a_column(path):
    for rank, factor in enumerate(run_on_ranks(path, ranks.drive_average, processes=ranks.REPLICAS * ranks.STAGES)):
        where = f"On rank {rank} the gradients"
        mixture = "a mixture: something of another stage is in them, or of one replica only"
        require(factor is not None, f"{where} are {mixture}.")
        require(
            not close(factor, ranks.REPLICAS), f"{where} are the sum over the replicas. The loss is a mean over images."
        )
        require(close(factor, 1), f"{where} are {factor:.2f} times those of the whole batch. How many were added up?")
    return "The program had run without an error: equal shapes are enough for an all-reduce to add up anything."


@exercise("06.4", expects="two numbers of MB, such as (100, 50)")
def bytes_between_nodes(answer):
    inside, across = answer
    gradients, activations = 25.6e6 * 4 / 1e6, 256 * 512 * 28 * 28 * 4 / 1e6  # MB: of the model, of the whole batch
    swapped = close(inside, 2 * activations) and close(across, 2 * gradients)
    require(not swapped, "These are the right numbers in the wrong order.")
    mebi = [number * 1e6 / 2**20 for number in (2 * gradients, 2 * activations)]
    in_mib = close(inside, mebi[0]) or close(across, mebi[1])
    require(not in_mib, "One of these is in MiB, of 1,048,576 bytes. A MB has 1,000,000.")
    require(not close(inside, gradients / 4), "A weight has 4 bytes, and so has its gradient.")
    require(not close(inside, gradients), "Two nodes exchange the gradients: each sends its own to the other one.")
    require(not close(inside, 2 * 2 * gradients), "The devices of a node hold one copy together, not one copy each.")
    require(
        close(inside, 2 * gradients),
        f"{inside} MB for the gradients: count the copies of each node, the bytes of a weight, both ways.",
    )
    mistakes = {
        activations: "Not all of it: both replicas count, and both ways over the cut.",
        2 * 2 * activations: "Each image passes through one of the replicas only.",
        activations / 2: "Not all of it: a number has 4 bytes; both replicas count, and both ways over the cut.",
    }
    refuse_mistakes(across, mistakes)
    require(close(across, 2 * activations), f"{across} MB for the activations: what passes the cut for each image?")
    return "Here the replicas belong inside the nodes. With a quarter of this batch both would send about the same."


@exercise("06.5", expects='"inside" or "across"')
def layout_of_the_story(answer):
    require(answer in ("inside", "across"), f"{answer!r} is none of the two.")
    require(answer == "across", "Compare 3.6 million numbers with 64 images x 3 cuts x 16 x 192, both twice.")
    return "It sends less, in more messages, and the next stage waits for each: on a slow network, measure both."


@exercise("06.6", expects='settings in a dictionary, such as {"replicas": 2}')
def settings_of_sixteen(answer):
    try:
        settings = Settings(**answer)
        fixed = (settings.rung, settings.batch_size, settings.schedule)
        require(fixed == ("hybrid", 64, "1f1b"), "Rung, batch and schedule are given: only the two dots are yours.")
        used = checked(settings, 16)
    except UserError as error:
        raise Wrong(f"It stops at once: {str(error).partition('; allowed')[0]}.") from None
    require(used.devices == 4, f"A replica then has {used.devices} devices, and a node has four.")
    images = used.batch_size // used.replicas // used.microbatches
    require(images >= 4, f"A microbatch has {images} of the images: too few for a device to be fast.")
    return "Each replica takes 16 images, in four microbatches of 4: replicas and microbatches share the same batch."
