"""``python -m mpdemo scale``: one training on more and more nodes, by real jobs, and a report of what they bring.

Loads no PyTorch: it submits jobs and reads what they wrote. Taught in notebooks/08_scaling.ipynb.
"""

from mpdemo.scale.report import gather, show_table
from mpdemo.scale.runs import Experiment, run_jobs, sizes_here

__all__ = ["Experiment", "gather", "run_jobs", "show_table", "sizes_here"]
