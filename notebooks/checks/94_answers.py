"""Checks of notebook 94: the reader's script, run as it is, and the batch script that submits it.

What it does is observed in real processes (own_script.py); whether it is the same training, and resumes, says
``python -m mpdemo same``. The batch script runs on a throw-away Slurm where one can be started (own_job.py).
"""

import json
import subprocess
import sys
import tempfile

from checks import own_job, requeues
from checks.job_files import READ, TRIED, check_text, trial
from checks.own_job import LOSS, SCRIPTS, files_of, filled, knows_usr1, losses_at, text_of
from mpdemo import ranks
from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.check import Script
from mpdemo.notebook.check import checks
from mpdemo.paths import root
from mpdemo.world.processes import child_environment

FOUND = SCRIPTS / "found" / "bard.py"
SECONDS = 90.0  # limit for a run of the script: twenty steps of a small model
SAME_SECONDS = 400.0  # limit for `same`: three or four runs
PREFIX = (
    "import os, sys, types; sys.path.insert(0, os.getcwd()); "
    "sys.modules['checks'] = package = types.ModuleType('checks'); package.__path__ = [{folder!r}]; "
    "from checks import own_script; own_script.watch(); __file__ = 'bard.py'; sys.argv = ['bard.py', *{words!r}]; "
)


def run(script, processes, *words):
    """Run the script in so many processes; return what the first printed, and what each was seen to do."""
    source = PREFIX.format(folder=str(checks()), words=words) + text_of(script)
    noted = "own_script.noted()"
    results = ranks.run_program(source, noted, processes, SECONDS, group=False, files=files_of(script))
    for _, _, error in results:
        assert not error, error
    seen = [noted for _, noted, _ in results]
    assert all(noted.get("steps") for noted in seen), "It makes no step of an optimizer."
    return results[0][0], seen


def losses(printed) -> list:
    """Return the losses that were printed."""
    return [
        float(number)
        for number in LOSS.findall("\n".join(printed) if isinstance(printed, list) else printed)
    ]


def check_94_1(script):
    (_, (was, *_)), (printed, (noted, *_)) = run(FOUND, 1), run(script, 1)
    assert losses(printed), "It prints no loss any more."
    for name in ("parameters", "tokens", "steps"):
        changed = (
            f"With one process it has {noted[name]:,} {name}, and the script that you found {was[name]:,}."
        )
        assert noted[name] == was[name], f"{changed} Only how it computes may change, not what."
    before, now = (seen["losses"] / seen["backwards"] for seen in (was, noted))
    changed = (
        f"With one process its mean loss is {now:.4f}, and the script that you found has {before:.4f}."
    )
    assert abs(now - before) < 0.1, f"{changed} Only how it computes may change, not what."
    assert "--bf16" in text_of(script), "It has no option --bf16 yet."
    seen = run(script, 2, "--bf16")[1][0]
    whole, stored = seen["parameters"], seen["stored"]
    assert stored < 0.6 * whole, (
        f"Each of two ranks stores {stored:,} of {whole:,} parameters: nothing is sharded."
    )
    built = f"Each rank builds all {whole:,} parameters before it shards them. With --size wanted that's 26 GB a rank"
    assert seen.get("built", 0) < whole, f"{built} on the host: build the model under torch.device('meta')."
    once = "FSDP gathers all of the model at once: 26 GB in float32, beside the activations."
    assert seen["units"] > 1, f"Only the whole model is wrapped. {once}"
    assert not seen.get("low"), (
        "With --bf16 the optimizer's own weights are bf16, which rounds small updates away."
    )
    types = " and ".join(seen["types"])
    assert "bfloat16" in seen["types"], f"With --bf16 its Linears still compute in {types}."
    assert seen.get("recomputed"), (
        "The backward pass recomputes nothing: each layer still keeps its activations."
    )


def check_94_2(script):
    judged(script, "--strict", "--batches=4")


def check_94_3(script):
    printed, seen = run(script, 2)
    steps, noted = seen[0]["steps"], seen[0]
    assert len(losses(printed)) > 1, "It prints no losses any more: read them seldom, but read them."
    assert not noted.get("collected"), (
        f"In {steps} steps it still calls gc.collect() {noted['collected']} times."
    )
    emptied = f"In {steps} steps it still calls torch.cuda.empty_cache() {noted.get('emptied')} times"
    assert not noted.get("emptied"), (
        f"{emptied}: it waits for the GPU, and the next step asks for the memory again."
    )
    assert noted["opened"] < 2, f"It still opens text.txt in {noted['opened']} of {steps} steps."
    every = f"It still reads a number of the device in {noted['reads']} of {steps} steps"
    assert noted["reads"] <= steps // 4, (
        f"{every}: a GPU waits there for Python, and then has nothing to do."
    )


def check_94_4(script):
    assert knows_usr1(script), "It doesn't know SIGUSR1, which Slurm sends before the time limit."
    notes = judged(script, "--resume", "--processes=1,2")
    assert not any("not handle SIGTERM" in note for note in notes), (
        "SIGTERM ends it at once, and nothing is saved."
    )


def judged(script, *options):
    """Require that `same` accepts the script; return its notes."""
    with tempfile.TemporaryDirectory(prefix="mpdemo-own-") as name:
        folder = filled(name, files_of(script))
        command = [sys.executable, "-m", "mpdemo", "same", "--device=cpu", "--json=said.json", *options]
        environment = child_environment() | {"PYTHONPATH": str(root())}
        try:
            done = subprocess.run([*command, "--", "bard.py"], cwd=folder, env=environment, timeout=SAME_SECONDS,
                                  capture_output=True, text=True)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UserError(
                f"no verdict of same within {SAME_SECONDS:.0f} s; run this cell again"
            ) from None
        if not (folder / "said.json").exists():
            raise AssertionError(f"{(done.stderr.strip().splitlines() or ['no verdict'])[-1]}.")
        verdict = json.loads((folder / "said.json").read_text())["worlds"][0]
    found = "; ".join(
        f"{finding['name']}: {finding['what']}; {finding['remedy']}" for finding in verdict["findings"][:1]
    )
    assert verdict["verdict"] == "same", f"{verdict['said']}. {found or '; '.join(verdict['notes'])}."
    return verdict["notes"]


AGAIN = "What it submits stops in time, saves, and resumes with the same losses, however often its time limit comes."


def check_94_5(path):
    to_script, (script, whose) = read(check_text(path)), own_job.own_training()
    requeues.require_progress(path, to_script, "bard-{}/.metadata")
    with trial(nodes=1) as place:
        if not place:
            return f"{READ} {AGAIN}"
        whole = (
            losses_at(run(script, 1)[0]) if script else {step: 5 - step / 10 for step in (5, 10, 15, 20)}
        )
        assert whole, "bard.py prints no step with its loss."
        own_job.tried(path, to_script, script, whole, *place)
    return f"{TRIED} It trained with {whose}. {AGAIN}"


def read(text):
    """Judge what no trial of some seconds can show; return whether the warning goes to the script itself."""
    for word in ("--size wanted", "--bf16"):
        assert word in text, f"It trains without {word}, so not at the size that was wanted."
    to_script, limit = requeues.read(text), slurm.limit(Script(text).value("time") or "10-0")
    assert limit <= 86_400, f"The time limit is {limit:.0f} s; the partition allows a day."
    return to_script
