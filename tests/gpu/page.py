"""Say in notebooks/on_a_gpu.md and in README.md what the records in notebooks/gpu show, of each part the newest.

    python tests/gpu/page.py

Both have a place for it between two comments. A record is one of record.py, under a name that begins with its date.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "notebooks/gpu"
SCRIPTS = ROOT / "notebooks/scripts"
PAGE, README = ROOT / "notebooks/on_a_gpu.md", ROOT / "README.md"
REFERENCE = "notebooks/12_one_step.ipynb"  # which says what its saved outputs are from
NOT_RUN = "not started", "no time left"
MODULES = "gpt", "job"  # in notebooks/scripts, and no scripts
BEGIN, END = "<!-- from the newest record -->", "<!-- end of the record -->"


def newest(folder=RECORDS) -> dict:
    """Return the newest record, by its name, with parts that only older ones have; none of a removed script.

    A part of a notebook is left out: it names one of an edition that numbered them otherwise.
    """
    parts = {}
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text())
        for part in record["parts"]:
            name = part["part"]
            script = re.match(r"(?:two_)?((?:first|train|finetune)_\w+)", name)
            there = "notebook" not in name and (not script or (SCRIPTS / f"{script[1]}.py").exists())
            if part["outcome"] not in NOT_RUN and there:
                parts[name] = with_older_rows(part | {"record": file.name}, parts.get(name))
    return record | {"parts": list(parts.values())}


def with_older_rows(part, older) -> dict:
    """Return a part with the tests, or variants, that only an older record of it has run, or has not skipped."""
    rows = {key(row): row for row in (older or {}).get("rows", []) if key(row) and still_there(row)}
    if not rows:
        return part
    for row in part.get("rows", []):
        if row.get("outcome") != "skipped" or rows.get(key(row), row)["outcome"] == "skipped":
            rows[key(row)] = row
    outcome = part["outcome"]
    # not one that timed out, whatever its rows say
    if part["part"] == "tests" and outcome in ("passed", "failed"):
        outcome = "failed" if any(row["outcome"] == "failed" for row in rows.values()) else "passed"
    return part | {"rows": list(rows.values()), "outcome": outcome}


def key(row) -> str | None:
    """Return what identifies a test, or a variant of a model that was timed; None for any other row."""
    if "options" in row and "measured_gib" not in row:  # those of the plan
        return "+".join(sorted(row["options"])) or "eager"
    return row.get("test")


def still_there(row) -> bool:
    """Return whether a test has not been removed since its row was written; True of any other row."""
    name = row.get("test", "").split("::")[-1].split("[")[0]
    return any(name in file.read_text() for file in (ROOT / "tests/gpu").glob("test_*.py"))


def status(record) -> str:
    """Return the sentences of the README: what has run on a GPU, and whether anything has run on two."""
    ran, missing = scripts(record)
    tests = [row["outcome"] for part in record["parts"] if part["part"] == "tests" for row in part["rows"]]
    skipped, failed = (tests.count(kind) for kind in ("skipped", "failed"))
    passed = [part["outcome"] == "passed" for part in record["parts"] if needs_two(part)]
    of_scripts = f"{len(ran)} of the course's {len(ran + missing)} scripts, as they were then"
    begun = f"One {record['device']} has run {of_scripts}, and {len(tests) - skipped} of the {len(tests)} GPU tests; "
    ended = f"{skipped} were skipped, {failed} failed ({record['date'][:10]}, PyTorch {record['torch']})"
    two = (
        f"On two, {sum(passed)} of {len(passed)} parts passed" if passed else "Nothing has run on two GPUs"
    )
    return f"{begun}{ended}. **{two}.**"


def needs_two(part) -> bool:
    """Return whether a part of a record runs on two GPUs; two_stages shares one."""
    return part["part"].startswith("two_") and part["part"] != "two_stages"


def scripts(record) -> tuple[list, list]:
    """Return the names of the scripts to take home that have passed on a GPU, and of those that have not."""
    names = sorted({file.stem for file in SCRIPTS.glob("*.py")} - set(MODULES))
    passed = {part["part"].removeprefix("two_") for part in record["parts"] if part["outcome"] == "passed"}
    return [name for name in names if name in passed], [name for name in names if name not in passed]


def page(record) -> str:
    """Return what the page says of a record."""
    saved = re.search(r"Saved outputs: PyTorch ([\d.]+)", (ROOT / REFERENCE).read_text())[1]
    never = [f"`{name}.py`" for name in scripts(record)[1]]
    never += ["anything on two GPUs"] * (not any(map(needs_two, record["parts"])))
    rows = {}  # outcome and what it showed -> the parts: many have nothing more to say
    for part in record["parts"]:
        rows.setdefault((part["outcome"], said(part)), []).append(f"[{part['part']}](gpu/{part['record']})")
    return "\n".join([
        f"**Last run on {record['date']}**: {record['device']}, driver {record['driver']}, PyTorch {record['torch']}; "
        f"the notebooks' saved outputs are from {saved}.",
        f"**Never run on a GPU**: {', '.join(never) or 'nothing'}.\n",
        *table(("part", "outcome", "what it showed"), [(", ".join(parts), *row) for row, parts in rows.items()]),
        *(line for part in record["parts"] for line in details(part)),
    ])  # fmt: skip


def table(head, rows) -> list[str]:
    """Return a table of Markdown; a bar within a cell would end it."""
    lines = [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)
    ]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def said(part) -> str:
    """Return what a part came to: of tests how many passed, of other programs that failed their last line."""
    outcomes = [row["outcome"] for row in part.get("rows", []) if "outcome" in row]
    if outcomes:
        return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    if "why" in part:
        return part["why"]
    output = [line for line in part.get("output", []) if line.strip()]
    return output[-1].strip()[:120] if output and part["outcome"] != "passed" else ""


def details(part) -> list[str]:
    """Return the tables and lists of one part; [] where it has none."""
    rows = part.get("rows", [])
    if part["part"] == "tests":
        told = {}  # outcome and reason -> the tests, each once: most are skipped for the same lack of GPUs
        for row in (row for row in rows if row["outcome"] != "passed"):
            why = f"{row['outcome']}, {last(row).removeprefix('Skipped: ')}"
            told.setdefault(why, {})[f"`{row['test'].split('::')[-1].split('[')[0]}`"] = True
        lines = [f"- {why}: {', '.join(tests)}" for why, tests in told.items()]
        return ["", "Tests that did not pass:\n", *lines] if lines else []
    if part["part"] in ("gpt", "resnet") and rows:
        unit = "tokens" if part["part"] == "gpt" else "images"
        name, speed = f"{rows[0]['model']}, batch {rows[0]['batch']}", f"{unit} per second (95 % interval)"
        head = (name, speed, "MFU", "peak memory")
        return ["", *table(head, [throughput(row, unit) for row in rows])]
    if part["part"] == "predicted" and rows:
        return [
            "",
            *table(("planned and measured", "memory", "planned", "step", "planned"), map(prediction, rows)),
        ]
    if part["part"] == "memory" and rows:
        ratios = [f"{row['counted'] / row['predicted']:.3f}" for row in rows]
        return [
            "",
            f"Peak memory in {len(rows)} cases: {min(ratios)} to {max(ratios)} times what was planned.",
        ]
    if part["part"].startswith("efficiency") and rows:
        return ["", f"Fraction of the plan's roof: {efficiency(rows)}."]
    if needs_two(part) and rows:
        row = rows[-1]
        speedup = f"{row['speedup']:.2f}{interval(row['speedup_interval'], '.2f')}"
        return ["", f"{row['rung']} on two GPUs: speed-up {speedup}, upper bound {row['bound']:.2f}."]
    return []


def last(row) -> str:
    """Return the line that says why a test did not pass: pytest's last ``E``, or the last of all."""
    lines = row.get("why", "").strip().splitlines() or [""]
    return next((line[2:] for line in reversed(lines) if line.startswith("E ")), lines[-1]).strip()[:160]


def throughput(row, unit) -> tuple:
    """Return a variant's name, speed, MFU and memory."""
    name = " + ".join(row["options"]) or "eager, bf16"
    if "error" in row:
        return name, row["error"][:120], "", ""
    seconds = row["median_seconds"]
    ends = [end and row[f"{unit}_per_second"] * seconds / end for end in reversed(row["interval_seconds"])]
    speed = f"{row[f'{unit}_per_second']:,.0f}{interval(ends, ',.0f')}"
    return name, speed, f"{row['mfu']:.1%}", in_gib(row["peak_memory_gib"])


def interval(ends, form) -> str:
    """Return the 95 % interval as text; nothing where there were too few rounds for one."""
    return f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends and None not in ends else ""


def prediction(row) -> tuple:
    """Return a variant's memory and time, each as measured and as planned."""
    times = [f"{1000 * row[key]:.0f} ms" for key in ("measured_seconds", "predicted_seconds")]
    times[1] += f" ± {row['predicted_spread']:.0%}" if "predicted_spread" in row else ""
    name = f"{row['model']}, {' + '.join(row['options']) or 'eager'}"
    return name, in_gib(row["measured_gib"]), in_gib(row["predicted_gib"]), *times


def efficiency(rows) -> str:
    """Return the lowest and the highest fraction of the roof that each class of kernel reached."""
    found = {}
    for row in (row for row in rows if "error" not in row):
        found.setdefault(row["class"].split(",")[0], []).append(row["fraction"])
    ends = {name: dict.fromkeys(f"{end(each):.2f}" for end in (min, max)) for name, each in found.items()}
    return ", ".join(f"{name} {' to '.join(each)}" for name, each in ends.items())


def in_gib(number) -> str:
    """Return memory as text; where it was not measured, a dash."""
    return "-" if number is None else f"{number:.1f} GiB"


def pages() -> dict[Path, str]:
    """Return both files as they should be."""
    record, place = newest(), f"(?s)(?<={BEGIN}).*(?={END})"
    contents = {PAGE: f"\n{page(record)}\n", README: status(record)}
    return {path: content.join(re.split(place, path.read_text())) for path, content in contents.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
