"""A pytest plugin: the ten slowest files, tests and cells of notebooks are printed at the end.

A notebook is one test, which nbval runs in a process of its own; notebooks/conftest.py notes its cells' seconds.
"""

import os
import tempfile
from collections import Counter
from pathlib import Path

SHOWN = 10
NOTES = "MPDEMO_CELL_SECONDS"  # the file of the notes


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # workers have the environment of the process that started them
        descriptor, os.environ[NOTES] = tempfile.mkstemp(prefix="cells-")
        os.close(descriptor)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        Path(os.environ.pop(NOTES)).unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter):
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    tests = [(report.duration, report.nodeid) for report in reports if report.when == "call"]
    files = Counter()
    for report in [*reports, *terminalreporter.stats.get("", [])]:  # these: setting up and tearing down
        files[report.nodeid.partition("::")[0]] += report.duration
    lines = [line.split(" ", 1) for line in Path(os.environ[NOTES]).read_text().splitlines()]
    cells = [(float(seconds), where) for seconds, where in lines]
    for what, rows in (
        ("files", [(seconds, file) for file, seconds in files.items()]),
        ("tests", tests),
        ("cells of notebooks", cells),
    ):
        if len(rows) > SHOWN:
            total = sum(seconds for seconds, _ in rows)
            terminalreporter.section(f"slowest {what}, of {total:.0f} s in all")
            for seconds, where in sorted(rows, reverse=True)[:SHOWN]:
                terminalreporter.write_line(f"{seconds:6.1f} s  {where}")
