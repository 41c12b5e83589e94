"""One job of a rehearsal: made small, submitted, followed, and what it shows."""

import contextlib
import dataclasses
import io
import json
import re
from dataclasses import dataclass

from mpdemo.errors import UserError
from mpdemo.jobs import Job, JobSpec, submit
from mpdemo.jobs.explain import find, last_error
from mpdemo.rehearse.task import MARK

STEPS = 2  # of a training
TRAIN = ("-m", "mpdemo", "train")
# What follows the folder in a lab's command when it is small: one part of it, or a number of steps.
LABS = {"mpdemo.labs.less_memory": ["layout"], "mpdemo.labs.lightning_story": [str(STEPS)]}
LONGEST = 200  # characters of a line of advice
LOOK = "do: python -c 'import torch; print(torch.__version__, torch.version.cuda, torch.version.hip)'"


@dataclass(eq=False)
class Trial:
    """A job of the course and what became of it.

    Attributes
    ----------
    name : str
        Of its job file, as ``03_ddp``.
    spec : JobSpec
        The job, made small.
    job : Job or None
        None before it is submitted, and where it was refused.
    refusal : str
        Why it was not submitted, and what to do.
    late : str
        What it was doing when the rehearsal's time was over.
    waited : float or None
        Seconds in the queue.
    """

    name: str
    spec: JobSpec
    job: Job | None = None
    refusal: str = ""
    late: str = ""
    waited: float | None = None

    def start(self, site):
        """Submit the job; a refusal is kept."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the rehearsal has one line for each job
                self.job = submit(self.spec, site, resubmit=True)
        except UserError as error:
            self.refusal = str(error)
        print(f"{self.name}: {f'job {self.job.id}' if self.job else 'refused'}", flush=True)

    def facts(self) -> dict:
        """Return what rank 0 said of its Python and PyTorch; empty where it said nothing."""
        texts = re.findall(re.escape(MARK) + r"(\{.*\})$", self.job.log(), re.MULTILINE) if self.job else []
        return {name: fact for text in texts for name, fact in json.loads(text).items()}

    def advice(self, gpus_exist) -> str:
        """Return one line on what to mend; empty where the job went well.

        Parameters
        ----------
        gpus_exist : bool
            The nodes have GPUs, and they are not pretended: PyTorch should see those that were asked for.
        """
        if self.refusal or self.late:
            return one_line(self.refusal or self.late)
        if self.job.state != "done":
            return one_line(why_it_failed(self.job))
        gpus, wanted = self.facts().get("gpus", 0), self.spec.gpus_per_process
        if gpus_exist and gpus < wanted:
            return f"PyTorch sees {gpus} GPUs, {wanted} asked for each process; is it built for them? {LOOK}"
        return ""


def smallest(name, spec) -> JobSpec:
    """Return a job of the course with as many processes as ever, and hardly any work: a training has two steps.

    It writes to a folder of its own, and does not go on from another job's checkpoint.
    """
    out, command = f"runs/rehearsal/{name}", list(spec.command)
    command = [out if word == spec.out else word for word in command]
    if spec.command[:3] == TRAIN:
        if "--resume" in command:
            del command[command.index("--resume") : command.index("--resume") + 2]
        command += ["--steps", str(STEPS), "--warmup-steps", "0"]
    elif spec.command[0] == "-m" and spec.command[1] in LABS:
        command = [*command[: command.index(out) + 1], *LABS[spec.command[1]]]
    alone = {"requeue": False, "dependency": None}
    return dataclasses.replace(spec, out=out, command=("-m", "mpdemo.rehearse.task", *command), **alone)


def why_it_failed(job) -> str:
    """Return what a failed job's log shows: what the launcher said, a known failure, or the last error."""
    failure, log = job.failure(), job.log()
    if failure.cause:
        return str(failure)
    for finding in find(log):
        if finding.known.kind == "cause":
            return f"{finding.known.what}: {finding.known.do}"
    if job.state == "failed" and failure.lines:
        error = last_error("\n".join(failure.lines))
        return error[1] if error else failure.lines[-1]
    return f"{job.state} ({job.reason})" if job.reason else job.state


def one_line(text) -> str:
    """Return a text as one line that is not too long."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
