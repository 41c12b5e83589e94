"""What the jobs of a scaling experiment measured, in one report: rows, the machine, a fitted model, advice."""

from statistics import median

from tabulate import tabulate

from mpdemo.cluster.daemons import CLUSTER_NAME
from mpdemo.errors import UserError
from mpdemo.paired import LEAST_ROUNDS, from_row, ratio, to_row
from mpdemo.plan.scaling import EFFICIENCY, FEWEST, Run, advise, fit, same_batch, same_share

WARMUP = 2  # steps that are not counted: DDP settles its buckets, caches fill
LEAST_STEPS = WARMUP + LEAST_ROUNDS
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
}


def gather(experiment, done) -> dict:
    """Make the report of the jobs that `run_jobs` returned.

    Returns
    -------
    dict
        ``machine`` (where it ran, with which versions), ``images``, ``batch``, ``warmup``, ``rows`` (one per kind and
        size) and, by kind, ``fit`` and ``advice``, None if there are fewer sizes than a fit needs.
    """
    rows, fits, advices = [], {}, {}
    for kind in experiment.kinds:
        own = []
        for nodes in experiment.nodes:
            job = done.get((kind, nodes)) or done[experiment.kinds[0], nodes]
            reference = done[experiment.kinds[0], experiment.nodes[0]]
            own.append({"scaling": kind, "nodes": nodes} | measure(job, reference))
        rows, fits[kind], advices[kind] = rows + own, None, None
        if len(own) >= FEWEST:
            images = experiment.images
            runs = [Run(row["devices"], images / row["images_per_second"], row["batch"]) for row in own]
            model, share = fit(runs, images), own[0]["batch"] // own[0]["devices"]
            batch = same_batch(experiment.batch) if kind == "strong" else same_share(share)
            fits[kind], advices[kind] = vars(model), vars(advise(model, batch, EFFICIENCY))
    job = next(iter(done.values()))
    environment = job.result()["environment"]
    machine = {name: environment[name] for name in ("device", "torch", "python", "backend")}
    # Without Slurm, and on the throw-away cluster, all nodes are of one machine and share its cores.
    machine |= {"where": job.where, "one_machine": job.where in ("this machine", f"cluster {CLUSTER_NAME}")}
    facts = {"images": experiment.images, "batch": experiment.batch, "warmup": WARMUP}
    return {"machine": machine, **facts, "rows": rows, "fit": fits, "advice": advices}


def measure(job, reference) -> dict:
    """Return what a job tells: its steps, also beside those of a reference, and its cost.

    Steps of one number are paired, as rounds are. But the jobs ran one after the other: the interval says how much the
    steps vary, not what changed on the machine between the jobs.
    """
    summary, (seconds, first) = job.result(), map(seconds_of_an_image, (job, reference))
    batch, devices = summary["settings"]["batch_size"], summary["world_size"]
    paired = min(len(seconds), len(first))
    speedup = ratio(first[:paired], seconds[:paired])
    return {
        "devices": devices,
        "batch": batch,
        "steps": summary["steps"],
        "step_seconds": batch * median(seconds),
        "images_per_second": 1 / median(seconds),
        **to_row("speedup", speedup),
        "efficiency": speedup.median * reference.result()["world_size"] / devices,
        "loss": summary["validation_loss"],
        "job_seconds": job.run_time,
        "start_seconds": max(0.0, job.run_time - summary["seconds"]),
        "device_hours": devices * job.run_time / 3600,
        "hosts": sorted(set(summary["environment"]["hosts"])),
        "job": job.id,
    }


def seconds_of_an_image(job) -> list[float]:
    """Return the seconds per image of every step of a job, without the warm-up."""
    rates = [row["images_per_second"] for row in job.metrics() if row["event"] == "step"][WARMUP:]
    if len(rates) < LEAST_ROUNDS:
        raise UserError(f"{job.out / 'metrics.jsonl'} has too few steps; remove this folder, and run the job again")
    return [1 / rate for rate in rates]


def show_table(report, columns=None) -> str:
    """Return the rows of a report as a table; `columns` are names from COLUMNS."""
    columns = columns or list(COLUMNS)
    texts = [[format(row[name], COLUMNS[name][1]) for name in columns] for row in report["rows"]]
    align = ["left" if name == "scaling" else "right" for name in columns]
    return tabulate(texts, [COLUMNS[name][0] for name in columns], "plain", colalign=align, disable_numparse=True)


def sentences(report) -> list[str]:
    """Return what follows from a report, a sentence each; which ones, the measurement decides."""
    machine, said = report["machine"], []
    said.append(f"Measured on {machine['where']}: {machine['device']}, torch {machine['torch']}.")
    if machine["one_machine"] and max(row["devices"] for row in report["rows"]) > 1:
        said.append("All devices are of one machine and share its cores, memory and caches: no figure for a cluster.")
    last = {row["scaling"]: row for row in report["rows"]}  # the largest size of each kind
    for row in (row for row in last.values() if row["nodes"] > report["rows"][0]["nodes"]):
        speedup = from_row(row, "speedup")
        figures = f"{row['scaling']}: {row['devices']} devices have a speed-up of {speedup.median:.2f}"
        spread = f"95 % interval over the steps: {speedup.low:.2f} to {speedup.high:.2f}"
        gained = f"an efficiency of {row['efficiency']:.0%}" if speedup.low > 1 else "no gain can be reported"
        said.append(f"{figures} ({spread}): {gained}.")
    return said + [in_words(kind, report["fit"][kind], advice) for kind, advice in report["advice"].items()]


def in_words(kind, model, advice) -> str:
    """Say what one fit advises."""
    if advice is None:
        return f"{kind}: a fit needs {FEWEST} sizes, so there is no advice."
    if model["compute"] == 0:
        return f"{kind}: no part of the time became less with more devices; stay with the smallest number."
    terms = f"{model['compute']:.3g} s / N + {model['communication']:.3g} s x log2(N) x steps + {model['start']:.3g} s"
    return (
        f"{kind}: time = {terms}; an efficiency of {EFFICIENCY:g} up to N = {advice['efficient']}; "
        f"the least time is at N = {advice['fastest']} (looked at: up to {advice['most']})."
    )
