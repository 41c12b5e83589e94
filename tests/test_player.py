"""The step player in a browser: its model beside the simulator, its numbers, keys, guesses, looks and outputs."""

import itertools
import json
import re
from statistics import median

import documents
import nbformat
import players
import pytest
from labserver import NEEDS_CHROMIUM, chromium_page
from PIL import Image

from mpdemo.errors import UserError
from mpdemo.measure.timeline import waiting
from mpdemo.notebook import player as package
from mpdemo.notebook.check import exercises
from mpdemo.notebook.player import STRATEGIES, page, player, recording, sliders_of_the_page
from mpdemo.predict import simulate

MODELS = [key for key in STRATEGIES if key != "all"]
RECORDED = sorted(path.stem for path in (package.HERE / "recordings").glob("*.json"))
SCHEDULES = {  # of the player -> of the simulator, and the stages of a rank
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved": ("Interleaved1F1B", 2),
    "zb": ("InterleavedZeroBubble", 2),
}
LARGEST = 140_000  # bytes of an output; a third more where every strategy is drawn
pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def browser():
    """One page for all tests; what fails in its scripts fails a test."""
    errors = []
    with chromium_page(900, 900) as window:
        window.on("pageerror", lambda error: errors.append(str(error)))
        yield window
    assert not errors


@pytest.fixture
def shown(browser, tmp_path):
    """Return what opens a player with some options, after resetting what an earlier test has set."""

    def show(steps=(), width=900, **options):
        browser.set_viewport_size({"width": width, "height": 900})
        (tmp_path / "player.html").write_text(page(options, list(steps)))
        browser.goto((tmp_path / "player.html").as_uri())
        return browser

    browser.emulate_media(color_scheme="light", reduced_motion="no-preference", forced_colors="none")
    return show


SIZES = "ranks", "microbatches", "layers"
SETTINGS = [(2, 4, 8), (4, 4, 8), (4, 8, 8), (4, 8, 16), (8, 8, 16), (2, 2, 4)]


@pytest.mark.parametrize("strategy", SCHEDULES)
def test_a_modelled_pipeline_is_the_simulated_one(shown, strategy):
    window, (schedule, each) = shown(strategy=strategy), SCHEDULES[strategy]
    for bandwidth, sizes in itertools.product((2, 400), SETTINGS):
        settings = dict(zip(SIZES, sizes, strict=True)) | {"bandwidth": bandwidth}
        step = window.evaluate("settings => model({ ...state, ...settings })", settings)
        ranks, microbatches, stages = sizes[0], sizes[1], sizes[0] * each
        forward = [0.008 * step["layers"] / stages / microbatches] * stages
        delay = 3 * 16e6 / 8 / microbatches / (bandwidth * 1e9) + 10e-6
        backward = [2 * seconds for seconds in forward]
        rows = simulate(schedule, forward, backward, microbatches, ranks, communication=delay).events
        # a first stage has no gradient of its input
        simulated = times_of(row for row in rows if row["end"] > row["start"])
        modelled = times_of(event for event in step["events"] if event["kind"] in "FBIW")
        assert modelled == {event: pytest.approx(times) for event, times in simulated.items()}, settings


def times_of(events) -> dict:
    """Return when each event begins and ends, by what it is."""
    return {
        (event["rank"], event["stage"], event["kind"], event["microbatch"]): (event["start"], event["end"])
        for event in events
    }


ADDS_UP = """strategy => { const bad = [];
  for (const broken of [null, ...STRATEGIES[strategy].breaks])
    for (const ranks of [2, 8]) for (const layers of [2, 8]) for (const bandwidth of [0.5, 400]) {
      if (ranks < (STRATEGIES[strategy].fewest ?? 0)) continue;
      const step = model({ ...state, strategy, broken, ranks, layers, bandwidth }), figures = summarise(step);
      const hangs = ["only0", "swapped"].includes(broken), works = step.events.filter(e => e.lane === "compute");
      const busy = range(ranks).map(rank => sum(works.filter(e => e.rank === rank).map(e => e.end-e.start))/step.end);
      const low = Math.min(...step.memory.flat(2));
      const least = Math.min(...busy.map((share, rank) => share+figures.idles[rank]));
      if (Boolean(step.hang) !== hangs || low < 0) bad.push([broken, ranks, layers, "hangs, or less than no memory"]);
      if (!hangs && (least < 0.98 || step.single/step.end > ranks*1.001)) bad.push([broken, ranks, layers, least]);
    }
  return bad; }"""


@pytest.mark.parametrize("strategy", MODELS)
def test_computing_and_waiting_are_the_step_and_a_hang_is_only_where_one_is_expected(shown, strategy):
    assert shown(strategy=strategy).evaluate(ADDS_UP, strategy) == []


LONGER = {"overlap": "ddp", "prefetch": "fsdp", "slow": "tp"}


def test_what_is_broken_takes_longer_and_a_dropped_sampler_does_not(shown):
    window = shown(strategy="ddp")
    ends = "([strategy, broken]) => [null, broken].map(broken => model({ ...state, strategy, broken }).end)"
    for broken, strategy in LONGER.items():
        before, after = window.evaluate(ends, [strategy, broken])
        assert after > 1.01 * before, broken
    before, after = window.evaluate(ends, ["fsdp", "sampler"])
    assert after == before
    window.click("[data-key=bsampler]")
    assert "0.83 times" in window.inner_text(".stats") and "no error is raised" in window.inner_text(
        ".verdict"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_page_fits_a_desk_and_a_phone_in_both_themes(shown, strategy):
    options = {"all": True} if strategy == "all" else {"strategy": strategy, "ranks": 4}
    for width, theme in ((900, "dark"), (390, "light")):
        window = shown(width=width, theme=theme, **options)
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        assert window.locator("svg[role=img] .event").count() > 20
        said = window.get_attribute("svg[role=img]", "aria-label")
        assert " ms" in said and "exposed communication" in said
        if width == 900:  # JupyterLab shows 680 pixels of it: what a slider changes is seen while it moves
            sliders = [box.bounding_box() for box in window.locator(".sliders label").all()]
            seen = window.locator("h1").bounding_box()["y"] + 680
            assert max(box["y"] + box["height"] for box in sliders) < seen, "the sliders are below the fold"
        assert window.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(21, 24, 29)" if theme == "dark" else "rgb(251, 250, 247)"
        )


def test_keys_move_from_event_to_event_and_what_happens_is_said(shown):
    window = shown(strategy="fsdp")
    window.keyboard.press("Home")
    window.keyboard.press("ArrowRight")
    said = window.inner_text(".say[aria-live=polite]")
    assert said.startswith(
        "4.01 ms. Rank 0: forward of layer 0, while its all-gather is under way. Rank 1:"
    )
    assert window.get_attribute("[data-key=scrub]", "aria-valuetext") == said
    window.keyboard.press("ArrowLeft")
    assert window.evaluate("state.at") == 0
    window.keyboard.press(" ")
    window.wait_for_function("state.at > 0 && state.playing")
    window.keyboard.press(" ")
    assert not window.evaluate("state.playing")
    window.keyboard.press("End")
    window.click("summary")
    window.wait_for_function("document.querySelectorAll('tbody tr').length > 30")
    assert "all-gather of the weights of layer 0" in window.inner_text("tbody")


def test_a_guess_comes_first_and_is_compared(shown):
    window = shown(strategy="gpipe", predict=True)
    assert window.is_disabled("[data-key=play]") and window.locator(".event").count() == 0
    assert (
        window.get_attribute("svg[role=img]", "aria-label") == "The step is hidden until you have guessed."
    )
    window.check("input[type=radio] >> nth=2")
    window.locator("fieldset input[type=range]").fill("21")
    window.click("text=Lock in and play")
    window.evaluate("seek(step.end*0.98)")
    window.wait_for_selector("text=You saw it coming.")
    assert "you said 21 %; it is 21 %: 2 % exposed communication and 20 % waiting" in window.inner_text(
        ".card >> nth=0"
    )


def test_without_motion_play_jumps_from_event_to_event(shown, browser):
    browser.emulate_media(reduced_motion="reduce")
    window = shown(strategy="ddp", at=0)
    window.click("[data-key=play]")
    window.wait_for_function("state.at > 0")
    assert window.evaluate("moments().includes(state.at)")


def test_forced_colours_leave_every_text_visible(shown, browser):
    browser.emulate_media(forced_colors="active")
    window = shown(strategy="1f1b", broken="slow")
    same = """() => [...document.querySelectorAll("button, h1, p, .tip, .verdict")].filter(element => {
      const look = getComputedStyle(element); return look.color === look.backgroundColor; }).map(e => e.textContent)"""
    assert window.evaluate(same) == []
    assert window.evaluate("getComputedStyle(document.querySelector('.event')).stroke") == "rgb(0, 0, 0)"


def test_a_link_to_another_strategy_and_a_slider_draw_anew(shown):
    window = shown(all=True)
    before = window.get_attribute("svg[role=img]", "aria-label")
    window.locator("[data-key=bandwidth]").fill("1")
    after = window.get_attribute("svg[role=img]", "aria-label")
    assert before != after and window.evaluate("document.activeElement.dataset.key") == "bandwidth"
    window.click("text=Zero bubble")
    assert "Zero bubble, modelled" in window.get_attribute("svg[role=img]", "aria-label")
    assert window.inner_text("output >> nth=4") == "1 GB/s"


HOLDER = '<!doctype html><body data-theme="{theme}"><main>{output}</main></body>'


def test_an_output_is_a_still_with_its_numbers_until_the_player_takes_its_place(browser, tmp_path):
    output = player("fsdp")
    (tmp_path / "page.html").write_text(HOLDER.format(theme="dark", output=output.data["text/html"]))
    browser.goto((tmp_path / "page.html").as_uri())
    browser.wait_for_selector("[data-still]", state="detached")
    frame = browser.frames[1]
    assert frame.evaluate("document.documentElement.classList.contains('dark')")
    assert browser.evaluate("frameElementHeight = document.querySelector('iframe').offsetHeight") > 400
    browser.evaluate("document.body.dataset.theme = 'light'")
    frame.wait_for_function("!document.documentElement.classList.contains('dark')")
    quiet = browser.context.browser.new_context(java_script_enabled=False).new_page()
    quiet.goto((tmp_path / "page.html").as_uri())
    still = quiet.locator("[data-still] img")
    assert still.get_attribute("alt") == repr(output) and still.bounding_box()["height"] > 150
    assert "run this cell" in quiet.inner_text("[data-still] p")


def test_a_player_of_own_steps_has_a_still_as_well():
    html = player("puzzle", predict=True).data["text/html"]
    assert re.search(r'<div data-still><img [^>]*alt="Recorded: fully_shard[^>]*>', html)


def test_the_player_answers_the_exercise_of_72(shown):
    window = shown(all=True, bandwidth=4)
    fastest = "step.teams.reduce((a, b) => b.end < a.end ? b : a).name.toLowerCase()"
    assert window.evaluate(fastest) == "fsdp"
    window.locator("[data-key=bandwidth]").fill("2")
    assert window.evaluate(fastest) == exercises("72")["72.2"]["right"]
    assert window.inner_text("output >> nth=4") == "2 GB/s"
    assert (
        window.evaluate("step.teams.map(team => team.name.toLowerCase())")
        == exercises("72")["72.2"]["choices"]
    )


def is_missing(image, colour):
    """Whether no pixel comes near a colour, such as "#e2762b"."""
    wanted = bytes.fromhex(colour[1:])
    found = image.convert("RGB").getcolors(10**6)
    return not any(max(abs(a - b) for a, b in zip(rgb, wanted, strict=True)) < 12 for _, rgb in found)


def test_every_still_and_every_saved_player_is_of_this_version():
    """After a change of the player: python tests/players.py."""
    pages, stills = players.shown(), {path.stem: path for path in (package.HERE / "stills").glob("*.png")}
    assert set(pages) == set(stills)
    for name, path in stills.items():
        with Image.open(path) as image:
            assert image.info["page"] == players.digest(pages[name]), f"{name} is stale"
            if name.startswith("hsdp"):  # where colours of a small palette were mixed
                mixed = sum(
                    is_missing(image, colour) for colour in ("#2fb08c", "#e2762b", "#e9c92f", "#4a8fd6")
                )
                assert not mixed, f"{name}: a kind of work or message has another one's colour"
    for path in documents.notebooks():
        for cell, words, options in players.calls(nbformat.read(path, as_version=4)):
            saved = cell.outputs[-1].data["text/html"]
            assert saved == player(*words, **options).data["text/html"], f"{path.stem}, {cell.id}"
            assert len(saved) < LARGEST * (4 / 3 if words == ["all"] else 1)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_waits_in_the_page_as_it_does_for_python(shown, name):
    window = shown([step := recording(name)], source="recorded")
    gaps = window.evaluate("figures.gaps.flat()")
    for kind, same in {"exposed": "exposed", "wait": "waits"}.items():
        for rank in range(step["ranks"]):
            in_page, in_python = lasting(gaps, rank, kind), lasting(waiting(step["events"]), rank, same)
            assert in_page == pytest.approx(in_python, abs=1e-3 * step["end"]), (kind, rank)
    assert "Recorded:" in window.inner_text("#app") and window.locator("text=Break it").count() == 0
    if name == "ddp":
        named = " | ".join(gap["name"] for gap in gaps)
        assert re.search(r"has joined the all-reduce, waits for rank [01]\b", named)


def lasting(gaps, rank, kind):
    return sum(gap["end"] - gap["start"] for gap in gaps if (gap["rank"], gap["kind"]) == (rank, kind))


def test_bad_input_is_one_line():
    for words, options, said in [
        ("ddpp", {}, "no recording 'ddpp'"),
        ("ddp", {"bandwith": 1}, "did you mean 'bandwidth'"),
        ("ddp", {"broken": "all"}, "unknown way to break it 'all'"),
        ("x" * 300, {}, "no recording 'xxx"),
        *[(words, {}, "^a strategy, .*, is a text; not ") for words in (None, 5, ["ddp"], float("nan"))],
        *[
            ("ddp", {"ranks": n}, "^ranks .* is not allowed; allowed: 2, 4, 6, 8$")
            for n in (-5, 3, 1e9, "<b>", [1], True)
        ],
        *[
            ("ddp", {name: float("nan")}, f"^{name} nan is not allowed; allowed: ")
            for name in sliders_of_the_page()
        ],
    ]:
        with pytest.raises(UserError, match=said):
            player(words, **options)
    key, page, _ = package.contents("ddp", predict=float("nan"), ranks=4.0, bandwidth=400)
    assert (
        "NaN" not in page.partition('id="data">')[2].partition("<")[0]
        and key == "ddp-bandwidth-400-predict-True-ranks-4"
    )
    with pytest.raises(ValueError, match="not JSON"):
        package.page({}, [{"end": float("nan")}])


def test_the_values_of_the_sliders_are_those_of_the_page(shown):
    """What Python allows is what the script reads of itself."""
    of_the_script = "Object.fromEntries(Object.entries(SLIDERS).map(([key, row]) => [key, row[2]]))"
    assert shown(strategy="ddp").evaluate(of_the_script) == sliders_of_the_page()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp"])  # pipelines are compared with the simulator
def test_a_recorded_step_takes_as_long_as_its_measured_parts_say(shown, name):
    """Within 15 %."""
    window = shown([step := recording(name)], source="recorded")
    given = measured(step, window.evaluate("figures.other"))
    modelled = window.evaluate("given => model({ ...state, ...given }).end", given)
    assert modelled == pytest.approx(step["end"], rel=0.15), json.dumps(given)


def measured(step, other) -> dict:
    """Return the model's settings that a recording says; copies and Python, a share `other`, count as computing."""
    kinds = {}
    for row in step["events"]:
        kinds.setdefault(row["kind"], []).append(row)
    # of all ranks
    seconds = {kind: sum(row["end"] - row["start"] for row in rows) for kind, rows in kinds.items()}
    ranks, name = step["ranks"], step["strategy"]
    busy = 1 + other * step["end"] * ranks / (seconds["F"] + seconds["B"] + seconds["O"])
    layers = 1 + max(row.get("layer", 0) for row in kinds["F"])
    sent = [row for kind in "AGR" for row in kinds.get(kind, []) if row["end"] > row["moves"]]
    around = {"A": 2}  # a ring's all-reduce is a reduce-scatter and an all-gather
    rates = [
        around.get(row["kind"], 1) * (ranks - 1) / ranks * row["bytes"] / (row["end"] - row["moves"])
        for row in sent
    ]
    reduced = kinds.get("R", kinds.get("A"))
    return {
        "strategy": name,
        "broken": "prefetch" if name == "fsdp" else None,  # with gloo, a gather blocks what computes
        "ranks": ranks,
        "layers": layers,
        "compute": 1e3 * busy * seconds["F"] / layers,
        "backward": seconds["B"] / seconds["F"],
        # a rank of DDP updates all weights, another one a part of them
        "update": seconds["O"] / (ranks if name == "ddp" else 1) / seconds["F"],
        "size": sum(row["bytes"] for row in reduced if row["rank"] == 0) / layers / 1e6,
        "bandwidth": median(rates) / 1e9,
        "latency": 0,
        "passed": max((row["bytes"] for row in kinds.get("A", [])), default=0),
    }
