"""A pytest plugin: in CI a skipped test is a failure, elsewhere the skips are counted at the end.

A test that failed and passed when it ran once more is printed with its first failure.

A test is skipped only where a system package is missing, and CI has them all; a test that quietly no longer runs
would otherwise stay green for ever. Those of tests/gpu are skipped wherever there are too few GPUs.
"""

import pytest
from setup_system import in_ci

skipped = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[skipped] = []
    config.pluginmanager.register(Recorder(config.stash[skipped]), "recorder of skips")


class Recorder:
    """Keeps the reports of skipped tests and of skipped files."""

    def __init__(self, reports):
        self.reports = reports

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail") and not report.nodeid.startswith("tests/gpu/"):
            self.reports.append(report)

    def pytest_collectreport(self, report):
        if report.skipped:
            self.reports.append(report)


def pytest_sessionfinish(session, exitstatus):
    if in_ci() and session.config.stash[skipped] and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"failed at first: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext[-4000:])
    reports = config.stash[skipped]
    if reports and in_ci():
        names = ", ".join(report.nodeid for report in reports)
        terminalreporter.write_line(f"ERROR: {len(reports)} skipped, and in CI none may be: {names}", red=True)
