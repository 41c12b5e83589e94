"""A pytest plugin: in CI a skipped test is a failure.

A test is skipped only where a system package is missing, and CI has them all; a test that quietly no longer runs
would otherwise stay green. Those of tests/gpu are skipped wherever there are too few GPUs.
"""

import pytest
from setup_system import in_ci


def skipped(reporter) -> list:
    reports = reporter.stats.get("skipped", [])
    return [report.nodeid for report in reports if in_ci() and not report.nodeid.startswith("tests/gpu/")]


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # a worker of xdist has none
    if exitstatus == pytest.ExitCode.OK and reporter and skipped(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if names := skipped(terminalreporter):
        terminalreporter.write_line(
            f"ERROR: {len(names)} skipped, and in CI none may be: {', '.join(names)}", red=True
        )
