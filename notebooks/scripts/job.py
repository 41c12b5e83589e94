"""What surrounds every training run: process group, data, signals, log and checkpoints.

It needs PyTorch 2.10 or newer."""

import argparse
import ctypes
import faulthandler
import io
import logging
import math
import os
import platform
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import zipfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch.utils.data import DataLoader, Dataset

if torch.__version__ < "2.10a0":  # a pipeline's return_outputs is new in it
    sys.exit(f"this script needs PyTorch 2.10 or newer, and this is {torch.__version__}")

LOOK = 10  # steps from one look to the next, at which all ranks log, save or stop
SAVE_STEPS, SAVE_MINUTES = 100, 15  # whichever comes first; the newest two checkpoints are kept
TIMEOUT = timedelta(minutes=10)  # of a wait for another rank: longer than a save, shorter than a night
GPU = torch.accelerator.current_accelerator(check_available=True)  # None: train on the CPU
PEAK = {"bf16": 989e12 if GPU else 1e11, "fp32": 67e12 if GPU else 1e11}  # operations/s: look yours up
OPTIONS = dcp_state.StateDictOptions(
    flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False
)  # moments by the names of their weights, so that any mesh finds its own
STOP, signals = {signal.SIGTERM, signal.SIGUSR1}, []  # Slurm sends the second before the time limit


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
        signal.signal(number, lambda number, frame: signals.append(number))
    # Loader workers and compilers get it as well, and would die of it. Blocked here, before they start,
    # a signal stays pending in all of them, and a look asks whether one has come.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    faulthandler.register(signal.SIGUSR2)  # kill -USR2 PID prints what each thread is doing
    device = torch.device(GPU.type, int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.accelerator.set_device_index(device.index)
    backends = f"cpu:gloo,{GPU.type}:{dist.get_default_backend_for_device(GPU)}" if GPU else "gloo"
    dist.init_process_group(backends, timeout=TIMEOUT)  # gloo: for tensors on the CPU
    form = {"format": "[%(asctime)s] %(message)s", "datefmt": "%X", "stream": sys.stdout}
    logging.basicConfig(level="INFO", **form)
    logging.info(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}")  # look here first
    return device


def refuse(text):
    """End with one line, before any process waits for another."""
    sys.exit(text if os.environ.get("RANK", "0") == "0" else 1)


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


def total(number):
    """Return the sum of a number over all ranks."""
    dist.all_reduce(sums := torch.tensor(number))  # on the CPU: no GPU is waited for
    return sums.item()


class Seeded(Dataset):
    """Samples, with random numbers that depend on epoch and sample, whichever process reads them."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, place):
        torch.default_generator.manual_seed(hash(place))
        return self.dataset[place[1]]


def places(samples, batch, epochs, first, rank, ranks):
    """Yield epoch and number of a rank's samples in each batch after the first ones."""
    length = samples // batch  # steps of an epoch
    for epoch in range(first // length, epochs):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()
        for step in range(max(first, epoch * length), (epoch + 1) * length):
            yield [(epoch, sample) for sample in order[step % length * batch :][:batch][rank::ranks]]


def parts(samples, batch, rank, ranks):
    """Return a rank's samples of each batch of a validation; all ranks have as many batches."""
    batches = torch.arange(samples).tensor_split(max(1, samples // batch))
    return [[(0, sample) for sample in part[rank::ranks].tolist()] for part in batches]


def make_loader(dataset, todo, workers=0):
    """Return a loader of given batches."""
    dataset, pinned = Seeded(dataset), GPU is not None
    return DataLoader(dataset, batch_sampler=todo, num_workers=workers, pin_memory=pinned)


def begun(layer, device):
    """Return what a layer's reset_parameters fills of its own parameters and buffers, on a device."""
    if not hasattr(layer, "reset_parameters"):
        return {}
    layer.to_empty(device=device, recurse=False)

    def begin(number):
        for tensor in tensors_of(layer).values():
            tensor.fill_(number)
        layer.reset_parameters()
        return tensors_of(layer)

    with torch.random.fork_rng([device] * (device.type != "cpu"), device_type=device.type):
        once = {name: tensor.clone() for name, tensor in begin(0).items()}
    # What is filled does not depend on what was in the memory.
    return {name: tensor for name, tensor in begin(1).items() if tensor.equal(once[name])}


def tensors_of(layer):
    return dict([*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)])


def refuse_empty(names):
    """End the job if any rank names what nobody has filled: garbage, and another on each rank."""
    if found := ", ".join(sorted({name for names in gather([*names]) for name in names})):
        end(f"nobody fills {found}: give it a layer whose reset_parameters does, as Block in gpt.py")


def copy_from_rank_0(whole, sharded):
    """Copy a whole model, which only rank 0 has, into the shards of all ranks."""
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(sharded, whole.state_dict(), options=options)
    for name, buffer in sharded.named_buffers():  # no state dict has those with persistent=False
        if dist.get_rank() == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)


def cosine(done, steps, warm_up=20):
    """Return the fraction of the highest learning rate: it rises linearly, then falls as a cosine."""
    return min((done + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * done / steps))


def start_of(text):
    """Return how the names of checkpoints begin, of a flag's text."""
    if text.rpartition("/")[2] in ("", ".", ".."):
        how = f"checkpoints cannot be named {text!r}: say how their names begin, such as runs/mine"
        raise argparse.ArgumentTypeError(how)
    return Path(text)


def steps_of(folder):
    """Return after how many steps a checkpoint was written."""
    return int(folder.name.rpartition("-")[2])


def numbered(start):
    """Return all START-STEPS, the newest first."""
    names = re.compile(re.escape(start.name) + r"-\d+")  # compared: a pattern would misread a [ in them
    found = (path for path in start.parent.glob("*") if names.fullmatch(path.name))
    return sorted(found, key=steps_of, reverse=True)


def saved(start):
    """Return the complete checkpoints, the newest first: .metadata is written last."""
    return [path for path in numbered(start) if (path / ".metadata").is_file()]


def foreign(path):
    """Whether something of a checkpoint's name is none, neither whole nor begun: yours, to be left alone."""
    if not path.is_dir():
        return True
    names = {file.name for file in path.iterdir()}
    return ".metadata" not in names and not all(name.startswith((".metadata", "__")) for name in names)


def damage(folder):
    """Return what is wrong with a checkpoint, or None; each rank checks the sums of a part of it."""
    try:
        parts = [*dcp.FileSystemReader(folder).read_metadata().storage_data.values()]
        for part in parts[dist.get_rank() :: dist.get_world_size()]:
            with (folder / part.relative_path).open("rb") as file:
                file.seek(part.offset)
                archive = zipfile.ZipFile(io.BytesIO(file.read(part.length)))  # as torch.save writes it
            assert not archive.testzip(), f"wrong checksum in {part.relative_path}"
    except Exception as error:  # a damaged file raises many kinds
        return str(error) or type(error).__name__


def newest(start):
    """Return the newest whole checkpoint, if any; every rank must see those that rank 0 sees."""
    node = os.environ.get("SLURMD_NODENAME", platform.node())
    seen = ", ".join(map(str, saved(start))) or f"no {start}-*"
    every = gather((seen, f"rank {dist.get_rank()} on {node} sees {seen}"))
    for other, text in every:
        if other != every[0][0]:  # it would train another model, or hang
            end(f"{text}, but {every[0][1]}: all need the same folder {start.parent.resolve()}")
    damaged = []
    for folder in saved(start):
        if not (found := [text for text in gather(damage(folder)) if text]):
            if dist.get_rank() == 0:
                for other in damaged:  # its number may come again, and each save gets a new folder
                    shutil.rmtree(aside := f"{other}.damaged", ignore_errors=True)  # of an earlier time
                    other.rename(aside)
            return folder
        say(f"{folder} is damaged ({found[0]}): trying the one before it")
        damaged.append(folder)
    if damaged:
        end(f"no whole checkpoint {start}-* can be read: move them away to start anew")
    return None


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


def reason(error):
    """Return what the system said of a checkpoint that could not be read or written."""
    first = next(iter(error.failures.values()))[0]  # of the first rank that failed
    return str(first).partition("\n")[0] or type(first).__name__


def try_to_save(start):
    """End the job if a rank can't write where its checkpoints are to be: it would lose its work."""
    found = None
    try:
        start.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{start.name}-", dir=start.parent) as folder:
            Path(folder, "file").write_text("is it full?")
        if others := [path for path in numbered(start) if foreign(path)]:
            found = f"{others[0]} is there, and is none: move it away, or choose another name"
    except OSError as error:
        found = str(error)
    if found := [text for text in gather(found) if text]:
        end(f"no checkpoint {start}-* can be written ({found[0]})")


def last_step(steps, all_steps):
    """Return the step after which a run ends, of --steps and what --epochs have; None: all."""
    if steps and steps > all_steps:
        end(f"--steps {steps}: --epochs end after {all_steps}, so give more of them")
    return steps or all_steps


class Run:
    """The log, the stops and the checkpoints of a run; all ranks make the same calls."""

    def __init__(self, start, batches, operations, peak, unit="tokens", copies=1, last=0, more=None):
        """Of checkpoints START-STEPS, which fit these batches; copies: ranks with the same samples.

        operations: of an item, for its speed as a fraction of a device's peak (MFU).
        last: the step after which the run ends, if that may be in the middle of an epoch.
        more: what else to save, by name: all that has state_dict, such as a scheduler or an EMA.
        """
        self.start, self.batches, self.unit, self.copies = start, batches, unit, copies
        self.operations, self.peak, self.last, self.more = operations, peak, last, more or {}
        self.done, self.lost, self.seen = 0, 0.0, 0  # steps; losses and items of this epoch, all ranks
        self.losses, self.items, self.stopping = [], 0, False  # since the last look
        self.writing, self.whole, self.timed, self.validating = None, [], False, 0.0
        try_to_save(start)
        self.savers = dist.new_group(backend="gloo")  # where its thread disturbs no training
        self.began = self.wrote = time.monotonic()

    def state(self, model, optimizer):
        """Return this rank's part of a checkpoint, by names that no mesh changes; dcp.load fills it."""
        weights, moments = dcp_state.get_state_dict(model, optimizer, options=OPTIONS)
        state = {"model": weights, "optimizer": moments, "batches": dict(self.batches), **self.more}
        return state | {"progress": {"done": self.done, "lost": self.lost, "seen": self.seen}}

    def resume(self, model, optimizer):
        """Load the newest checkpoint, if there is one."""
        if not (folder := newest(self.start)):
            return
        state = self.state(model, optimizer)
        try:
            dcp.load(state, checkpoint_id=folder)  # each process reads what its shards need
        except dcp.CheckpointException as error:
            end(f"{folder} does not fit this model ({reason(error)})")
        if state["batches"] != self.batches:
            end(f"{folder} has {state['batches']}, this run {self.batches}: other data would follow")
        weights = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        dcp_state.set_state_dict(model, optimizer, **weights, options=OPTIONS)
        vars(self).update(state["progress"], whole=[folder])  # done, lost and seen
        say(f"resumes from {folder}, after {self.done} steps")

    def look(self, loss, items, norm, rate):
        """Note a step, with this rank's sum of losses; log if it is time; return whether to save."""
        self.done += 1
        self.losses.append(loss)
        self.items += items
        ends = self.done == self.last or self.done % self.batches["of an epoch"] == 0
        if self.done % LOOK and self.done % SAVE_STEPS and not ends:
            return False  # else all look, in one all-reduce, and decide the same
        warned = bool(signals or signal.sigpending() & STOP)  # comes to each rank at another moment
        due = dist.get_rank() == 0 and time.monotonic() - self.wrote > 60 * SAVE_MINUTES  # by its clock
        own = [*torch.stack([*self.losses, norm / dist.get_world_size()]).tolist(), warned, due]
        dist.all_reduce(sums := torch.tensor(own, dtype=torch.double))  # on the CPU
        if not sums.isfinite().all():
            bad = gather(min([k for k, x in enumerate(own) if not math.isfinite(x)], default=math.inf))
            step = min(self.done, self.done - len(self.losses) + 1 + min(bad))
            what = f"the loss or gradient of rank {bad.index(min(bad))} is not finite"
            end(f"step {step}: {what}; the checkpoints before it stay")
        *losses, norm, warned, due = sums.tolist()
        seconds = (time.monotonic() - self.began) / len(losses)  # of a step
        speed = self.items / self.copies / len(losses) / seconds
        used = 100 * speed * self.operations / self.peak / dist.get_world_size()
        text = f"step {self.done}: loss {sum(losses) / self.items:.4f}, gradient {norm:.3f}, "
        text += f"learning rate {rate:.5f}, {speed:,.0f} {self.unit}/s, MFU {used:.1f} %"
        say(f"{text}, peak {peak_mib():,.0f} MiB")
        self.lost += sum(losses) / self.copies  # of each sample once: another mesh may resume
        self.seen += self.items / self.copies
        self.losses, self.items, self.stopping = [], 0, warned > 0
        self.began, self.looking = time.monotonic(), LOOK * seconds
        return self.stopping or due > 0 or self.done % SAVE_STEPS == 0

    def end_epoch(self, validation, name="validation"):
        """Log the means of an epoch's losses, and begin the next one."""
        epoch = self.done // self.batches["of an epoch"]
        say(f"epoch {epoch}: loss {self.lost / self.seen:.6f}, {name} {validation:.6f}")
        self.validating, self.began = time.monotonic() - self.began, time.monotonic()
        self.lost, self.seen = 0.0, 0

    def save(self, model, optimizer):
        """Copy this rank's part of a checkpoint, which a thread then writes."""
        self.finish()
        start, folder = time.monotonic(), Path(f"{self.start}-{self.done}")
        if folder in self.whole:  # killed in a save over it, we would have neither
            say(f"{folder} is there already")
            return
        copied = {"checkpoint_id": folder, "process_group": self.savers}
        self.writing = dcp.async_save(self.state(model, optimizer), **copied)
        self.wrote, self.whole = time.monotonic(), [*self.whole, folder][-2:]
        if self.stopping or not self.timed:  # the first one, too, to know how long it takes
            self.finish()
            late, self.timed = self.looking + self.validating + time.monotonic() - start, True
            say(f"saved; a stop may take {late:.1f} s, and {limits(late)}")
        self.began = time.monotonic()

    def finish(self):
        """Wait until the last checkpoint is on the disk; keep the newest two that are whole."""
        if not self.writing:
            return
        try:
            self.writing.result()
        except dcp.CheckpointException as error:  # all ranks get it, as for a full disk
            end(f"{self.start}-... could not be written ({reason(error)}); those before it stay")
        self.writing = None
        for old in numbered(self.start) if dist.get_rank() == 0 else ():  # unfinished ones, too
            if steps_of(old) < self.done and old not in self.whole and not foreign(old):
                shutil.rmtree(old, onerror=lambda _, path, why: say(f"{path} stays ({why[1]})"))
