"""``python -m mpdemo scale``: what more nodes bring, and what they cost, measured by real jobs.

    python -m mpdemo scale --site jeanzay --nodes 1,2,4 --processes-per-node 4
    python -m mpdemo scale --nodes 1,2                     without a Slurm: 1 and 2 processes of this machine

One job for each size, one after the other; the second call goes on where the first one was stopped. Taught in
notebooks/08_scaling.ipynb.
"""

import json
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mpdemo import paths
from mpdemo.errors import UserError, one_line_errors
from mpdemo.jobs import JobFailed, load_site
from mpdemo.options import add_options, option_name, options_from
from mpdemo.plan.scaling_advice import EFFICIENCY
from mpdemo.scale.report import gather, sentences, show_table
from mpdemo.scale.runs import KINDS, Experiment, run_jobs
from mpdemo.settings import DATASETS, MODELS


@one_line_errors(option_name)
@dataclass(frozen=True, config={"extra": "forbid"})
class Request:
    """What to measure: the options of ``python -m mpdemo scale``."""

    nodes: str = Field("1,2,4", description="numbers of nodes, rising; the first is what the others are compared with")
    site: str | None = Field(None, description="a name in slurm/sites (default: as for jobs)")
    processes_per_node: int = Field(1, ge=1, description="one for each GPU; all sizes have the same")
    scaling: Literal["both", *KINDS] = Field("both", description="strong: same global batch; weak: same share")
    model: Literal[MODELS] = Field("transformer", description="as for train")
    dataset: Literal[DATASETS] = Field("digits", description="as for train")
    data: str | None = Field(None, description="folder of the data set, as for train")
    image_size: int | None = Field(None, ge=1, description="pixels per side, as for train")
    batch_size: int = Field(64, ge=1, description="images per step, over all processes of the smallest size")
    images: int = Field(1536, ge=1, description="images that each job trains on")
    precision: str = Field("fp32", description="as for train")
    workers: int = Field(0, ge=0, description="loader processes of each process, as for train")
    efficiency: float = Field(EFFICIENCY, gt=0, le=1, description="that the advice asks for")
    time_limit: str = Field("00:10:00", description="of each job, HH:MM:SS")
    at_once: int = Field(1, ge=1, description="jobs that may wait or run at the same time")
    wait: float = Field(3600.0, gt=0, description="seconds to wait for all jobs; Slurm goes on with them afterwards")
    again: bool = Field(False, description="run jobs again that have already ended")
    oversubscribe: bool = Field(False, description="without a Slurm: more processes here than there are cores")
    out: str = Field("runs/scale", description="folder for report.json and scaling.png; the jobs' folders begin so")


def add_arguments(parser):
    """Declare the arguments of ``mpdemo scale``."""
    add_options(parser, Request)


def main(args) -> int:
    """Run the jobs, print and save the report; return the exit status."""
    request = options_from(args, Request)
    site = load_site(request.site)
    experiment = experiment_of(request)
    try:
        done = run_jobs(experiment, site, request.at_once, request.wait, request.again)
    except (JobFailed, TimeoutError) as error:
        print(f"mpdemo: {error}", file=sys.stderr)
        return 1
    report = gather(experiment, done, request.efficiency) | {"site": site.name}
    write(report, paths.root() / request.out)
    print("", show_table(report), "", *sentences(report), f"saved {request.out}/report.json, scaling.png", sep="\n")
    return 0


def experiment_of(request) -> Experiment:
    """Return the experiment that the options ask for."""
    try:
        nodes = tuple(int(number) for number in request.nodes.split(","))
    except ValueError:
        raise UserError(f"--nodes {request.nodes!r} is not allowed; allowed: rising numbers, such as 1,2,4") from None
    out = Path(request.out)
    if out.is_absolute() or out.parent != Path("runs"):
        raise UserError(f"--out {request.out} is not allowed; allowed: a folder in runs, such as runs/scale")
    names = ("model", "dataset", "data", "image_size", "precision", "workers")
    return Experiment(
        nodes=nodes,
        batch=request.batch_size,
        images=request.images,
        name=out.name,
        processes_per_node=request.processes_per_node,
        kinds=KINDS if request.scaling == "both" else (request.scaling,),
        time_limit=request.time_limit,
        oversubscribe=request.oversubscribe,
        changes={name: getattr(request, name) for name in names},
    )


def write(report, folder):
    """Write report.json and the picture."""
    from mpdemo.notebook import plots

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    plots.scaling(report).save(folder / "scaling.png")
