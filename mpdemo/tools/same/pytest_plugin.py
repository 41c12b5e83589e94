"""For pytest, which finds it by itself: ``def test_training(same): same("train.py", "--epochs", "1")``."""

import pytest

from mpdemo.tools.same import check


@pytest.fixture
def same():
    """Check that a script is the same training on one process and on two; options as in `mpdemo.tools.same.check`."""
    return check
