"""How many processes a training has, how many devices each drives, and how many replicas they make. Needs no PyTorch.

A hybrid training is a grid of replicas x devices: with one process per device the grid's size is that of the world,
with one process per replica each process drives a whole row. Taught in notebooks/06_hybrid.ipynb.
"""

from dataclasses import replace

from mpdemo.errors import UserError


def require(condition, message):
    """Refuse what a user wrote, with a message, unless the condition holds."""
    if not condition:
        raise UserError(message)


def with_processes(s, world_size):
    """Return the settings `s` of a rung without a grid, with the number of processes and of devices.

    Parameters
    ----------
    s : mpdemo.settings.Settings
        With the form.
    world_size : int or None
        Processes of the launcher, None where there is none.

    Raises
    ------
    UserError
        Another number of processes was started than is asked for, or than the form can use.
    """
    if s.form == "per-device":
        count = _processes(s, world_size) or 2
        return replace(s, processes=count, devices=count)
    started = world_size if world_size is not None else s.processes
    more = "" if s.rung == "single" else " (and say --devices for how many devices it drives)"
    require(
        started in (None, 1),
        f"rung {s.rung} in the one-process form was started as {started} processes; start 1{more}",
    )
    return replace(s, processes=1, devices=1 if s.rung == "single" else s.devices or 2)


def with_replicas(s, world_size):
    """Return the settings `s` of a grid with the number of processes, of replicas, and of devices in each replica.

    Parameters and errors as in `with_processes`; also refused are processes or a batch that the replicas do not divide.
    """
    given, one_process = _processes(s, world_size), s.form == "one-process"
    replicas = s.replicas or (given if one_process and given else 2)
    processes = given or replicas * (1 if one_process else s.devices or 2)
    require(
        not one_process or processes == replicas,
        f"{replicas} replicas in the one-process form need {replicas} processes, not {processes}; "
        f"give --replicas {processes}, or start {replicas}",
    )
    require(
        one_process or (processes % replicas == 0 and processes > replicas),
        f"{processes} processes do not make {replicas} replicas of 2 or more devices each; "
        f"allowed: a multiple of {replicas} from {2 * replicas} on, or another --replicas",
    )
    require(
        s.batch_size % replicas == 0,
        f"--batch-size {s.batch_size} (all processes together) does not divide by {replicas} replicas; "
        f"allowed: a multiple of {replicas}, such as {max(1, s.batch_size // replicas) * replicas}",
    )
    devices = s.devices or 2 if one_process else processes // replicas
    return replace(s, processes=processes, replicas=replicas, devices=devices)


def _processes(s, world_size):
    """Return how many processes there are by the launcher or by the settings; None where nobody says it."""
    if world_size is not None and s.processes not in (None, world_size):
        raise UserError(f"--processes {s.processes} contradicts the launcher's {world_size} processes; leave it out")
    return world_size or s.processes
