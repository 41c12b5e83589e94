"""The faults: what is done to the job before it starts, or while it runs.

A fault changes the job's data, its files or a line of its program, or acts from outside. `job.rank` was drawn before.
"""

import signal
import socket
import subprocess
from functools import partial

import numpy as np
import torch

SYNC = "        os.replace(", "        os.sync()  # the disk has lost files before\n        os.replace("
AVERAGE = "        average(model)\n        t3"
RATE = """\
        if {}:
            dist.broadcast(torch.tensor(LR), 0)  # keep the rate equal
        average(model)  # and the gradients
        t3"""
DECOYS = (  # harmless changes, of which every program has some
    ("p.data -= LR * velocity[p]", "p.data -= LR * (p.grad + MOMENTUM * velocity[p])"),
    ("model.zero_grad()", "model.zero_grad(set_to_none=True)"),
    ("default_rng(SEED + epoch)", "default_rng([SEED, epoch])"),
    ("SAVE_EVERY, SEED = 3, 16, 0.02, 0.9, 20, 0", "SAVE_EVERY, SEED = 3, 16, 0.02, 0.9, 20, 7"),
    ("if step % 10 == 0:", "if step % 5 == 0:"),
    SYNC,
    (AVERAGE, RATE.format("step % 25 == 0")),
)
SAVE = "            save(model, step)\n"
EVALUATE = """def evaluate(model, batches):
    for number in range(batches):
        _, images, labels = load_batch(0, number % 3, "test")
        nn.functional.cross_entropy(model(images), labels)


def validate(model):"""


def evaluate_on_rank_0(job, batches):
    """After each save rank 0 evaluates alone: harmless where it is short."""
    job.edit(SAVE, f"{SAVE}            if RANK == 0:\n                evaluate(model, {batches})\n")
    job.edit("def validate(model):", EVALUATE)


def disguise(job, most=4):
    """Change the program in some harmless ways, drawn at random, so that the diff names no culprit."""
    for number in job.random.permutation(len(DECOYS))[:most]:
        if job.program.count(DECOYS[number][0]) == 1:  # the fault has not changed this place
            job.edit(*DECOYS[number])
    if "evaluate" not in job.program and job.random.integers(2):
        evaluate_on_rank_0(job, 4)


def change_data(job, rank, change):
    """Write a rank's training data again, as `change(images, labels)` returns them."""
    data = np.load(file := job.out / f"data/train-{rank}.npz")
    images, labels = change(data["images"], data["labels"])
    np.savez_compressed(file, images=images, labels=labels)


def early(job):
    """Uneven data: one rank has fewer batches, and leaves the loop before the others."""
    change_data(job, job.rank, lambda images, labels: (images[:210], labels[:210]))


def alone(job):
    """Rank 0 evaluates alone, on much data, while the others wait in the next all-reduce."""
    job.rank = 0
    evaluate_on_rank_0(job, 100_000)


def straggler(job):
    """One rank computes at a fraction of its speed: its processor does without its wide registers."""
    slow = {
        "ATEN_CPU_CAPABILITY": "default",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    }
    job.variables[job.rank] = slow


def loader(job):
    """One rank's images were never scaled down, so its loading takes most of each step."""
    change_data(
        job, job.rank, lambda images, labels: (np.kron(images, np.ones((1, 32, 32), np.uint8)), labels)
    )


def bad_sample(job):
    """One sample of one rank is not a number; after the all-reduce all ranks' weights are NaN."""

    def spoil(images, labels):
        images[job.random.integers(len(images)), 3, 3] = np.nan
        return images, labels

    change_data(job, job.rank, spoil)


def split(job):
    """The job resumes, and one node has only an older checkpoint: its ranks continue with other weights."""
    job.resume()
    (job.out / f"node{job.node}/step040.pt").unlink()


def requeue(job):
    """The newest checkpoint is full of NaN: each start resumes from it and fails, and the job is requeued."""
    job.resume()
    for node in (1, 2):
        state = torch.load(file := job.out / f"node{node}/step040.pt")
        state["model"] = {name: weight * torch.nan for name, weight in state["model"].items()}
        torch.save(state, file)
    check = "        if not loss.isfinite():\n            raise FloatingPointError(f'step {step}: loss {loss:.3f}')\n"
    job.edit("        loss.backward()\n", f"{check}        loss.backward()\n")
    job.restarts = 2


def swapped(job):
    """A collective under a condition that is true on one rank alone: it has the only samples of a rare class."""
    for rank in {0, 1, 2, 3} - {job.rank}:
        change_data(job, rank, lambda images, labels: (images, np.where(labels == 7, 1, labels)))
    job.edit(AVERAGE, RATE.format("(labels == 7).sum() > 3"))


def same_order(job):
    """The epoch no longer goes into the seed: every epoch has the same order, on all ranks."""
    job.edit("default_rng(SEED + epoch)", "default_rng([SEED, EPOCHS])")


def node_dies(job):
    """One node goes while it writes a checkpoint."""
    job.edit(*SYNC)
    job.during(job.kill_node, when=(job.out / f"node{job.node}/saving.tmp").exists)


def full(job):
    """One node's own disk has no room left for the second checkpoint."""
    disk = job.out / f"node{job.node}"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=500k", "none", disk], check=True, capture_output=True
    )
    job.closing.append(lambda: subprocess.run(["umount", "-l", disk], check=True))


def port(job):
    """Another user's job listens on MASTER_PORT of the first node."""
    job.rank = 0
    job.closing.append(socket.create_server(("", job.port)).close)


def frozen(job):
    """One rank's process stops for good, as in a driver's call that never returns: it answers nothing."""
    job.during(lambda: job.send(signal.SIGSTOP, [job.rank]), after_step=12)


def xid(job, lines):
    """A rank ends as its GPU's error would end it (here by SIGABRT), and the node's kernel log is a recorded one."""
    job.during(lambda: job.send(signal.SIGABRT, [job.rank]), after_step=12)
    where = "recorded on real nodes and shortened: this machine has no GPU"
    job.gpu_text = f"({where})\nnode {3 - job.node}, dmesg: nothing\nnode {job.node}, dmesg:\n{lines}"


xid31 = partial(  # an access to an address that is none: mostly the program's own kernel
    xid,
    lines="NVRM: Xid (PCI:0000:db:00): 31, pid=13641, Ch 00000008. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_10 faulted "
    "@ 0x7fd7_90743000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ\nnvidia-smi: all 8 GPUs, no ECC errors",
)
xid79 = partial(  # the GPU no longer answers on its bus
    xid,
    lines="NVRM: Xid (PCI:0000:a1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    "nvidia-smi: Unable to determine the device handle for GPU0000:A1:00.0: Unknown Error",
)
