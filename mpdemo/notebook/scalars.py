"""What TensorBoard reads in a run's folder. Used in notebooks/12_other_tools.ipynb."""

import logging
from pathlib import Path

from mpdemo.errors import UserError


def scalars(folder) -> dict:
    """Return the scalars of a folder with TensorBoard's event files.

    Parameters
    ----------
    folder : str or Path
        Such as ``runs/NAME/tensorboard``.

    Returns
    -------
    dict
        Tag -> list of (step, value), in the order in which they were written, without those that are hidden.

    Raises
    ------
    UserError
        TensorBoard is not installed, or there is no event file.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UserError("the package tensorboard is not installed; pip install tensorboard") from None
    if not list(Path(folder).glob("events.out.tfevents.*")):
        raise UserError(f"{folder} holds no event file of TensorBoard; was the run started with --tensorboard?")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every step that is hidden
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
