"""What the jobs of a scaling experiment measured, in one report: rows, the machine, a fitted model, advice."""

from statistics import median

from tabulate import tabulate

from mpdemo.cluster.config import CLUSTER_NAME
from mpdemo.errors import UserError
from mpdemo.plan.scaling import FEWEST, Run, fit
from mpdemo.plan.scaling_advice import EFFICIENCY, advise, same_batch, same_share
from mpdemo.scale.energy import NOT_TOLD
from mpdemo.scale.runs import LEAST_STEPS, WARMUP

COLUMNS = {  # of a row: its heading, its format
    "scaling": ("scaling", ""),
    "nodes": ("nodes", ""),
    "devices": ("devices", ""),
    "batch": ("batch", ""),
    "steps": ("steps", ""),
    "step_seconds": ("step (s)", ".3f"),
    "images_per_second": ("images/s", ".0f"),
    "speedup": ("speed-up", ".2f"),
    "efficiency": ("efficiency", ".0%"),
    "loss": ("loss", ".3f"),
    "start_seconds": ("start (s)", ".1f"),
    "job_seconds": ("job (s)", ".1f"),
    "device_hours": ("device-hours", ".4f"),
    "joules": ("energy (J)", ".0f"),
}


def gather(experiment, done, efficiency=EFFICIENCY) -> dict:
    """Make the report of jobs that have ended.

    Parameters
    ----------
    experiment : mpdemo.scale.runs.Experiment
    done : dict
        From `mpdemo.scale.runs.run_jobs`.
    efficiency : float
        For the advice.

    Returns
    -------
    dict
        ``machine`` (where it ran, with which versions), ``images``, ``batch``, ``warmup``, ``rows`` (one per kind and
        size) and, by kind, ``fit`` and ``advice``, None where there are fewer sizes than a fit needs.
    """
    measured = {size: measure(*size, *ended) for size, ended in done.items()}
    rows, fits, advices = [], {}, {}
    for kind in experiment.kinds:
        own = [measured.get((kind, n)) or measured[experiment.kinds[0], n] for n in experiment.nodes]
        rows += (own := [compare(row | {"scaling": kind}, own[0]) for row in own])
        model = _fitted(own, experiment.images)
        fits[kind] = vars(model) if model else None
        batch = same_batch(experiment.batch) if kind == "strong" else same_share(own[0]["batch"] // own[0]["devices"])
        advices[kind] = vars(advise(model, batch, efficiency)) | {"efficiency": efficiency} if model else None
    job = next(iter(done.values()))[0]
    environment = job.result()["environment"]
    machine = {name: environment[name] for name in ("device", "torch", "python", "backend")}
    machine |= {"where": job.where, "one_machine": on_one_machine(job)}
    machine["hosts"] = sorted({host for row in rows for host in row["hosts"]})
    facts = {"images": experiment.images, "batch": experiment.batch, "warmup": WARMUP}
    return {"machine": machine, **facts, "rows": rows, "fit": fits, "advice": advices}


def on_one_machine(job) -> bool:
    """Whether the nodes are of one machine and share its cores, as here without Slurm and on the throw-away cluster."""
    return job.where in ("this machine", f"cluster {CLUSTER_NAME}")


def measure(kind, nodes, job, joules) -> dict:
    """Return what a job tells: its steps without the warm-up, its loss at the end, what it used."""
    summary = job.result()
    batch = summary["settings"]["batch_size"]
    seconds = [batch / row["images_per_second"] for row in job.metrics() if row["event"] == "step"][WARMUP:]
    if len(seconds) < LEAST_STEPS - WARMUP:
        raise UserError(
            f"{job.out / 'metrics.jsonl'} has too few steps; run the job again with resubmit=True or --again"
        )
    devices, step = summary["world_size"], median(seconds)
    return {
        "nodes": nodes,
        "devices": devices,
        "batch": batch,
        "steps": summary["steps"],
        "images": summary["images"],
        "step_seconds": step,
        "steps_seconds": seconds,
        "images_per_second": batch / step,
        "loss": summary["validation_loss"],
        "train_seconds": summary["seconds"],
        "job_seconds": job.run_time,
        "start_seconds": max(0.0, job.run_time - summary["seconds"]),
        "device_hours": devices * job.run_time / 3600,
        "joules": joules,
        "hosts": sorted(set(summary["environment"]["hosts"])),
        "job": job.id,
    }


def compare(row, reference) -> dict:
    """Return a row with its speed-up over the reference, the spread of its steps around it, and its efficiency."""
    rates = sorted(row["batch"] / seconds for seconds in row["steps_seconds"])
    middle = rates[len(rates) // 4], rates[(3 * len(rates)) // 4]
    speedup = row["images_per_second"] / reference["images_per_second"]
    return row | {
        "speedup": speedup,
        "speedup_quartiles": [rate / reference["images_per_second"] for rate in middle],
        "efficiency": speedup * reference["devices"] / row["devices"],
    }


def _fitted(rows, images):
    """Fit the model of the time to the steps of all images; None where there are too few sizes."""
    if len(rows) < FEWEST:
        return None
    return fit([Run(row["devices"], images / row["images_per_second"], row["batch"]) for row in rows], images)


def show_table(report, columns=None, style="plain") -> str:
    """Return the rows of a report as a table; `columns` are names from COLUMNS."""
    columns = columns or list(COLUMNS)
    texts = [[_written(name, row[name]) for name in columns] for row in report["rows"]]
    align = ["left" if name == "scaling" else "right" for name in columns]
    return tabulate(texts, [COLUMNS[name][0] for name in columns], style, colalign=align, disable_numparse=True)


def _written(name, value) -> str:
    return NOT_TOLD if value is None else format(value, COLUMNS[name][1])


def sentences(report) -> list[str]:
    """Return what follows from a report, a sentence each; which ones, the measurement decides."""
    machine, said = report["machine"], []
    devices = max(row["devices"] for row in report["rows"])
    said.append(f"Measured on {machine['where']}: {machine['device']}, torch {machine['torch']}.")
    if machine["one_machine"] and devices > 1:
        said.append("All devices are of one machine and share its cores, memory and caches: no figure for a cluster.")
    said += [_gain(kind, rows) for kind in report["advice"] if (rows := _of(report, kind))]
    return said + [_advice(kind, report["fit"][kind], advice) for kind, advice in report["advice"].items()]


def _of(report, kind) -> list:
    """Return the rows of one kind, without the reference."""
    return [row for row in report["rows"] if row["scaling"] == kind][1:]


def _gain(kind, rows) -> str:
    """Say what the largest size brought."""
    last = rows[-1]
    figures = f"{kind}: {last['devices']} devices give {last['speedup']:.2f} times the images/s"
    if last["speedup"] < 1.05:
        return f"{figures}: nothing is gained."
    low, high = last["speedup_quartiles"]
    return f"{figures} (middle half of the steps: {low:.2f} to {high:.2f}), an efficiency of {last['efficiency']:.0%}."


def _advice(kind, model, advice) -> str:
    """Say what one fit advises."""
    if advice is None:
        return f"{kind}: a fit needs {FEWEST} sizes, so there is no advice."
    if model["compute"] == 0:
        return f"{kind}: no part of the time became less with more devices; stay with the smallest number."
    terms = f"{model['compute']:.3g} s / N + {model['communication']:.3g} s x log2(N) x steps + {model['start']:.3g} s"
    falls = "the time still falls at" if advice["fastest"] == advice["most"] else "the least time is at"
    return (
        f"{kind}: time = {terms}; an efficiency of {advice['efficiency']:g} up to N = {advice['efficient']}; "
        f"{falls} N = {advice['fastest']} (looked at: up to {advice['most']})."
    )
