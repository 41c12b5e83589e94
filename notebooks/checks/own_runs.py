"""Runs a reader's own training script as it is, in real processes, and asks ``mpdemo same`` about it.

A script is a file, or its text. What it does is noted by own_script.py, which begins before its first line.
"""

import json
import subprocess
import sys
import tempfile

from checks.own_job import LOSS, SCRIPTS, files_of, filled, text_of
from mpdemo import ranks
from mpdemo.errors import UserError
from mpdemo.notebook.check import checks
from mpdemo.paths import root
from mpdemo.world.processes import child_environment

FOUND = SCRIPTS / "found" / "bard.py"
SECONDS = 90.0  # limit for a run of the script: twenty steps of a small model
SAME_SECONDS = 400.0  # limit for `same`: three or four runs
PREFIX = (
    "import os, sys, types; sys.path.insert(0, os.getcwd()); os.chdir({place!r}); "
    "sys.modules['checks'] = package = types.ModuleType('checks'); package.__path__ = [{folder!r}]; "
    "from checks import own_script; own_script.watch(**{how!r}); "
    "__file__ = 'bard.py'; sys.argv = ['bard.py', *{words!r}]; "
)


def run(script, processes, *words, place=".", seconds=SECONDS, **how):
    """Run the script in so many processes; return what the first printed, and what each was seen to do.

    `place` is the folder in which it works, by default one that goes away; `how` says what happens to it.
    """
    source = PREFIX.format(place=str(place), folder=str(checks()), how=how, words=words) + text_of(script)
    noted, files = "own_script.noted()", files_of(script)
    results = ranks.run_program(source, noted, processes, seconds, group=False, files=files)
    for _, _, error in results:
        assert not error, error
    seen = [noted | {"printed": printed} for printed, noted, _ in results]
    assert all(noted.get("steps") for noted in seen), "It makes no step of an optimizer."
    return results[0][0], seen


def losses(printed) -> list:
    """Return the losses that were printed."""
    return [
        float(number)
        for number in LOSS.findall("\n".join(printed) if isinstance(printed, list) else printed)
    ]


def judged(script, *options):
    """Require that `same` accepts the script."""
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
    said = verdict["notes"]
    for finding in verdict["findings"][:1]:
        said = [f"{finding['name']}: {finding['what']}", finding["remedy"]]
    assert verdict["verdict"] == "same", f"mpdemo same says {verdict['verdict']}. {'; '.join(said)}."
