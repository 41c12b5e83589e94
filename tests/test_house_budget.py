"""How large each room may be, and what it is for: lowered as a room shrinks, raised only with a reason."""

import pytest
from project import files, tokens

from mpdemo.paths import root

# Tokens of Python without comments, docstrings, line ends and indents: what a reader has to understand, however
# sparsely it is written. A place that begins with / is a file or folder of mpdemo.
COURSE = [
    (
        "/__init__.py /__main__.py /errors.py /options.py /paths.py /terminal.py /front_end.py /labs",
        2_900,
        "what is public; commands, options, and how errors are told",
    ),
    ("/settings", 3_200, "every setting said once and checked once"),
    ("/rungs /run.py /train.py", 3_900, "the strategies and their loop: model, optimizer, step"),
    ("/training", 8_900, "what stands around a step: checkpoints, log, recorder, stop signal"),
    ("/world /ranks", 9_500, "who am I; start and end processes; ranks beside a kernel"),
    ("/models /data", 5_300, "the course's models as lists of blocks; data sets and batches, a share per replica"),
    (
        "/measure/__init__.py /measure/compare.py /measure/paired.py /measure/timeline.py /measure/trial.py",
        4_650,
        "measure a step, compare by paired rounds, what a recorded step waits for",
    ),
    (
        "/measure/spans.py /measure/traces.py",
        4_600,
        "traces of torch.profiler, of all ranks, on gloo and on GPUs: events, messages and memory of a step",
    ),
    ("/predict", 6_100, "before a run: the simulator, the best split, memory and messages of a step, scaling"),
    ("/jobs", 18_500, "spec, fitted job, text, submission, following; sites; the first cause in a log"),
