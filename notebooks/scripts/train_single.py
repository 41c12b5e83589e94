"""Train on one device, in plain PyTorch: python train_single.py

It saves as it goes, and when SIGTERM or SIGUSR1 comes; the same command resumes.
kill -USR2 PID shows what it is doing. It needs PyTorch 2.9 or newer."""

import contextlib
import faulthandler
import logging
import math
import os
import re
import signal
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torch.utils.flop_counter import FlopCounterMode

if torch.__version__ < "2.9a0":  # torch.accelerator.max_memory_allocated is new in it
    sys.exit(f"this script needs PyTorch 2.9 or newer, and this is {torch.__version__}")

EPOCHS, BATCH, WORKERS = 5, 64, 0  # workers: processes that load batches ahead of time
RATE, WARM_UP, CLIP = 0.1, 12, 1.0  # highest learning rate, steps until it is reached, largest gradient
BF16 = False  # compute in bfloat16; weights and gradients stay float32
LOOK = 8  # steps from one look to the next: to log, to save, to stop
SAVE_STEPS, SAVE_MINUTES = 60, 15  # whichever comes first; the newest two checkpoints are kept
GPU = torch.accelerator.current_accelerator(check_available=True)  # None: train on the CPU
PEAK = (989e12 if BF16 else 67e12) if GPU else 1e11  # operations/s: an H100, a CPU core. Look yours up
NAME = sys.argv[1] if sys.argv[1:] else "train_single"  # how its files' names begin
OTHERS = sys.argv[2:]
CHECKPOINT = Path(NAME)
STOP, signals = {signal.SIGTERM, signal.SIGUSR1}, []  # Slurm sends the second before the time limit


def make_dataset():  # yours: one dataset to train on, one to validate with
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    dataset = TensorDataset(images[:, None], labels)  # 1,797 images (1, 8, 8), from 0 to 1
    return random_split(dataset, [1536, 261], torch.Generator().manual_seed(0))


def make_model():  # yours: any nn.Module
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))


class Seeded(Dataset):
    """The images, with random numbers that depend on epoch and image, also in a worker or resumed."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, place):
        torch.default_generator.manual_seed(hash(place))
        return self.dataset[place[1]]


def places(images, first):
    """Yield epoch and number of the images in each batch after the first; no others are read."""
    length = images // BATCH  # steps of an epoch
    for epoch in range(first // length, EPOCHS):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch)).tolist()
        for step in range(max(first, epoch * length), (epoch + 1) * length):
            yield [(epoch, image) for image in order[step % length * BATCH :][:BATCH]]


def short(error):
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def try_folder():
    """Return why no checkpoint could be written, or None."""
    if OTHERS or NAME[:1] == "-" or os.path.basename(NAME) in ("", ".", ".."):
        given = " ".join([NAME, *OTHERS])
        return f"checkpoints cannot be named {given!r}: say how their names begin, such as runs/mine"
    trial = Path(f"{CHECKPOINT}-trying.tmp")  # a folder, which nobody takes for a checkpoint
    try:
        trial.mkdir(parents=True, exist_ok=True)
        trial.rmdir()
    except OSError as error:
        return f"no checkpoint {CHECKPOINT}-*.pt can be written ({error})"
    return None


def saved():
    """Return the files CHECKPOINT-STEPS.pt, the newest first."""
    names = re.compile(re.escape(CHECKPOINT.name) + r"-\d+\.pt")
    files = [file for file in CHECKPOINT.parent.glob("*.pt") if names.fullmatch(file.name)]
    files = filter(Path.is_file, files)  # no folder or pipe of that name
    return sorted(files, key=lambda file: int(file.stem.split("-")[-1]), reverse=True)


def resume(state, model, optimizer):
    """Load the newest whole checkpoint, if there is one; return the state to go on with."""
    if failed := try_folder():
        sys.exit(failed)
    batches, damaged = state["batches"], []
    for file in saved():
        try:
            with zipfile.ZipFile(file) as archive:
                assert not archive.testzip(), "wrong checksum"  # torch.load does not compare them
            state = torch.load(file, map_location="cpu")  # on the GPU it would stay there, unused
            lost = {"steps", "loss", "batches", "model", "optimizer"} - state.keys()
            assert not lost, f"without {lost}"
        except Exception as error:  # a damaged file raises many kinds
            logging.warning(f"{file} is damaged ({short(error)}): trying the one before it")
            damaged.append(file)
            continue
        if state["batches"] != batches:
            sys.exit(f"{file} has {state['batches']}, this run {batches}: other images would follow")
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # another model has other names, shapes or numbers of parameters
            sys.exit(f"{file} does not fit this model ({short(error)})")
        logging.info(f"resumes from {file}, after {state['steps']} steps")
        with contextlib.suppress(OSError):
            for bad in damaged:  # it is none of the newest two, which are kept
                bad.rename(bad.with_suffix(".damaged"))
        return state
    if damaged:
        sys.exit(f"no whole checkpoint {CHECKPOINT}-*.pt can be read: move them away to start anew")
    return state


def save(state):
    """Write a checkpoint whole or not at all, and delete all but the newest two."""
    file = Path(f"{CHECKPOINT}-{state['steps']}.pt")
    part, wrong = file.with_suffix(".tmp"), None
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as output:
            torch.save(state, output)
            output.flush()
            os.fsync(output.fileno())  # on the disk before it gets its name
        part.replace(file)  # if we are killed before this, the older ones are whole
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as the second
        wrong = f"{file} could not be written ({short(error)}); the checkpoints before it stay"
    with contextlib.suppress(OSError):
        for old in (part, *saved()[2:]):
            old.unlink(missing_ok=True)
    if wrong:
        sys.exit(wrong)


def count(images):
    """Return the operations of an image in a step, or 0; on the meta device it needs no memory."""
    try:
        image = images[0][0][None].to("meta")
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            make_model().eval()(image)
    except Exception as error:  # some models need an image's values
        logging.info(f"no MFU, as the operations of this model cannot be counted ({short(error)})")
        return 0
    return 3 * counter.get_total_flops()  # backward is twice as much as forward


def peak_mib():
    """Return the peak memory; of a CPU process from VmHWM, as ru_maxrss may be its launcher's."""
    if GPU:
        return torch.accelerator.max_memory_allocated() / 2**20
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 2**10


def accuracy(model, check, device):
    """Return the fraction of correct predictions."""
    right = torch.zeros((), device=device)
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(check, BATCH):
            right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    model.train()
    return right.item() / len(check)


def main():
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        sys.exit("srun started several processes, and each would train alone: use train_ddp.py")
    for number in STOP:
        signal.signal(number, lambda number, frame: signals.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # so that the loader's workers do not die of it
    faulthandler.register(signal.SIGUSR2)
    device = GPU or torch.device("cpu")
    form = {"format": "[%(asctime)s] %(message)s", "datefmt": "%X", "stream": sys.stdout}
    logging.basicConfig(level="INFO", **form)
    logging.info(f"training on {device}")  # look here first in every log
    torch.manual_seed(0)
    train, check = make_dataset()
    length = len(train) // BATCH  # steps of an epoch
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    state = {"steps": 0, "loss": 0.0, "batches": {"size": BATCH, "of an epoch": length}}
    state = resume(state, model, optimizer)
    operations = count(train)
    options = {"num_workers": WORKERS, "pin_memory": GPU is not None}
    loader = DataLoader(Seeded(train), batch_sampler=places(len(train), state["steps"]), **options)
    losses, wrote = [], (began := time.monotonic())
    for done, (images, labels) in enumerate(loader, state["steps"] + 1):  # done: with this step
        torch.manual_seed(done)  # dropout, also resumed
        falls = 0.5 + 0.5 * math.cos(math.pi * (done - 1) / EPOCHS / length)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(done / WARM_UP, falls)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=BF16):
            outputs = model(images)
        loss = cross_entropy(outputs.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.detach())
        if done % LOOK and done % SAVE_STEPS and done % length:
            continue
        warned = bool(signals or signal.sigpending() & STOP)
        due = time.monotonic() - wrote > 60 * SAVE_MINUTES
        *means, norm = torch.stack([*losses, norm]).tolist()  # waits for the GPU
        if bad := [k for k, number in enumerate([*means, norm]) if not math.isfinite(number)]:
            step = min(done, done - len(losses) + 1 + bad[0])
            sys.exit(f"step {step}: loss or gradient is not finite; the checkpoints before it stay")
        state["loss"] += sum(means)
        seconds = (time.monotonic() - began) / len(losses)  # of a step
        speed = BATCH / seconds
        used = 100 * speed * operations / PEAK  # model FLOPs utilization
        text = f"step {done}: loss {sum(means) / len(means):.4f}, gradient {norm:.3f}, "
        text += f"learning rate {group['lr']:.4f}, {speed:,.0f} images/s, "
        text += f"MFU {used:.1f} %, " if operations else ""
        logging.info(text + f"peak {peak_mib():,.0f} MiB")
        if done % length == 0:
            right, mean = accuracy(model, check, device), state["loss"] / length
            logging.info(f"epoch {done // length}: loss {mean:.6f}, accuracy {right:.4f}")
            state["loss"] = 0.0
        if warned or due or done % SAVE_STEPS == 0 or done == EPOCHS * length:
            state |= {"steps": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(state)
            wrote = time.monotonic()
            late = wrote - began + (LOOK - len(losses)) * seconds  # a whole look, a validation, a save
            logging.info(f"saved; a stop may take {late:.1f} s")
        if warned:
            break
        losses, began = [], time.monotonic()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()
