"""Find what Slurm would refuse, or silently ignore, before it is submitted."""

import re
import shlex
from dataclasses import dataclass

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.render import render
from mpdemo.jobs.site import Site, load_site, seconds
from mpdemo.jobs.spec import JobSpec

LONG_NAMES = {"-J": "job-name", "-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-t": "time", "-p": "partition"}
LONG_NAMES |= {"-A": "account", "-q": "qos", "-C": "constraint", "-o": "output", "-e": "error"}


@dataclass(frozen=True)
class Problem:
    """What is wrong, in which line of the file (None: of the whole), and what to do."""

    line: int | None
    message: str
    fix: str

    def __str__(self):
        place = "" if self.line is None else f"line {self.line}: "
        return f"{place}{self.message}; do: {self.fix}"


def check(job, site=None, ask_slurm=True) -> list[Problem]:
    """Check a spec, or the text of an sbatch file, against a site.

    Parameters
    ----------
    job : JobSpec or str
        For a text, the log's folder must exist; for a spec, `submit` makes it.
    site : Site or str, optional
    ask_slurm : bool
        Where a Slurm is in reach, also let it judge (``sbatch --test-only``).

    Returns
    -------
    list of Problem
        Empty if nothing was found.
    """
    site = site if isinstance(site, Site) else load_site(site)
    is_spec = isinstance(job, JobSpec)
    text = render(job, site) if is_spec else job
    script = Script(text)
    problems = [*script.problems, *geometry(script, site), *names(script, site), *time_limit(script, site)]
    if not is_spec:
        problems += log_folder(script)
    if ask_slurm and not problems and slurm.in_reach():
        refusal = slurm.test_only(text, paths.root())
        problems += [Problem(None, refusal, "what Slurm asks for")] if refusal else []
    return sorted(problems, key=lambda problem: problem.line or 0)


class Script:
    """An sbatch file's directives as Slurm reads them, with their lines.

    Attributes
    ----------
    options : dict
        Long option name -> (value, line number). The last of several counts.
    problems : list of Problem
        Directives that Slurm would ignore, and a first line it would refuse.
    """

    def __init__(self, text):
        self.options, self.problems = {}, []
        if "\r\n" in text:
            self.problems.append(Problem(1, "DOS line breaks", "save the file with Unix line ends"))
        lines = text.splitlines()
        if not lines or not lines[0].startswith("#!"):
            self.problems.append(Problem(1, "the first line names no shell", "begin with #!/bin/bash"))
        command_line = None
        for number, line in enumerate(lines, 1):
            if line.startswith("#SBATCH"):
                if command_line:
                    message = f"a directive after the first command (line {command_line}) is ignored by Slurm"
                    self.problems.append(Problem(number, message, "move it up, below #!/bin/bash"))
                else:
                    self._read(number, line.removeprefix("#SBATCH"))
            elif re.match(r"\s*#+\s*SBATCH\b", line):
                self.problems.append(
                    Problem(number, f"{line.split('--')[0].strip()!r} is a comment to Slurm", "write #SBATCH")
                )
            elif line.strip() and not line.lstrip().startswith("#"):
                command_line = command_line or number
        self.launcher = "torchrun" if re.search(r"torch\.distributed\.run|\btorchrun\b", text) else "srun"

    def _read(self, number, text):
        try:
            words = shlex.split(text, comments=True)
        except ValueError as error:
            self.problems.append(Problem(number, f"quotes do not match ({error})", "close the quotes"))
            return
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if not word.startswith("-"):
                continue
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            if not name.startswith("--") and len(name) > 2:
                name, value = name[:2], name[2:] + equals + value
            self.options[LONG_NAMES.get(name, name.removeprefix("--"))] = (value, number)

    def number(self, name, default):
        """The whole number an option holds; the default if it is not given or no number (Slurm will say so)."""
        value = self.options.get(name, ("", 0))[0].split("-")[0]
        return int(value) if value.isdigit() else default

    def line(self, *names):
        """The line of the first of these options that is given."""
        return next((self.options[name][1] for name in names if name in self.options), None)

    def gpus_per_node(self, tasks) -> int:
        """GPUs asked for on a node, whichever way."""
        for name, factor in (("gres", 1), ("gpus-per-node", 1), ("gpus-per-task", tasks)):
            value = self.options.get(name, ("", 0))[0]
            if value and (name != "gres" or value.startswith("gpu")):
                last = value.split(":")[-1]
                return factor * (int(last) if last.isdigit() else 1)
        return 0


def geometry(script, site) -> list[Problem]:
    """Processes, GPUs and CPUs against each other and against the site's node."""
    tasks, cpus = script.number("ntasks-per-node", 1), script.number("cpus-per-task", 1)
    gpus = script.gpus_per_node(tasks)
    gpu_line, task_line = script.line("gres", "gpus-per-node", "gpus-per-task"), script.line("ntasks-per-node")
    problems = []
    if gpus > site.gpus_per_node:
        fix = f"at most {site.gpus_per_node} GPUs a node; take more nodes for more processes"
        problems.append(Problem(gpu_line, f"{gpus} GPUs a node, but a node has {site.gpus_per_node}", fix))
    if gpus and script.launcher == "srun" and gpus % tasks:
        fix = f"--ntasks-per-node={gpus} for one process a GPU, or a GPU count that is a multiple of {tasks}"
        problems.append(Problem(task_line, f"{tasks} processes do not match {gpus} GPUs on a node", fix))
    if tasks * cpus > site.cores_per_node:
        message = f"{tasks} tasks x {cpus} CPUs = {tasks * cpus}, but a node has {site.cores_per_node}"
        problems.append(
            Problem(
                script.line("cpus-per-task", "ntasks-per-node"),
                message,
                f"--cpus-per-task={site.cores_per_node // tasks or 1} or fewer tasks",
            )
        )
    return problems


def names(script, site) -> list[Problem]:
    """A constraint that the site does not list."""
    value, line = script.options.get("constraint", ("", None))
    known = {feature for feature in (*site.features, site.constraint) if feature}
    wrong = [word for word in re.split(r"[&|,*()\[\]]+", value) if word and not word.isdigit() and word not in known]
    if not known or not wrong:
        return []
    return [Problem(line, f"unknown constraint {wrong[0]!r}", f"one of: {', '.join(sorted(known))}")]


def time_limit(script, site) -> list[Problem]:
    """A time over the partition's limit."""
    value, line = script.options.get("time", ("", None))
    if not value:
        return []
    try:
        asked = seconds(value)
    except UserError as error:
        return [Problem(line, str(error), "--time=HH:MM:SS")]
    if site.max_time and asked > seconds(site.max_time):
        return [
            Problem(
                line,
                f"time {value} is over the limit here, {site.max_time}",
                f"--time={site.max_time} or less",
            )
        ]
    return []


def log_folder(script) -> list[Problem]:
    """A log whose folder is missing: Slurm starts the job, drops its output, and calls it failed."""
    problems = []
    for name in ("output", "error"):
        value, line = script.options.get(name, ("", None))
        folder = value.rpartition("/")[0].replace("%%", "\0")
        if folder and "%" not in folder and not (paths.root() / folder.replace("\0", "%")).is_dir():
            problems.append(
                Problem(line, f"the folder of --{name} does not exist: {folder}", f"mkdir -p {shlex.quote(folder)}")
            )
    return problems
