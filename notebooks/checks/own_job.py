"""Runs a reader's batch script and training script together: one warning, one resume, and the losses of both runs.

The training is the reader's own `bard.py` once it resumes (81.3), else the solution's, else a stand-in without PyTorch.
"""

import json
import re
import tempfile
from itertools import pairwise
from pathlib import Path

from checks.job_files import client, run_again, submit, wait_for, warn
from mpdemo.jobs.check import Script
from mpdemo.notebook.check import checks
from mpdemo.paths import root

SCRIPTS = root() / "notebooks" / "scripts"
OWN = [root() / "work" / "own" / "bard.py", root() / "work" / "own_solution" / "bard.py"]
JOBS = OWN[0].with_name("jobs.json")  # the losses of both runs, for the picture
LOSS = re.compile(r"loss\D{0,3}(\d+\.\d+)")
AT_STEP = re.compile(r"step\D{0,3}(\d+)\b.*?" + LOSS.pattern)
RANKS = 4  # of the node for which the batch script is
SECONDS = 150.0  # limit for each of the job's two runs
PAUSE = 0.2  # s after each step, so that a warning comes before the last one
IN_A_JOB = (
    "import os, sys, types; os.environ['CUDA_VISIBLE_DEVICES'] = ''; sys.argv[1:] = ['--size', 'small']; "
    "sys.modules['checks'] = package = types.ModuleType('checks'); package.__path__ = [{folder!r}]; "
    "from checks import own_script; own_script.note_steps({pause}); "
)
STAND_IN = """
import os, signal, time
from pathlib import Path

warned = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: warned.append(1))
rank, done = os.environ.get("RANK", "0"), max([int(f.parent.name[5:]) for f in Path().glob("bard-*/.metadata")] + [0])
with open(f"ran{rank}", "a") as notes:
    print(os.environ.get("WORLD_SIZE", "1"), file=notes, flush=True)
    while done < 20 and not warned:
        time.sleep(0.3)
        done += 1
        print("step", file=notes, flush=True)
        if rank == "0" and done % 5 == 0:
            print(f"step {done} | loss {5 - done / 10:.4f}", flush=True)
time.sleep(2)  # to save takes time
if rank == "0":
    Path(f"bard-{done}").mkdir()
    Path(f"bard-{done}/.metadata").touch()
"""


def text_of(script) -> str:
    """Return the script's text: of a file, or as it is given."""
    if isinstance(script, Path):
        return script.read_text()
    assert "\n" in script, f"{script!r} is a text, and no script. The check wants a path: Path({script!r})."
    return script


def files_of(script) -> dict:
    """Return what lies in the folder where the script runs, by name: the text, job.py, and the reader's own modules."""
    beside = script.parent.glob("*.py") if isinstance(script, Path) else []
    files = {file.name: file.read_bytes() for file in (SCRIPTS / "text.txt", SCRIPTS / "job.py", *beside)}
    return files | {"bard.py": text_of(script).encode()}


def files_in_job(script) -> dict:
    """Return them for a job: its ranks note their steps, train the small size, and use no GPU."""
    files, begin = files_of(script), IN_A_JOB.format(folder=str(checks()), pause=PAUSE)
    return files | {"bard.py": begin.encode() + files["bard.py"]}


def knows_usr1(script) -> bool:
    """Whether the script, or a module beside it that it imports, mentions SIGUSR1."""
    files, text = files_of(script), text_of(script)
    imported = [
        files.get(f"{name}.py", b"").decode()
        for name in re.findall(r"^\s*(?:import|from) (\w+)", text, re.M)
    ]
    return any("SIGUSR1" in text for text in (text, *imported))


def own_training():
    """Return the first script that resumes, and whose it is; None and what takes its place otherwise."""
    for script, whose in zip(
        OWN, ("your bard.py", "the solution's bard.py, as yours doesn't resume yet"), strict=True
    ):
        if script.exists() and knows_usr1(script):
            return script, whose
    return None, "a stand-in, as bard.py doesn't resume yet (81.3)"


def losses_at(printed) -> dict:
    """Return the losses that were printed with a step, by step."""
    return {int(step): float(loss) for step, loss in AT_STEP.findall(printed)}


def saved_in_time(path, to_script, script, environment, log):
    """Submit it with a training script, and warn the job once: it must end, with a checkpoint of its last step."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-own-") as name:
        folder, place = trains(path, script, name, environment, log)
        warn(place, to_script)
        wait_for(*place, lambda state: state != "running", "end", SECONDS)
        (first,) = steps_of(folder)
        saved = (folder / f"bard-{first}").exists()
    assert saved, (
        f"Warned, it ended after step {first}, and left no bard-{first}: who doesn't pass the warning on?"
    )


def tried(path, to_script, script, whole, environment, log):
    """Submit it with a training script, warn the job once, let it resume; `whole` are the losses without a stop."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-own-") as name:
        folder, place = trains(path, script, name, environment, log)
        warn(place, to_script)
        wait_for(*place, lambda state: state == "pending", "go back into the queue", SECONDS)
        (first,), end = steps_of(folder), place[2].stat().st_size
        run_again(*place, SECONDS)
        second, text = steps_of(folder)[-1], place[2].read_bytes()
    losses = [losses_at(part.decode(errors="replace")) for part in (text[:end], text[end:])]
    steps = max(whole)
    follow(whole, first, steps - second, losses)
    if script:
        spans = [0, first], [first, steps]
        jobs = [
            {"steps": span, "losses": [*found.items()]} for span, found in zip(spans, losses, strict=True)
        ]
        JOBS.parent.mkdir(parents=True, exist_ok=True)
        JOBS.write_text(json.dumps({"whole": [*whole.items()], "jobs": jobs}))


def trains(path, script, name, environment, log):
    """Submit it in a folder of this name; return both once its ranks have trained more than five steps."""
    folder = filled(name, files_in_job(script) if script else {"bard.py": STAND_IN.encode()})
    place = started(path, folder, environment, log)
    wait_for(
        *place, lambda state: max(steps_of(folder), default=0) > 5, "train the first six steps", SECONDS
    )
    count, worlds = len([*folder.glob("ran*")]), worlds_of(folder)
    said = f"It starts {count} ranks of bard.py, and each believes to be one of {' or '.join(worlds)}"
    assert count == RANKS and worlds == {str(RANKS)}, f"{said}; the node has {RANKS} GPUs."
    return folder, place


def follow(whole, first, resumed, found):
    """Require that the second run continues where the first one stopped, with the losses of a run never stopped."""
    stopped = f"Warned, it stopped after step {first}; its second run"
    assert resumed > 0, f"{stopped} begins anew: nothing was saved in time, or it isn't found."
    wrong = "it was ended before it had saved, or it miscounts."
    assert resumed == first, f"{stopped} resumes after step {resumed}: {wrong}"
    losses = found[0] | found[1]
    missing = sorted(whole.keys() - losses.keys())
    assert not missing, f"Its log has no loss of step {missing[0]}."
    for step, loss in whole.items():
        off = f"In step {step} the loss of the two runs is {losses[step]:.4f}, and {loss:.4f} if it never stops."
        assert abs(losses[step] - loss) <= 1e-3 * loss, off


def filled(folder, files):
    """Write files into a folder; return it."""
    for name, content in files.items():
        Path(folder, name).write_bytes(content)
    return Path(folder)


def started(path, folder, environment, log):
    """Submit it in a folder, its log where it wants it, if that is in the folder; return what `wait_for` asks for."""
    own = Script(path.read_text()).value("output") or "slurm-%j.out"
    if (folder / own).resolve().is_relative_to(folder.resolve()):
        log = own
        (folder / own).parent.mkdir(parents=True, exist_ok=True)
    job = submit(path, environment, log, "--open-mode=append", f"--chdir={folder}")
    said = client(environment, "scontrol", "show", "job", "-o", job).stdout
    return job, environment, Path(re.search(r"StdOut=(\S+)", said)[1])


def worlds_of(folder) -> set:
    """Return of how many ranks each rank believes to be one."""
    return {line for file in folder.glob("ran*") for line in file.read_text().split() if line.isdecimal()}


def steps_of(folder) -> list:
    """Return how many steps rank 0 made in each of its runs."""
    file = folder / "ran0"
    lines = file.read_text().split() if file.exists() else []
    starts = [number for number, line in enumerate(lines) if line.isdecimal()]
    return [after - before - 1 for before, after in pairwise([*starts, len(lines)])]
