"""The step player: one training step of each strategy, drawn from events, to be played, guessed and broken.

`player("fsdp")` shows a step that is modelled in the page, ``player("fsdp", recorded=True)`` one that was recorded, and
``player("traces/rank*.json.gz")`` one of yours, from the traces of torch.profiler. The data are made here; player.js
draws them, and models what is not recorded. Where no script runs, the output is a still picture with its numbers.
"""

import base64
import functools
import html
import json
import os
import re
from numbers import Real
from pathlib import Path
from typing import Any

from PIL import Image

from mpdemo.errors import UserError, did_you_mean, text_of
from mpdemo.notebook.show import Bundle

HERE = Path(__file__).parent
STRATEGIES = {  # the keys of player.js, and their names
    "all": "All strategies",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "tp": "Tensor parallelism",
    "sp": "Sequence parallelism",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved 1F1B",
    "zb": "Zero bubble",
    "ring": "Ring context parallelism",
    "experts": "Expert parallelism",
}
# of player.js: its name and values
SLIDER = re.compile(r"^  (\w+): \[\".*?(\[[\d., ]+\]), [\d.]+\],$", re.MULTILINE)
BREAKS = ("overlap", "prefetch", "slow", "sampler", "only0", "swapped")
HEIGHT = 760  # pixels, until the page has set its own
# under the still, where no script runs, as in a notebook that isn't trusted
ASK = "A still picture: run this cell, and the step can be played."


def player(
    what: str = "all",
    *,
    recorded: bool = False,
    predict: bool = False,
    broken: str | None = None,
    **sliders: float,
) -> Bundle:
    """Show one training step.

    Parameters
    ----------
    what : str
        A strategy, "all", the name of a recording, or a pattern of your own traces, one per rank.
    recorded : bool
        Show the recording of this strategy; of "all", every recording.
    predict : bool
        Hide the step until the reader has guessed.
    broken : str, optional
        What is wrong with it: "overlap", "prefetch", "slow", "sampler", "only0" or "swapped".
    **sliders
        Where the sliders stand, each at one of its values: `ranks`, `layers`, `compute` (ms), `size` (MB), `bandwidth`
        (GB/s), `between`, `latency` (µs), `bucket` (MB), `microbatches`.

    Raises
    ------
    UserError
        An unknown strategy or option, a value that its slider doesn't have, or no such recording or trace.
    """
    key, page, steps = contents(what, recorded, predict, broken, **sliders)
    path, still = HERE / "stills" / f"{key}.png", ""
    text = f"One training step, played: {STRATEGIES.get(str(what), what)}."
    if os.path.exists(path):
        with Image.open(path) as image:
            text, width = image.info["alt"], image.info["width"]
        still = _image(base64.b64encode(path.read_bytes()).decode(), width, text)
    elif steps:  # of a reader's own run, say
        from mpdemo.notebook.plots import timelines

        drawn = timelines({step["title"]: step["events"] for step in steps}, unit="s")
        still = _image(drawn.data["image/png"], **drawn.metadata["image/png"])
    source = page.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;").replace(">", "&gt;")
    look = f'height="{HEIGHT}" style="width:100%;border:0"'
    frame = f"<iframe title=\"{html.escape(text)}\" {look} srcdoc='{source}'></iframe>"
    return Bundle(text, html=f"<div><div data-still>{still}<p>{ASK}</p></div>{frame}</div>")


def _image(data, width, alt) -> str:
    """Return a picture as HTML."""
    look = f'width="{width}" style="max-width:100%" alt="{html.escape(alt)}"'
    return f'<img {look} src="data:image/png;base64,{data}">'


@functools.cache
def sliders_of_the_page() -> dict[str, list]:
    """Return the values that each slider of the player has, by name."""
    return {name: json.loads(values) for name, values in SLIDER.findall((HERE / "player.js").read_text())}


def at_a_stop(name, value) -> float:
    """Return the value of a slider that equals a given one; a `UserError` says which there are."""
    known = sliders_of_the_page()
    if name not in known:
        raise UserError(f"unknown option {name!r}; allowed: {', '.join(known)}{did_you_mean(name, known)}")
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or value not in known[name]:
        raise UserError(f"{name} {value!r} is not allowed; allowed: {', '.join(map(str, known[name]))}")
    return known[name][known[name].index(value)]


def _lines(name) -> list[str]:
    return (HERE / name).read_text().splitlines()


def contents(
    what: str = "all",
    recorded: bool = False,
    predict: bool = False,
    broken: str | None = None,
    **sliders: float,
) -> tuple[str, str, list]:
    """Return the name of a player's still picture, its page and its recorded steps; arguments as of `player`."""
    what = text_of(what, "a strategy, a recording or a pattern of traces, as 'ddp',")
    sliders = {name: at_a_stop(name, value) for name, value in sliders.items()}
    if broken not in (None, *BREAKS):
        raise UserError(f"unknown way to break it {broken!r}; allowed: {', '.join(BREAKS)}")
    steps = _recordings(what, recorded)
    options = {
        **sliders,
        "broken": broken,
        "predict": bool(predict),
        "source": "recorded" if steps else None,
    }
    given = {name: value for name, value in sorted(options.items()) if value not in (None, False)}
    key = "-".join([what, *(f"{name}-{value}" for name, value in given.items())])
    given |= {"all": True} if what == "all" else {"strategy": what} if what in STRATEGIES else {}
    return key, page(given, steps, only=what not in STRATEGIES), steps


def recording(name: str) -> dict[str, Any]:
    """Return a recorded step by its name; a `UserError` says which there are."""
    files = {path.stem: path for path in sorted((HERE / "recordings").glob("*.json"))}
    if name not in files:
        raise UserError(
            f"no recording {name!r}; there are: {', '.join(files) or 'none'}{did_you_mean(name, files)}"
        )
    return json.loads(files[name].read_text())


def _recordings(what, recorded) -> list:
    """Return the steps that the page gets: recorded ones, or those of the reader's traces."""
    if re.search(r"[*/]|\.json(\.gz)?$", str(what)):
        from mpdemo.measure.traces import read

        return [read(what)]
    if what == "all" and recorded:
        names = [key for key in STRATEGIES if (HERE / "recordings" / f"{key}.json").exists()]
        return [recording(key) for key in names or ["ddp"]]
    return [recording(what)] if recorded or what not in STRATEGIES else []


def page(options: dict[str, Any], steps: list, only: bool = False) -> str:
    """Return the player as one HTML page that loads nothing; `only` recorded steps are offered in it."""
    data = json.dumps(
        {"options": options, "recordings": steps, "only": only}, separators=(",", ":"), allow_nan=False
    )
    data = data.replace("<", "\\u003c")
    script = " ".join(re.sub(r"(^|\s+)//\s.*", "", line.strip()) for line in _lines("player.js"))
    # one line, so that a notebook's diff has one
    look = " ".join(line.strip() for line in _lines("player.css"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>One training step, played</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{look}</style>"
        '<main><p id="fallback">This picture is drawn by a script, which does not run here.</p>'
        '<div id="app"></div></main>'
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></html>'
    )
