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
    ("/training", 9_000, "what stands around a step: checkpoints, log, recorder, stop signal"),
    ("/world /ranks", 9_500, "who am I; start and end processes; ranks beside a kernel"),
    ("/models /data", 5_300, "the course's models as lists of blocks; data sets and batches, a share per replica"),
    (
        "/measure/__init__.py /measure/compare.py /measure/paired.py /measure/timeline.py /measure/trial.py",
        4_250,
        "measure a step, compare by paired rounds, what a recorded step waits for",
    ),
    (
        "/measure/spans.py /measure/traces.py",
        4_400,
        "traces of torch.profiler, of all ranks, on gloo and on GPUs: events, messages and memory of a step",
    ),
    ("/predict", 6_100, "before a run: the simulator, the best split, memory and messages of a step, scaling"),
    ("/jobs", 18_500, "spec, fitted job, text, submission, following; sites; the first cause in a log"),
    (
        "/notebook /demo.py",
        12_900,
        "what notebooks show: live view, ladder, plots, the step player's page, checks of exercises; the demo",
    ),
    ("/cluster", 3_050, "a throw-away Slurm"),
]
TOOLS = [
    ("/tools/same", 25_200, "is a reader's script the same training on 1 and N processes, does it resume; in CI, too"),
    (
        "/tools/plan",
        15_900,  # each operation as a GPU computes it, selective recomputation, offload, and what a run costs
        "what fits: any model on fake tensors, every strategy, the recommended one",
    ),
    ("/tools/explain", 5_000, "which log, what Slurm says of the job, where the ranks of a hanging job are"),
    (
        "/tools/support /tools/__init__.py",
        4_600,
        "a machine and a site tried, batch scripts rendered, the course's jobs rehearsed",
    ),
]
REST = [
    (
        "notebooks/labs notebooks/checks notebooks/scripts",
        52_900,  # the scripts carry what keeps a run alive on a cluster, and one has every dimension
        "what jobs measure, exercises run and readers take home",
    ),
