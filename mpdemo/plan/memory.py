"""Peak memory of every device of a training, on a machine without any GPU: what a dry run counts (dry_run.py).

It is what ``torch.cuda.max_memory_allocated`` would report. Not counted is memory that is no tensor: the workspaces
that cuDNN and cuBLAS ask for while a convolution or a matrix product runs (tens of MiB; they differ from run to run),
and the CUDA context, which no PyTorch counter shows. `RESERVE` covers both.
Taught in notebooks/04_model_parallel.ipynb.
"""

from mpdemo.errors import UserError
from mpdemo.plan.subject import MIB, RESERVE, STATES, DeviceMemory, Subject, settled
from mpdemo.schedules import usual_stages_per_rank

__all__ = ["FORMS", "MIB", "RESERVE", "STATES", "DeviceMemory", "Subject", "estimate", "settled"]
FORMS = "per-device", "one-process"


def estimate(
    model,
    points,
    batch,
    image_size,
    *,
    form="per-device",
    schedule="GPipe",
    microbatches=1,
    optimizer="sgd",
    keep_gradients=False,
    classes=1000,
    channels=3,
    norm="batch",
):
    """Estimate the peak memory of every device of a cut model without running it.

    Parameters
    ----------
    model : str
        One of ``mpdemo.settings.MODELS``.
    points : list of int
        Where the model is cut, as ``mpdemo.models.resolve_cut`` gives it; [] for one device.
    batch : int
        Samples of the whole batch.
    image_size, classes, channels, norm
        Of the data and the model, as in ``mpdemo.models.build``.
    form : {"per-device", "one-process"}
        One process per device, which runs the library's schedule, or one process that moves activations between
        devices, all forwards before all backwards.
    schedule, microbatches : str, int
        Of the pipeline. On one device, GPipe computes all microbatches forward first; 1F1B accumulates gradients.
    optimizer : {"sgd", "momentum", "adamw"}
        What keeps state: nothing, one value or two values per parameter.
    keep_gradients : bool
        Whether ``zero_grad`` fills the gradients with zeros instead of dropping them.

    Returns
    -------
    list of DeviceMemory
        One per device.

    Raises
    ------
    UserError
        An unknown form, optimizer or schedule.
    """
    for what, value, allowed in (("optimizer", optimizer, STATES), ("form", form, FORMS)):
        if value not in allowed:
            raise UserError(f"unknown {what} {value!r}; allowed: {', '.join(allowed)}")
    from mpdemo.plan import dry_run  # loads PyTorch

    subject = Subject(model, image_size, classes, channels, norm)
    devices = (len(points) + 1) // (usual_stages_per_rank(schedule) if form == "per-device" else 1)
    one_by_one = devices == 1 and schedule == "1F1B"
    cut = {} if one_by_one else {"cut": ",".join(map(str, points)) or None, "schedule": schedule, "form": form}
    rung = "single" if one_by_one else "pipeline"
    s = settled(subject, rung, batch, devices, microbatches=microbatches, **cut)
    return dry_run.devices(subject, s, STATES[optimizer], keep_gradients)
