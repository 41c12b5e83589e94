"""mpdemo: one PyTorch training, taken from one device to many.

Public are the commands of ``mpdemo`` (`train`, `plan`, `same`, `explain` and so on), the rungs, which are
scripts of plain PyTorch (read two side by side and the difference is the lesson), and the names in `PUBLIC`. These have
type hints and keep their meaning; every other name may change at any time. ``mpdemo.labs`` belongs to the notebooks.

Importing mpdemo loads nothing else: ``mpdemo.jobs`` and the like are loaded when they are first used. So a login node
without much memory can use ``mpdemo.jobs``, ``mpdemo.notebook`` and ``mpdemo.predict`` without loading PyTorch.

``mpdemo.tools`` has the tools that outlive the course. They may import the course, never the reverse.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpdemo import data, jobs, models, notebook, predict, training

__version__ = "0.1.0"
__all__ = ["data", "jobs", "models", "notebook", "predict", "training"]

PUBLIC = {  # module of mpdemo: its public names
    "data": "SplitDataset load",
    "jobs": "Job JobFailed JobSpec Site SlurmError check load_site render spec_of submit",
    "tools.explain.findings": "find report",
    "measure.paired": "ROUNDS Median Ratio difference median ratio",
    "models": "Blocks build",
    "models.transformer": "Block Embed Head",
    "notebook.check": "check",
    "notebook.course": "check ladder measure player run show start_ranks",
    "notebook.plots": "bars curves grid matrices messages ring timelines",
    "paths": "root",
    "predict": "SCHEDULES Simulation simulate usual_stages_per_rank",
    "predict.counting": "LiveMemory",
    "tools.same": "NotTheSame check",
}


def __getattr__(name: str) -> Any:
    """Load a part of the package when it is first used: ``mpdemo.jobs``."""
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
