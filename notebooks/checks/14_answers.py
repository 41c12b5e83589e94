"""Checks of notebook 14: the reader's script, run as it is, and the batch script that submits it.

What it does is observed in real processes (own_script.py); whether it is the same training, and resumes, says
``python -m mpdemo same``. The batch script runs on a throw-away Slurm where one can be started.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checks.job_files import READ, TRIED, check_text, client, run_again, submit, trial, wait_for
from mpdemo import ranks
from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.check import Script
from mpdemo.notebook.check import checks
from mpdemo.paths import root
from mpdemo.world.processes import child_environment

FOUND = root() / "notebooks" / "scripts" / "found" / "bard.py"
WORDS = FOUND.parent.parent / "text.txt"
LOSS = re.compile(r"loss\D{0,3}(\d+\.\d+)")
SECONDS = 90.0  # limit for a run of the script: twenty steps of a small model
SAME_SECONDS = 400.0  # limit for `same`: three or four runs
PREFIX = (
    "import sys, types; sys.modules['checks'] = package = types.ModuleType('checks'); package.__path__ = [{folder!r}]; "
    "from checks import own_script; own_script.watch(); __file__ = 'bard.py'; sys.argv = ['bard.py', *{words!r}]; "
)


def text_of(script) -> str:
    """Return the script's text: of a file, or as it is given."""
    return script.read_text() if isinstance(script, Path) else script


def run(script, processes, *words):
    """Run the script in so many processes; return what the first printed, and what each was seen to do."""
    source = PREFIX.format(folder=str(checks()), words=words) + text_of(script)
    files = {"bard.py": text_of(script), "text.txt": WORDS.read_bytes()}
    results = ranks.run_program(source, "own_script.noted()", processes, SECONDS, group=False, files=files)
    for _, _, error in results:
        assert not error, error
    seen = [noted for _, noted, _ in results]
    assert all(noted.get("steps") for noted in seen), "It makes no step of an optimizer."
    return results[0][0], seen


def losses(printed) -> list:
    """Return the losses that were printed."""
    return [float(number) for number in LOSS.findall("\n".join(printed) if isinstance(printed, list) else printed)]


def check_14_1(script):
    (printed, (was, *_)), (prints, (noted, *_)) = run(FOUND, 1), run(script, 1)
    before, now = losses(printed), losses(prints)
    assert now, "It prints no loss any more."
    for name in ("parameters", "tokens", "steps"):
        changed = f"With one process it has {noted[name]:,} {name}, and the script that you found {was[name]:,}."
        assert noted[name] == was[name], f"{changed} Only how it computes may change, not what."
    changed = f"With one process its last loss is {now[-1]:.4f}, and the script that you found has {before[-1]:.4f}."
    assert abs(now[-1] - before[-1]) < 0.1, f"{changed} Only how it computes may change, not what."
    assert "--bf16" in text_of(script), "It has no option --bf16 yet."
    seen = run(script, 2, "--bf16")[1][0]
    whole, stored = seen["parameters"], seen["stored"]
    assert stored < 0.6 * whole, f"Each of two ranks stores {stored:,} of {whole:,} parameters: nothing is sharded."
    once = "FSDP gathers all of the model at once: 26 GB in float32, beside the activations."
    assert seen["units"] > 1, f"Only the whole model is wrapped. {once}"
    assert not seen.get("low"), "With --bf16 the optimizer's own weights are bf16, which rounds small updates away."
    types = " and ".join(seen["types"])
    assert "bfloat16" in seen["types"], f"With --bf16 its Linears still compute in {types}."
    assert seen.get("recomputed"), "The backward pass recomputes nothing: each layer still keeps its activations."


def check_14_2(script):
    judged(script, "--strict", "--batches=4")


def check_14_3(script):
    printed, seen = run(script, 2)
    steps, noted = seen[0]["steps"], seen[0]
    assert len(losses(printed)) > 1, "It prints no losses any more: read them seldom, but read them."
    assert not noted.get("collected"), f"In {steps} steps it still calls gc.collect() {noted['collected']} times."
    assert noted["opened"] < 2, f"It still opens text.txt in {noted['opened']} of {steps} steps."
    every = f"It still reads a number of the device in {noted['reads']} of {steps} steps"
    assert noted["reads"] <= steps // 4, f"{every}: a GPU waits there for Python, and then has nothing to do."


def check_14_4(script):
    assert "SIGUSR1" in text_of(script), "It doesn't know SIGUSR1, which Slurm sends before the time limit."
    notes = judged(script, "--resume", "--processes=1,2")
    assert not any("not handle SIGTERM" in note for note in notes), "SIGTERM ends it at once, and nothing is saved."


def judged(script, *options):
    """Require that `same` accepts the script; return its notes."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-own-") as name:
        folder = Path(name)
        (folder / "bard.py").write_text(text_of(script))
        (folder / "text.txt").write_bytes(WORDS.read_bytes())
        command = [sys.executable, "-m", "mpdemo", "same", "--device=cpu", "--json=said.json", *options]
        environment = child_environment() | {"PYTHONPATH": str(root())}
        try:
            done = subprocess.run([*command, "--", "bard.py"], cwd=folder, env=environment, timeout=SAME_SECONDS,
                                  capture_output=True, text=True)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UserError(f"no verdict of same within {SAME_SECONDS:.0f} s; run this cell again") from None
        if not (folder / "said.json").exists():
            raise AssertionError(f"{(done.stderr.strip().splitlines() or ['no verdict'])[-1]}.")
        verdict = json.loads((folder / "said.json").read_text())["worlds"][0]
    found = "; ".join(
        f"{finding['name']}: {finding['what']}; {finding['remedy']}" for finding in verdict["findings"][:1]
    )
    assert verdict["verdict"] == "same", f"{verdict['said']}. {found or '; '.join(verdict['notes'])}."
    return verdict["notes"]


RANKS = 4  # of the node for which the batch script is
TRIAL_SECONDS = 60.0  # limit for each of the job's two runs
AGAIN = "What it submits stops in time, saves, and resumes, however often its time limit comes."
STAND_IN = """
import os, signal, sys, time
from pathlib import Path

warned = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: warned.append(1))
rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
with open(f"ran{rank}", "a") as file:
    file.write(f"{world} {' '.join(sys.argv[1:])}\\n")
if Path(f"saved{rank}").exists():
    sys.exit()
end = time.monotonic() + 60
while not warned and time.monotonic() < end:
    time.sleep(0.05)
if not warned:
    sys.exit("never warned")
time.sleep(2)  # to save takes time
Path(f"saved{rank}").touch()
"""


def check_14_5(path):
    to_script = read(check_text(path))
    with trial(nodes=1) as place:
        if place:
            tried(path, to_script, *place)
        return f"{TRIED if place else READ} {AGAIN}"


def read(text):
    """Judge what no trial of some seconds can show; return whether the warning goes to the script itself."""
    script = Script(text)
    for word in ("--size wanted", "--bf16"):
        assert word in text, f"It trains without {word}, so not at the size that was wanted."
    signal = script.value("signal")
    assert signal, "At the time limit, Slurm kills the training without a warning."
    name, _, before = signal.removeprefix("B:").partition("@")
    assert name in ("USR1", "SIGUSR1", "10"), f"The training doesn't know the signal {name} as a warning."
    assert before.isdecimal() and int(before) >= 60, f"{signal} leaves less than a minute to save 77 GB of state."
    limit = slurm.limit(script.value("time") or "10-0")
    assert int(before) < limit <= 86_400, f"The time limit is {limit:.0f} s; the partition allows a day."
    handled = re.search(r"--signals-to-handle[= ]\S*USR1|kill -(SIG)?TERM", text)  # without cgroups orphans live on
    assert handled, "torchrun doesn't know SIGUSR1 by itself: it dies of it, and takes the ranks with it."
    again = [line for line in text.splitlines() if re.match(r"[^#]*scontrol requeue", line)]
    assert again, "After the warning the job ends, and nothing puts it back into the queue."
    return signal.startswith("B:")


def tried(path, to_script, environment, log):
    """Submit it with a stand-in for bard.py, and warn the job: all ranks must start, be warned, and start again."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-own-") as name:
        folder = Path(name)
        (folder / "bard.py").write_text(STAND_IN)
        job = submit(path, environment, log, "--open-mode=append", f"--chdir={folder}")
        place = job, environment, log
        wait_for(*place, lambda state: started(folder), "start bard.py", TRIAL_SECONDS)
        time.sleep(3)  # for the other ranks
        worlds = {line.split()[0] for lines in started(folder).values() for line in lines}
        count, sizes = len(started(folder)), " or ".join(worlds)
        said = f"It starts {count} ranks of bard.py, and each believes to be one of {sizes}"
        assert count == RANKS and worlds == {str(RANKS)}, f"{said}; the node has {RANKS} GPUs."
        client(environment, "scancel", "--signal=USR1", *(["--batch"] if to_script else []), job)
        wait_for(*place, lambda state: state == "pending", "go back into the queue", TRIAL_SECONDS)
        saved = len([*folder.glob("saved*")])
        lost = "the others weren't warned, or were ended before they had saved"
        assert saved == RANKS, f"Of {RANKS} ranks, {saved} have saved after the warning; {lost}."
        run_again(*place, TRIAL_SECONDS)
        assert all(len(lines) == 2 for lines in started(folder).values()), "Its second run doesn't start every rank."


def started(folder) -> dict:
    """Return what each rank of the stand-in has written at its starts."""
    return {file.name: file.read_text().splitlines() for file in folder.glob("ran*")}
