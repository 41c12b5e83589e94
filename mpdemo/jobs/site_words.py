"""Every word of a site file: what it means, its type, its default. `mpdemo.jobs.site` reads the files."""

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from mpdemo.jobs import times


def one_line(text) -> str:
    """Refuse what no line of a script can carry; everything else is quoted."""
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError("holds a line break or another control character; write one line per text")
    return text


def time_limit(text) -> str:
    """Refuse a time limit that Slurm could not read; an empty text is none."""
    if text:
        times.limit(text)
    return text


def option(text) -> str:
    """Refuse what is no long option: Slurm would take it for something else."""
    if not text.startswith("--"):
        raise ValueError("is no option; allowed: options as --mpi=none")
    return text


def start_of_python(text) -> str:
    """Refuse an empty start and one with srun: the job file writes srun itself."""
    if not text.strip() or text.split()[0] in ("srun", "sbatch"):
        raise ValueError("is not allowed; allowed: what comes after srun, as 'apptainer exec image.sif python'")
    return text


Line = Annotated[str, AfterValidator(one_line)]
Lines = Annotated[tuple[Line, ...], Field(strict=False)]  # TOML has lists, a dataclass tuples
Options = Annotated[tuple[Annotated[Line, AfterValidator(option)], ...], Field(strict=False)]
TimeLimit = Annotated[str, AfterValidator(time_limit)]
Launcher = Literal["srun", "torchrun"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Site:
    """A cluster as its site file describes it. Empty text leaves a directive out."""

    name: Line = Field(description="the file's name; not a key of the file")
    title: Line = Field("", description="the cluster in a few words")
    cluster_names: Lines = Field((), description="Slurm's own names for this cluster, by which the file is found")
    cores_per_node: int = Field(1, ge=1, description="what Slurm counts; CPUs per process = cores / GPUs x its GPUs")
    gpus_per_node: int = Field(0, ge=0)
    cpus_per_process: int = Field(1, ge=1, description="of each device where there are no GPUs: a core is a device")
    gpu_syntax: Literal["gres", "gpus-per-node", "gpus-per-task"] = Field("gres", description="how GPUs are requested")
    gpu_type: Line = Field("", description="a model, as in gpu:v100:2")
    partition: Line = ""
    account: Line = ""
    qos: Line = ""
    constraint: Line = ""
    reservation: Line = ""
    memory: Line = Field("", description="--mem; of the three words for memory at most one")
    memory_per_cpu: Line = Field("", description="--mem-per-cpu")
    memory_per_gpu: Line = Field("", description="--mem-per-gpu")
    hint: Line = ""
    extra: Options = Field((), description="further directives, as --exclusive")
    max_time: TimeLimit = Field("", description="the partition's time limit, [D-]HH:MM:SS")
    features: Lines = Field((), description="constraints that exist; a misspelt one is found before submission")
    login_shell: bool = Field(False, description="#!/bin/bash -l, where only a login shell knows `module`")
    setup: Lines = Field((), description="shell lines that make `python` the right one: modules, an activation")
    python: Annotated[Line, AfterValidator(start_of_python)] = Field("python", description="how Python starts")
    each_task: Lines = Field((), description="shell lines of each task before Python; not under torchrun")
    srun_options: Options = Field((), description="more options of srun, as --mpi=none")
    binding: Options = Field((), description="options of srun that bind a task to its cores; not under torchrun")
    launcher: Launcher = Field("srun", description="one Slurm task per process, or one torchrun per node")
    separate_errors: bool = Field(False, description="a second file for stderr")
    export_visible_devices: bool = Field(False, description="set CUDA_VISIBLE_DEVICES explicitly")
    master_suffix: str = Field("", pattern="^[A-Za-z0-9.-]*$", description="appended to the first node's name")
    scratch: Line = Field("", description="where large files belong; `python -m mpdemo env` checks it")
    ranks_on_front_end: bool = Field(True, description="whether a notebook may start ranks outside a Slurm job")
    inside_a_job: Literal["queue", "steps"] = Field("queue", description="how a notebook in a job starts others")
    quota: Line = Field("", description="the command that prints the user's quota; `python -m mpdemo env` runs it")
    polling_seconds: float = Field(5, ge=1, description="how often Slurm is asked about a job, at most", strict=False)

    @model_validator(mode="after")
    def _memory_once(self):
        given = [name for name in ("memory", "memory_per_cpu", "memory_per_gpu") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one")
        return self
