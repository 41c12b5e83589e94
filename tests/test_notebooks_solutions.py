"""The solutions of every notebook: each check accepts its answer, in a fresh copy of the project without Slurm."""

import pytest
from project import fresh_copy

from notebooks import NBVAL_LIMIT, nbval, notebooks


@pytest.mark.timeout(NBVAL_LIMIT + 60)
@pytest.mark.parametrize("name", [path.stem for path in notebooks(["solutions"])])
def test_solutions_give_the_saved_outputs(name, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    done = nbval(f"solutions/{name}", fresh_copy(tmp_path / "project"))
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
