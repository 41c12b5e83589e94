"""The checks of notebooks/12_other_tools.ipynb: TensorBoard's steps, Lightning's modules, Horovod's calls."""

from mpdemo.exercises.answers import refuse_mistakes
from mpdemo.exercises.check import exercise, require
from mpdemo.exercises.other_tools_ranks import STEPS, drive_calls, drive_module, drive_optimizer
from mpdemo.exercises.run import run_on_ranks


@exercise("12.1", expects="a whole number")
def purged_steps(answer):
    require(answer != 5, "Step 5 would be hidden as well, and the second process does not do it again.")
    require(answer > 5, f"From step {answer} on all is hidden, and the second process begins with step 6.")
    require(answer < 7, f"Only what stands from step {answer} on is hidden: some steps would be there twice.")
    return "The training and its picture go on from the same step, so the curve has no loop in it."


@exercise("12.3", expects="two whole numbers, such as (64, 24)")
def batch_and_steps(answer):
    images, steps = answer
    refuse_mistakes(
        images,
        {
            64: "64 is what one process loads: every process has a DataLoader of its own.",
            128: "These are the two nodes. How many processes has each?",
            256: "This is one node. There is another one.",
        },
    )
    require(images == 512, f"{images} images: multiply what one process loads by the number of processes.")
    require(steps != 24, "24 steps are those of one process alone with all images.")
    require(steps == 3, f"{steps} steps of {images} images are not the 1,536 images of an epoch.")
    return (
        "The weights move once in a step, so a run that should be 8 times as fast moves them an eighth as often in an "
        "epoch."
    )


@exercise("12.2", expects="a program that defines the class Classifier")
def module_for_a_trainer(path):
    (result,) = run_on_ranks(path, drive_module, processes=1)
    require(not result["moved"], "training_step moves the weights itself, and then the trainer moves them once more.")
    require(not result["backward"], "training_step leaves gradients behind: the trainer's backward adds to them.")
    kind = result["returned"]
    require(result["graph"], f"training_step returns {kind}, from which the trainer cannot run the backward pass.")
    require(result["optimizer"], "configure_optimizers returns no optimizer of PyTorch.")
    same = f"After {STEPS} steps the losses are not those of the loop before it was taken apart"
    require(result["losses"] == result["wanted"], f"{same}: the loss or the optimizer has changed.")
    return "What is left is what a reader wants to know: the model, the loss, the optimizer. The loop is the trainer's."


@exercise("12.4", expects='"a", "b" or "c"')
def what_the_curve_shows(answer):
    require(answer in ("a", "b", "c"), f"{answer!r} is none of the three.")
    require(answer != "a", "The trainings are the same: the losses over both processes agree.")
    require(answer != "c", "Rounding changes the seventh digit, and here you see the difference with your eyes.")
    return "self.log(..., sync_dist=True) draws the mean of all processes, and costs a collective in each step."


@exercise("12.5", expects="a whole number")
def images_that_are_validated(answer):
    mistakes = {
        261: "261 is odd, and by default both processes get the same number of images.",
        260: "This sampler leaves out nothing, unless it is told to with drop_last=True.",
        522: "Each process takes its own part, and not all images.",
        131: "This is the part of one process.",
    }
    refuse_mistakes(answer, mistakes, tolerance=0)
    require(answer == 262, f"{answer} does not come out: how many images has each process, if both have equally many?")
    return "One image counts twice; with N processes it may be N - 1 images. The accuracy is then another one."


@exercise("12.6", expects="a program that defines allreduce(tensor) and broadcast_parameters(state, root_rank)")
def horovods_calls(path):
    for rank, result in enumerate(run_on_ranks(path, drive_calls)):
        mean, kept, got = result["reduced"], result["kept"], result["state"]
        on = f"on rank {rank}"
        require(mean is not None, f"allreduce returns no tensor {on}.")
        require(mean != [6.0, 30.0], f"allreduce gives the sum {on}; Horovod's gives the mean.")
        require(mean == [3.0, 15.0], f"allreduce of [2, 10] and [4, 20] gives {mean} {on}.")
        require(kept, f"allreduce has changed the tensor that it was given {on}; Horovod's returns a new one.")
        require(
            got[0] == got[1] == 1.0,
            f"After broadcast_parameters(state, 1) the state is {got} {on}; on rank 1 it was [1.0, 1.0].",
        )
    return "Most of a program for Horovod needs no more than these two and the optimizer."


@exercise("12.7", expects="a program that defines DistributedOptimizer(optimizer, named_parameters)")
def averaging_optimizer(path):
    for rank, result in enumerate(run_on_ranks(path, drive_optimizer)):
        on = f"on rank {rank}"
        require(result["optimizer"], f"DistributedOptimizer returns no optimizer {on}.")
        alone = f"The weights move {on} by the gradient of its own images: the mean comes too late, or not at all."
        require(not result["alone"], alone)
        times = result["times"]
        require(times is not None, f"The weights move in another direction {on} than with all images in one process.")
        require(
            abs(times - 1) < 1e-3, f"The weights move {times:.1f} times as far {on} as with all images in one process."
        )
        require(result["equal"], f"After the second step the weights of the ranks differ ({on}).")
    return "DDP does the same in buckets: a few large messages in place of one for each parameter."
