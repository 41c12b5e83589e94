"""Train on several devices with DistributedDataParallel, one process per device, in plain PyTorch.

One machine:     torchrun --standalone --nproc-per-node=2 train_ddp.py  (1 instead of 2 to debug)
Several nodes:   sbatch train.sbatch
With any number of processes its losses are those of train_single.py. It saves as it goes, and when
SIGTERM or SIGUSR1 comes; the same command resumes. kill -USR2 PID shows what a process is doing.
It needs PyTorch 2.9 or newer."""

import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import platform
import re
import signal
import socket
import sys
import time
import zipfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split
from torch.utils.flop_counter import FlopCounterMode

if torch.__version__ < "2.9a0":  # torch.accelerator.max_memory_allocated is new in it
    sys.exit(f"this script needs PyTorch 2.9 or newer, and this is {torch.__version__}")

EPOCHS, BATCH, WORKERS = 5, 64, 0  # batch: of all processes together; workers: per process
RATE, WARM_UP, CLIP = 0.1, 12, 1.0  # highest learning rate, steps until it is reached, largest gradient
BF16 = False  # compute in bfloat16; weights and gradients stay float32
LOOK = 8  # steps from one look to the next, at which all ranks log, save or stop
SAVE_STEPS, SAVE_MINUTES = 60, 15  # whichever comes first; the newest two checkpoints are kept
TIMEOUT = timedelta(minutes=10)  # of a wait for another rank: longer than a save, shorter than a night
GPU = torch.accelerator.current_accelerator(check_available=True)  # None: train on the CPU
PEAK = (989e12 if BF16 else 67e12) if GPU else 1e11  # operations/s: an H100, a CPU core. Look yours up
NAME = sys.argv[1] if sys.argv[1:] else "train_ddp"  # how its files begin, on a shared disk
OTHERS = sys.argv[2:]
CHECKPOINT = Path(NAME)
STOP, signals = {signal.SIGTERM, signal.SIGUSR1}, []  # Slurm sends the second before the time limit


def make_dataset():  # yours: one dataset to train on, one to validate with, the same in every process
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(digits["images"]) / 16, torch.tensor(digits["labels"]).long()
    dataset = TensorDataset(images[:, None], labels)  # 1,797 images (1, 8, 8), from 0 to 1
    return random_split(dataset, [1536, 261], torch.Generator().manual_seed(0))


def make_model():  # yours: any nn.Module
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))


class Seeded(Dataset):  # 10
    """The images, with random numbers that depend on epoch and image, whichever process reads them."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, place):
        torch.default_generator.manual_seed(hash(place))
        return self.dataset[place[1]]


def places(images, first, rank, world):  # 2, 5, 10: in place of the sampler
    """Yield epoch and number of a rank's images in each batch after the first; reads no others."""
    length = images // BATCH  # steps of an epoch
    for epoch in range(first // length, EPOCHS):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch)).tolist()
        for step in range(max(first, epoch * length), (epoch + 1) * length):
            batch = order[step % length * BATCH :][:BATCH]  # the same for any number of ranks
            yield [(epoch, image) for image in batch[rank::world]]  # 3, 11: equal up to one image


def join():
    """Join the process group; return this process's device."""
    if "RANK" not in os.environ:
        sys.exit("RANK is not set: start this script with torchrun, as its first lines say")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux then ends this process when its launcher dies
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # and torchrun may have died before
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])).close()
        except OSError as error:
            sys.exit(f"torchrun doesn't answer any more: {error}")
    for number in STOP:
        signal.signal(number, lambda number, frame: signals.append(number))  # 12: a warning
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # so that the loader's workers do not die of it
    faulthandler.register(signal.SIGUSR2)
    device = torch.device(GPU.type, int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.accelerator.set_device_index(device.index)  # 1
    backends = f"cpu:gloo,{GPU.type}:{dist.get_default_backend_for_device(GPU)}" if GPU else "gloo"
    dist.init_process_group(backends, timeout=TIMEOUT)  # 1, 17; gloo: for tensors on the CPU
    form = {"format": "[%(asctime)s] %(message)s", "datefmt": "%X", "stream": sys.stdout}
    logging.basicConfig(level="INFO", **form)
    logging.info(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}")  # look here first
    return device


def end(text):
    """End the job with one line; all ranks call this."""
    sys.exit(text if dist.get_rank() == 0 else 1)


def say(text):
    """Log a text, on rank 0."""
    if dist.get_rank() == 0:
        logging.info(text)


def gather(value):
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def short(error):
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def try_folder():  # 14
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


def saved():  # 14
    """Return the files CHECKPOINT-STEPS.pt, the newest first."""
    names = re.compile(re.escape(CHECKPOINT.name) + r"-\d+\.pt")
    files = [file for file in CHECKPOINT.parent.glob("*.pt") if names.fullmatch(file.name)]
    files = filter(Path.is_file, files)  # no folder or pipe of that name
    return sorted(files, key=lambda file: int(file.stem.split("-")[-1]), reverse=True)


def resume(state, model, optimizer):  # 9, 14, 15
    """Load the newest whole checkpoint, if any; every rank must find the one that rank 0 finds."""
    if failed := gather(try_folder() if dist.get_rank() == 0 else None)[0]:
        end(failed)
    batches, found, damaged = state["batches"], "no checkpoint", []
    for file in saved():
        try:
            with zipfile.ZipFile(file) as archive:
                assert not archive.testzip(), "wrong checksum"  # torch.load does not compare them
            state = torch.load(file, map_location="cpu")  # 9: on the GPU it would stay there, unused
            lost = {"steps", "loss", "batches", "model", "optimizer"} - state.keys()
            assert not lost, f"without {lost}"
            found = f"{file} with {state['batches']}"
            break
        except Exception as error:  # a damaged file raises many kinds
            logging.warning(f"{file} is damaged ({short(error)}): trying the one before it")
            damaged.append(file)
            found = f"no whole checkpoint {CHECKPOINT}-*.pt"
    node = os.environ.get("SLURMD_NODENAME", platform.node())
    every = gather((found, f"rank {dist.get_rank()} on {node} finds {found}"))
    for other, text in every:
        if other != every[0][0]:  # 15: it would train another model, and the others average with it
            end(f"{text}, but {every[0][1]}: all need the same folder {CHECKPOINT.parent.resolve()}")
    if found.startswith("no whole"):
        end(f"{found} can be read: move them away to start anew")
    if state["batches"] != batches:
        end(f"{found} does not fit {batches}: its next step would get other images")
    try:
        if "model" in state:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            say(f"resumes from {file}, after {state['steps']} steps")
    except Exception as error:  # another model has other names, shapes or numbers of parameters
        end(f"{file} does not fit this model ({short(error)})")
    with contextlib.suppress(OSError):
        for bad in damaged if dist.get_rank() == 0 else ():  # none of the newest two, which are kept
            bad.rename(bad.with_suffix(".damaged"))
    return state


def save(state):  # 8, 14
    """Write a checkpoint whole or not at all, keep the newest two; return what went wrong, or None."""
    file = Path(f"{CHECKPOINT}-{state['steps']}.pt")
    part, wrong = file.with_suffix(".tmp"), None
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as output:
            torch.save(state, output)
            output.flush()
            os.fsync(output.fileno())  # 14: on the disk before it gets its name
        part.replace(file)  # 8: if we are killed before this, the older ones are whole
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as the second
        wrong = f"{file} could not be written ({short(error)}); the checkpoints before it stay"
    with contextlib.suppress(OSError):
        for old in (part, *saved()[2:]):
            old.unlink(missing_ok=True)
    return wrong


def count(images):
    """Return the operations of an image in a step, or 0; on the meta device it needs no memory."""
    try:
        image = images[0][0][None].to("meta")
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            make_model().eval()(image)
    except Exception as error:  # some models need an image's values
        say(f"no MFU, as the operations of this model cannot be counted ({short(error)})")
        return 0
    return 3 * counter.get_total_flops()  # backward is twice as much as forward


def limits(late):
    """Return how long torchrun and Slurm wait after a signal, and what to do if a stop takes longer."""
    old = torch.__version__ < "2.12"  # its torchrun ignores the variable
    left = 30.0 if old else float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
    slurm = float(os.environ.get("GRACE") or math.inf)  # train.sbatch asks Slurm
    text = f"torchrun kills after {left:.0f} s"
    text += f", Slurm, if it preempts, after {slurm:.0f} s" if slurm < math.inf else ""
    more = ", or take PyTorch 2.12" if old else ", or raise TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    return text + (": lower LOOK" + more * (late >= left)) * (late >= min(left, slurm))


def peak_mib():
    """Return the peak memory; of a CPU process from VmHWM, as ru_maxrss may be its launcher's."""
    if GPU:
        return torch.accelerator.max_memory_allocated() / 2**20
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 2**10


def accuracy(model, check, device):  # 16
    """Return the fraction of correct predictions; each rank validates its own part of the images."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for buffer in model.buffers():  # batch norm: with the statistics that rank 0 saves
        dist.broadcast(buffer, 0)
    right = torch.zeros((), device=device)
    model.eval()
    with torch.no_grad():  # without DDP: the ranks may have different numbers of batches here
        for images, labels in DataLoader(Subset(check, range(rank, len(check), world)), BATCH // world):
            right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(check)


@record  # torchrun then shows this process's error, not only its exit status
def main():
    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    if world > BATCH:
        end(f"a batch of {BATCH} is too small for {world} processes: start fewer, or raise BATCH")
    torch.manual_seed(0)
    train, check = make_dataset()
    length = len(train) // BATCH  # steps of an epoch
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    state = {"steps": 0, "loss": 0.0, "batches": {"size": BATCH, "of an epoch": length}}
    state = resume(state, model, optimizer)
    ddp = DistributedDataParallel(model)  # 4: copies rank 0's weights to all
    operations = count(train)
    options = {"num_workers": WORKERS, "pin_memory": GPU is not None}
    todo = places(len(train), state["steps"], rank, world)
    loader = DataLoader(Seeded(train), batch_sampler=todo, **options)
    losses, wrote = [], (began := time.monotonic())
    for done, (images, labels) in enumerate(loader, state["steps"] + 1):  # done: with this step
        torch.manual_seed(done * world + rank)  # 7, 10: dropout: each part of each batch its own
        falls = 0.5 + 0.5 * math.cos(math.pi * (done - 1) / EPOCHS / length)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(done / WARM_UP, falls)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=BF16):
            outputs = ddp(images)
        loss = cross_entropy(outputs.float(), labels, reduction="sum") / BATCH
        optimizer.zero_grad()
        (loss * world).backward()  # 11: DDP averages over the ranks, whose parts may differ by an image
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.detach())
        if done % LOOK and done % SAVE_STEPS and done % length:
            continue  # else all look, in one all-reduce, and decide the same
        warned = bool(signals or signal.sigpending() & STOP)  # 12: at another moment on each rank
        due = rank == 0 and time.monotonic() - wrote > 60 * SAVE_MINUTES  # 13: one clock for all
        own = [*torch.stack([*losses, norm / world]).tolist(), warned, due]  # waits for the GPU
        dist.all_reduce(total := torch.tensor(own, dtype=torch.double))  # 6, 13: all decide the same
        if not total.isfinite().all():  # 17
            bad = gather(min([k for k, x in enumerate(own) if not math.isfinite(x)], default=math.inf))
            step = min(done, done - len(losses) + 1 + min(bad))
            what = f"the loss or gradient of rank {bad.index(min(bad))} is not finite"
            end(f"step {step}: {what}; the checkpoints before it stay")
        *means, norm, warned, due = total.tolist()
        state["loss"] += sum(means)
        seconds = (time.monotonic() - began) / len(losses)  # of a step
        speed = BATCH / seconds
        used = 100 * speed * operations / PEAK / world  # model FLOPs utilization
        text = f"step {done}: loss {sum(means) / len(means):.4f}, gradient {norm:.3f}, "
        text += f"learning rate {group['lr']:.4f}, {speed:,.0f} images/s, "
        text += f"MFU {used:.1f} %, " if operations else ""
        say(text + f"peak {peak_mib():,.0f} MiB")
        if done % length == 0:
            right = accuracy(model, check, device)
            say(f"epoch {done // length}: loss {state['loss'] / length:.6f}, accuracy {right:.4f}")
            state["loss"] = 0.0
        if warned or due or done % SAVE_STEPS == 0 or done == EPOCHS * length:
            state |= {"steps": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if failed := gather(save(state) if rank == 0 else None)[0]:
                end(failed)  # all together: nobody waits for a rank that is gone
            wrote = time.monotonic()
            late = wrote - began + (LOOK - len(losses)) * seconds  # a whole look, a validation, a save
            say(f"saved; a stop may take {late:.1f} s, and {limits(late)}")
        if warned:
            break
        losses, began = [], time.monotonic()
    dist.barrier()  # 8: no rank leaves while rank 0 still writes
    dist.destroy_process_group()  # 1


if __name__ == "__main__":  # the loader's workers may import this file again
    main()
