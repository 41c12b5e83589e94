"""From first_single.py to first_ddp.py in steps, as scripts that run.

    step(2)                    the single script with the changes 1 and 2, as a path for torchrun
    change(2)                  the lines of number 2, with the lines around them
    changed("first_ddp.py", "x.py", old, new)    a copy in which one text is replaced
    torchrun(2, step(2))       run it in two processes: print its lines in order, return their numbers

All steps together give first_ddp.py, which `step` asserts. Taught in notebooks/10_two_devices.ipynb.
"""

import difflib
import re
from pathlib import Path
from typing import NamedTuple

from mpdemo import paths
from mpdemo.notebook.course import run
from mpdemo.notebook.show import Bundle

FOLDER = "runs/10_scripts"
DEVICE = 'device = "cuda" if torch.cuda.is_available() else "cpu"\n'
GROUP = (
    'dist.init_process_group("nccl" if device == "cuda" else "gloo")  # 1: the processes find each other\n'
)
OWN_GPU = """if device == "cuda":  # 1
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # 1: now "cuda" is this process's own GPU
"""
PRINT = '    print(f"epoch {epoch}: {len(loader)} steps, loss {mean:.4f}")'
PRINT_RANK = PRINT.replace('f"epoch', 'f"rank {rank}, epoch') + "  # 1"
LAST = 'print(f"sum of all weights: {weights:.3f}")\n'
LAST_RANK = LAST.replace('f"sum', 'f"rank {rank}, sum').replace("\n", "  # 1\n")
SEED = "torch.manual_seed(seed + rank)  # 7: each process draws its own random numbers from here on\n"
STEPS = {  # pairs of a text and what takes its place
    "1": [
        ("import torch\n", "import torch\nimport torch.distributed as dist  # 1\n"),
        (DEVICE, f"{DEVICE}{GROUP}rank, world_size = dist.get_rank(), dist.get_world_size()  # 1\n"),
        (PRINT, PRINT_RANK),
        (LAST, f"{LAST_RANK}dist.destroy_process_group()  # 1: the processes part\n"),
    ],
    "1 on GPUs": [("from pathlib", "import os  # 1\nfrom pathlib"), (GROUP, OWN_GPU + GROUP)],
    "2": [
        ("DataLoader, TensorDataset", "DataLoader, DistributedSampler, TensorDataset  # 2"),
        (
            "loader = ",
            "sampler = DistributedSampler(train)  # 2: each process takes its own images\nloader = ",
        ),
        ("shuffle=True)", "sampler=sampler)  # 2"),
    ],
    "3": [("batch_size = 64", "batch_size = 64 // world_size  # 3: all processes together have 64")],
    "4": [
        ("nn\nfrom", "nn\nfrom torch.nn.parallel import DistributedDataParallel  # 4\nfrom"),
        (
            "to(device)\n",
            "to(device)\nmodel = DistributedDataParallel(model)  # 4: averages the gradients\n",
        ),
    ],
    "5": [("range(3):\n", "range(3):\n    sampler.set_epoch(epoch)  # 5: another order in each epoch\n")],
    "6": [
        ("    mean", "    dist.all_reduce(total)  # 6: adds up the losses of all processes\n    mean"),
        ("len(loader)\n", "len(loader) / world_size  # 6\n"),
        (PRINT_RANK, f"    if rank == 0:  # 6\n    {PRINT}  # 6"),
    ],
    "7": [("optimizer = ", f"{SEED}optimizer = ")],
}
DEEPER = "nn.ReLU(), *(nn.Conv2d(32, 32, 3, padding=1) for _ in range(8)), nn.Flatten()"
TIMED = [  # more layers, so that a step computes longer than it communicates
    ("nn.ReLU(), nn.Flatten()", DEEPER),
    ("seed = 0\n", "seed = 0\ntorch.set_num_threads(1)\nfrom time import perf_counter\nfastest = 1e9\n"),
    ("        optimizer.zero_grad()", "        begin = perf_counter()\n        optimizer.zero_grad()"),
    ("loss.detach()\n", "loss.item()\n        fastest = min(fastest, perf_counter() - begin)\n"),
    ("weights = sum", 'print(f"fastest {1000 * fastest:.1f}")\nweights = sum'),
]


class Ran(NamedTuple):
    """What the lines of a run say, sorted as they are printed."""

    steps: list[int]
    losses: list[float]
    weights: list[float]


def torchrun(processes: int, script: str) -> Ran:
    """Run a script in so many processes, print its lines, or its errors, in order, and return their numbers."""
    said = run(f"torchrun --standalone --nproc-per-node={processes} {script}").output(fails=True)
    # Sorted after they are found: what two processes print at the same moment can stand in one line.
    lines = sorted(re.findall(r"\w+Error: .*|(?:rank \d, )?(?:epoch|sum).*?\d\.\d+", said))
    print(*lines, sep="\n")
    text = "\n".join(lines)
    found = (re.findall(name, text) for name in (r"(\d+) steps", r"loss ([\d.]+)", r"weights: (\S+)"))
    return Ran(*([float(number) for number in numbers] for numbers in found))


def fastest_step(processes: int) -> float:
    """Time the steps of first_ddp.py with a deeper model; return the fastest one in milliseconds."""
    script = "first_ddp.py"
    for old, new in TIMED:
        script = changed(script, "timed.py", old, new)
    said = run(f"torchrun --standalone --nproc-per-node={processes} {script}").output()
    return max(float(number) for number in re.findall(r"fastest ([\d.]+)", said))


def step(last: int | str) -> str:
    """Save the single script with the changes up to this one, and return its path; 0 is the script as it is."""
    text, names = _script("first_single.py").read_text(), list(STEPS)
    for name in names[: names.index(str(last)) + 1] if last else []:
        for old, new in STEPS[name]:
            assert text.count(old) == 1, f"{text.count(old)} times in the script: {old!r}"
            text = text.replace(old, new)
    if str(last) == names[-1]:
        assert text.partition("\n")[2] == _script("first_ddp.py").read_text().partition("\n")[2]
    return _saved(f"step_{last}.py".replace(" ", "_"), text)


def change(name: int | str) -> Bundle:
    """Display the lines that one number changes, - before and + after, each between the lines around it."""
    names = ["0", *STEPS]
    before = names[names.index(str(name)) - 1]
    texts = [
        _script(path).read_text().splitlines()
        for path in (step(before if before != "0" else 0), step(name))
    ]
    lines = list(difflib.unified_diff(*texts, n=1, lineterm=""))[3:]  # without the names of the files
    text = "\n".join("⋮" if line.startswith("@@") else line for line in lines)
    return Bundle(text, markdown=f"```diff\n{text}\n```")


def changed(script: str, name: str, old: str, new: str) -> str:
    """Save a copy of a script in which one text is replaced, and return its path."""
    text = _script(script).read_text()
    assert old in text, f"not in {script}: {old!r}"
    return _saved(name, text.replace(old, new))


def _saved(name: str, text: str) -> str:
    folder = paths.root() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits.npz").write_bytes(_script("digits.npz").read_bytes())
    (folder / name).write_text(text)
    return f"{FOLDER}/{name}"


def _script(name: str) -> Path:
    return (
        paths.root() / name if name.startswith(FOLDER) else paths.source() / "notebooks" / "scripts" / name
    )
