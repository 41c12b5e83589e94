"""These tests need GPUs; `make gpu` runs them alone. ``GPU_TESTS_ON=cpu`` runs them without one, to test the tests."""

import json
import os
from pathlib import Path

import pytest
from record import END_OF_TESTS
from visible import show_gpus
from xdist.scheduler import LoadScheduling

from mpdemo.world.devices import gpus_here

ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"
AVAILABLE = 2 if ON_CPU else gpus_here()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(count): this test needs so many GPUs (1 unless said)")
    if config.option.xmlpath and not hasattr(config, "workerinput"):  # in the process that has all outcomes
        config.pluginmanager.register(Rows(Path(config.option.xmlpath).with_suffix(".jsonl")))


class Rows:
    """Write each test's outcome at once, beside the junit file, which is lost if the run is cut."""

    def __init__(self, file):
        self.file = file
        file.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:  # preparing and cleaning up
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
        if not report.passed:
            row["why"] = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-3000:]
            )
        with self.file.open("a") as rows:
            rows.write(json.dumps(row) + "\n")

    def pytest_sessionfinish(self):
        with self.file.open("a") as rows:
            rows.write(END_OF_TESTS)


def pytest_xdist_make_scheduler(config, log):
    """Any test may run in any worker: these share no fixtures that take long."""
    return LoadScheduling(config, log)


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("gpus")
    needed = marker.args[0] if marker else 1
    if needed > AVAILABLE:
        pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, {AVAILABLE} here")


@pytest.fixture(scope="session", autouse=True)
def see_the_gpus():
    """The other tests compute on the CPU; the processes of these see the GPUs, and float32 is float32 (no TF32)."""
    if not ON_CPU:
        show_gpus()
    # KiB that no tensor takes
    os.environ |= {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}


@pytest.fixture(scope="session")
def count():
    """How many GPUs the rungs of several devices use."""
    return min(AVAILABLE, 2)
