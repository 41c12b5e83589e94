"""The checks of notebooks/09_checkpoint.ipynb: what a checkpoint holds, atomic and sharded saves, the time limit."""

import math

from mpdemo.exercises import checkpoint_job  # noqa: F401 - it enters 09.11
from mpdemo.exercises.answers import letters_of
from mpdemo.exercises.check import Wrong, exercise, require
from mpdemo.exercises.checkpoint_runs import ELSEWHERE, RENAMED, TOO_EARLY, drive_atomic, drive_resume, drive_save
from mpdemo.exercises.run import run_on_ranks


@exercise("09.1", expects='"weights", "optimizer" or "position"')
def what_shows_one_step_later(answer):
    require(answer in ("weights", "optimizer", "position"), f"{answer!r} is none of the three.")
    require(answer != "weights", "The loss of step 6 is computed with the weights, and these are new ones.")
    require(answer != "position", "Step 6 would then train on the images of step 1.")
    return "A first loss that agrees proves little: compare several steps after a resume."


@exercise("09.2", expects="a number")
def size_of_a_checkpoint(answer):
    require(answer != 1, "This is the file of someone who saves model.state_dict() alone.")
    require(answer != 2, "This is SGD with momentum: one more number for each weight. AdamW keeps more.")
    require(answer != 4, "Gradients are computed anew in every step; a checkpoint leaves them out.")
    require(abs(answer - 3) < 0.1, f"{answer} does not come out: count what the file holds for each weight.")
    return "A model of 1 billion weights in float32 gives a file of 12 GB: where and how often it is written matters."


@exercise("09.3", expects="a program that defines save(training, path) and load(training, path)")
def save_and_load(path):
    (results,) = run_on_ranks(path, drive_resume, processes=1, seconds=40)
    for result in results:
        _compare(result["stop"], result["same weights"], result["rows"], result["whole"])
    return "After 3, 5 and 9 steps, the resumed run had the very losses of the uninterrupted one."


def _compare(stop, same_weights, rows, whole):
    """Require that a resumed run's rows are those of the uninterrupted run; say what differs first."""
    after = f"Stopped after step {stop}"
    require(same_weights, f"{after}: after load, the new training does not have the saved weights.")
    for step, (row, wanted) in enumerate(zip(rows, whole, strict=True), stop + 1):
        place, before = (f"batch {r['batch']} of epoch {r['epoch']}" for r in (row, wanted))
        require(place == before, f"{after}: step {step} trains on {place}; without the stop it is {before}.")
        rates = f"has the learning rate {row['lr']:.4f}; without the stop it is {wanted['lr']:.4f}"
        require(math.isclose(row["lr"], wanted["lr"], rel_tol=1e-9), f"{after}: step {step} {rates}.")
        if row["loss"] == wanted["loss"]:
            continue
        if step == stop + 1:
            raise Wrong(f"{after}: step {step} has the right weights and images, but dropout draws other zeros.")
        raise Wrong(f"{after}: step {step - 1} has the right loss, and then the weights move differently than before.")


@exercise("09.4", expects="two whole numbers, such as (2, 2)")
def files_after_a_kill(answer):
    plain, atomic = answer
    require(plain != 1 or atomic != 0, "This is the wrong way round: which of them touches the old file?")
    require(plain == 0, "The plain save opens last.pt for writing, and this empties the file at once.")
    require(atomic != 0, "Under which name was the file that was cut short, and which file had the other name?")
    require(atomic == 1, f"It saved twice, and the second save did not end; {atomic} whole files cannot be there.")
    return "The most likely time for a kill is the end of the time limit, which is also when many programs save."


@exercise("09.5", expects="a program that defines save(state, path)")
def atomic_save(path):
    (result,) = run_on_ranks(path, drive_atomic, processes=1, seconds=40)
    first, middle, rename = result["first"], result["middle"], result["rename"]
    require(first["step"] == 1, "After a save that nobody disturbed, the file cannot be loaded.")
    extra = [name for name in first["files"] if name != "last.pt"]
    require(not extra, f"After a save that nobody disturbed, this is left: {', '.join(extra)}.")
    ended = "A process that saved again was ended in the middle of the write"
    require(middle["status"] != 0, "The second save wrote nothing.")
    require(middle["step"] != 2, f"{ended}, and yet the file is the new one.")
    require(middle["step"] == 1, f"{ended}, and the old file is gone or damaged.")
    require(rename["status"] != 0, "The new file did not get its name by a rename.")
    require(rename["step"] == 1, "Ended just before the rename, it had already destroyed the old file.")
    elsewhere = "The file was renamed from another folder, perhaps of another disk: there a rename copies the content."
    require(rename["status"] != ELSEWHERE, elsewhere)
    early = "When os.fsync was called, a part of the content was not yet written: after a power cut it is missing."
    require(rename["status"] != TOO_EARLY, early)
    unsafe = "The rename came while the content was in memory alone: after a power cut, the name is there without it."
    require(rename["status"] == RENAMED, unsafe)
    require(result["last"] == 3, "After the two that were ended, a third save did not give the newest state.")
    return "Ended at any moment, it leaves the old file or the new one. In the same way you can write any result."


@exercise("09.6", expects="a program that defines save(part, path, rank, world_size)")
def save_of_all_ranks(path):
    results = run_on_ranks(path, drive_save)
    writers = [rank for rank, result in enumerate(results) if result["written"]]
    require(writers, "No rank wrote the file.")
    require(len(writers) == 1, "Both ranks wrote the file, at the same time and under the same name.")
    late = [rank for rank, result in enumerate(results) if not result["there"]]
    require(not late, f"Rank {late[0] if late else 0} came back from save, and the file was not there yet.")
    names = results[0]["names"]
    require(names == ["weight0", "weight1"], f"The file holds {', '.join(names) or 'nothing'}.")
    return "One file with the parts of all ranks can be loaded by one process, by two or by eight."


@exercise("09.7", expects='"equal", "rounding" or "different"')
def three_rungs(answer):
    require(answer in ("equal", "rounding", "different"), f"{answer!r} is none of the three.")
    require(answer != "equal", "DDP adds up the gradients of two halves. Is (a + b) + c always a + (b + c)?")
    require(answer != "different", "All rungs compute the gradient of the same batch, and the file holds all states.")
    return "So a training may move to a machine with more devices, or fewer, in the middle."


@exercise("09.8", expects="two whole numbers, such as (50, 10)")
def lost_steps(answer):
    killed, warned = answer
    require(killed != 137, "A checkpoint of step 100 is there: not everything is lost.")
    require(killed != 13, "Up to step 150 there are 13 steps, but no checkpoint of step 150 was ever written.")
    require(killed == 37, f"Which checkpoint is the newest at step 137? After it, {killed} steps do not fit.")
    require(warned != 37, "With the warning the training ends in its own way. What does it do before it ends?")
    require(warned == 0, f"With the warning {warned} steps are lost: where does the checkpoint lie that it writes?")
    return "Write often enough for a crash; the end of the time limit need not cost a single step."


@exercise("09.9", expects='letters in one text, such as "ab"')
def back_into_the_queue(answer):
    letters = letters_of(answer, "abcd")
    require("a" not in letters, "A training that is done (a) would run again, and again.")
    require("b" not in letters, "A mistake in the command (b) will be there the next time too.")
    require("d" not in letters, "A program that fails (d) may fail at the same place again, until the hours are spent.")
    require("c" in letters, "Nothing would go on after the time limit (c).")
    return "An endless loop in the queue spends the hours of the whole group, so test for one status."


@exercise("09.10", expects="a whole number")
def runs_of_a_job(answer):
    require(answer != 4, "This forgets that each run of the job loses minutes: at its start, and from the warning on.")
    require(answer >= 4, f"{answer} times 60 minutes are {answer * 60:.0f} minutes, and 220 minutes are to be trained.")
    require(answer == 5, f"With {answer} runs of the job, how many minutes of training does each one have to give?")
    return "A longer limit wastes less, a shorter one starts sooner: most queues reward the short job."


@exercise("09.12", expects="two numbers, such as (6, 12)")
def parts_of_a_sharded_checkpoint(answer):
    two, four = answer
    require((two, four) != (3, 3), "This is what rank 0 writes when it gathers the whole model.")
    require((two, four) != (0.5, 0.25), "The weights are divided. What else is in a checkpoint of AdamW?")
    require(two > four, "More processes: does each one have more of the model, or less?")
    for number, each in ((2, two), (4, four)):
        together = f"{number} processes that write {each} each write {number * each:g} together"
        require(abs(number * each - 3) < 0.1, f"{together}; the one file had 3.")
    return "With more processes each one writes less, and all write at the same time."


@exercise("09.13", expects="two whole numbers, such as (4, 8)")
def parts_on_fewer_devices(answer):
    before, after = answer
    require((before, after) != (4, 4), "These are the parts of the whole batch. Each device has only some of them.")
    require(after != before, "Fewer devices have the same 64 images to compute, and no more at a time than before.")
    require(before < after, "With fewer devices, does each one have more to compute, or less?")
    require(
        before == 1, f"Before: a device has 64 / 4 images, and computes 16 at a time. These are not {before} parts."
    )
    require(
        after == 2, f"Afterwards: a device has 64 / 2 images, and computes 16 at a time. These are not {after} parts."
    )
    return "The steps are slower, and their gradients are the same: the loss curve goes on as if nothing had happened."
