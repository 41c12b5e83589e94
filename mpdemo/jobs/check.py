"""Find what Slurm or bash would refuse, or silently ignore, before it is submitted."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass

from mpdemo import paths
from mpdemo.jobs import slurm
from mpdemo.jobs.launch_text import unbound
from mpdemo.jobs.sbatch_text import fitted, render
from mpdemo.jobs.site import Site, load_site
from mpdemo.jobs.spec import JobSpec

# The options that have a letter.
SHORT = dict(c="cpus-per-task", t="time", o="output", e="error", N="nodes", J="job-name", n="ntasks", A="account",
             p="partition", q="qos", C="constraint", G="gpus", M="clusters", D="chdir")  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """What is wrong, in which line of the file (None: of the whole), and what to do."""

    line: int | None
    message: str
    fix: str

    def __str__(self):
        place = "" if self.line is None else f"line {self.line}: "
        return f"{place}{self.message}; do: {self.fix}"


def check(job: JobSpec | str, site: Site | str | None = None, ask_slurm: bool = True) -> list[Problem]:
    """Check a spec, or the text of a batch script, against a site; an empty list means that nothing was found.

    Parameters
    ----------
    job : JobSpec or str
    site : Site or str, optional
    ask_slurm : bool
        Where Slurm is found, also let it judge (``sbatch --test-only``).
    """
    site = site if isinstance(site, Site) else load_site(site)
    text = job if isinstance(job, str) else render(job, site)
    script = Script(text)
    shape(script, site)
    if not isinstance(job, str):
        constant_options(script, fitted(job, site), site)
    time_limit(script, site)
    log_folder(script)
    how = {"capture_output": True, "text": True, "timeout": 30, "env": os.environ | {"LC_ALL": "C"}}
    said = subprocess.run(["bash", "-n"], input=text, **how).stderr
    if match := re.search(r"line (\d+): (.*)", said):
        script.problem(
            int(match[1]), f"bash cannot read it: {match[2]}", "look at quotes, brackets and ; there"
        )
    if ask_slurm and not script.problems and slurm.in_reach():
        try:
            slurm.client("sbatch", "--test-only", cwd=paths.root(), input=text)
        except slurm.SlurmError as refusal:
            script.problem(None, str(refusal), "what Slurm asks for")
    return sorted(script.problems, key=lambda problem: problem.line or 0)


class Script:
    """A batch script's directives as Slurm reads them, with their lines."""

    def __init__(self, text):
        self.options = {}  # long name of an option -> (value, line number)
        self.problems = []
        self.launcher = "torchrun" if re.search(r"torch\.distributed\.run|\btorchrun\b", text) else "srun"
        if not text.startswith("#!"):
            self.problem(1, "the first line names no shell", "begin with #!/bin/bash")
        command_line = None
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("#SBATCH") and command_line:
                message = f"a directive after the first command (line {command_line}) is ignored by Slurm"
                self.problem(number, message, "move it up, below #!/bin/bash")
            elif line.startswith("#SBATCH"):
                self._read(number, line.removeprefix("#SBATCH"))
            elif re.match(r"\s*#+\s*SBATCH\s+-", line):
                self.problem(
                    number, f"{line.split('--')[0].strip()!r} is a comment to Slurm", "write #SBATCH"
                )
            elif line.strip() and not line.lstrip().startswith("#"):
                command_line = command_line or number

    def problem(self, line, message, fix):
        """Note what is wrong."""
        self.problems.append(Problem(line, message, fix))

    def _read(self, number, text):
        """Note the options of a directive by their long names."""
        try:
            words = shlex.split(text, comments=True)
        except ValueError as error:
            self.problem(number, f"quotes do not match ({error})", "close the quotes")
            return
        while words:
            word, value = words.pop(0), ""
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
            elif word.startswith("-"):
                name, equals, value = SHORT.get(word[1:2], word[1:2]), word[2:], word[2:]
            else:
                continue
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            if name in self.options:
                twice = f"--{name} is there twice (also in line {self.line(name)}): Slurm takes the last one only"
                self.problem(number, twice, "leave one of them")
            self.options.setdefault(name, (value, number))

    def value(self, name) -> str:
        """Return what an option is set to; empty if it is not given."""
        return self.options.get(name, ("", None))[0]

    def number(self, name) -> int:
        """Return the whole number an option holds; 1 if it is not given or no number (Slurm will report that)."""
        value = self.value(name).split("-")[0]
        return max(1, int(value)) if value.isdigit() else 1

    def line(self, *names) -> int | None:
        """Return the line of the first of these options that is given."""
        return next((self.options[name][1] for name in names if name in self.options), None)

    def gpus_per_node(self, tasks) -> int:
        """Return the GPUs requested on each node, whichever way; a model alone is one."""
        nodes = self.number("nodes")
        of_gres = next((part for part in self.value("gres").split(",") if part.startswith("gpu")), "")
        of_node, of_task, of_job = map(self.value, ("gpus-per-node", "gpus-per-task", "gpus"))
        for value, factor in ((of_gres, nodes), (of_node, nodes), (of_task, nodes * tasks), (of_job, 1)):
            if value:
                last = value.split(":")[-1]
                return factor * int(last if last.isdigit() else 1) // nodes
        return 0


def shape(script, site):
    """Compare processes, GPUs and CPUs with each other and with the site's node."""
    tasks, cpus = script.number("ntasks-per-node"), script.number("cpus-per-task")
    gpus = script.gpus_per_node(tasks)
    if gpus > site.gpus_per_node:
        line = script.line("gres", "gpus", "gpus-per-node", "gpus-per-task")
        fix = f"at most {site.gpus_per_node} GPUs per node; take more nodes for more processes"
        script.problem(line, f"{gpus} GPUs per node, but a node has {site.gpus_per_node}", fix)
    if gpus and script.launcher == "srun" and gpus % tasks and "exclusive" not in script.options:
        fix = f"--ntasks-per-node={gpus} for one process per GPU, or a GPU count that is a multiple of {tasks}"
        script.problem(
            script.line("ntasks-per-node"), f"{tasks} processes do not match {gpus} GPUs on a node", fix
        )
    if tasks * cpus > site.cores_per_node:
        message = f"{tasks} tasks x {cpus} CPUs = {tasks * cpus}, but a node has {site.cores_per_node}"
        fix = f"--cpus-per-task={site.cores_per_node // tasks or 1} or fewer tasks"
        script.problem(script.line("cpus-per-task", "ntasks-per-node"), message, fix)


def constant_options(script, spec, site):
    """Find what the site gives to every job and does not fit this one, and GPUs that no directive asks for."""
    of_task = spec.gpus_per_node // spec.tasks_per_node
    if spec.gpus_per_node > site.gpus_per_node > 0 == script.gpus_per_node(spec.tasks_per_node):
        message = f"{spec.gpus_per_node} GPUs per node, but a node has {site.gpus_per_node}"
        script.problem(None, message, "take more nodes for more processes")
    needed = {
        "nodes": spec.nodes,
        "ntasks": spec.nodes * spec.tasks_per_node,
        "ntasks-per-node": spec.tasks_per_node,
    }
    if spec.gpus_per_node and site.gpus_per_node:
        needed |= {"gpus-per-task": of_task, "gpu-bind=single": of_task, "gpu-bind=per_task": of_task}
    of_directives = (f"{name}={value}" for name, (value, _) in script.options.items())
    for text in (*unbound(site.srun_options, spec), *of_directives):
        name, _, value = text.removeprefix("--").replace(":", "=").rpartition("=")
        # https://slurm.schedmd.com/srun.html#OPT_gpu-bind
        given = "1" if name == "gpu-bind=single" else value
        if given.isdigit() and name in needed and int(given) != needed[name]:
            what = f"{text} of site file {site.name}.sbatch holds for every job; this one needs {needed[name]} there"
            script.problem(script.line(name), what, "write a hole there, as generic.sbatch does")


def time_limit(script, site):
    """Find a time that Slurm cannot read, or that is over the partition's limit."""
    value, most, line = script.value("time"), site.max_time, script.line("time")
    try:
        if value and slurm.limit(value) > slurm.limit(most or value):
            script.problem(line, f"time {value} is over the limit here, {most}", f"--time={most} or less")
    except ValueError as error:
        script.problem(line, f"time limit: {value!r} {error}", "--time=HH:MM:SS")


def log_folder(script):
    """Find a log whose folder is missing: Slurm starts the job, drops its output, and calls it failed."""
    for name in ("output", "error"):
        folder = script.value(name).rpartition("/")[0]
        if folder and "%" not in folder and not (paths.root() / folder).is_dir():
            message = f"the folder of --{name} does not exist: {folder}"
            script.problem(script.line(name), message, f"mkdir -p {shlex.quote(folder)}")
