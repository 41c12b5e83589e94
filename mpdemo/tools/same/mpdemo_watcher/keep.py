"""Keeps the reader's folder as it is: the run's folder holds links, and what the script writes becomes a copy first."""

import contextlib
import fcntl
import os
import shutil
import sys

import torch

try:
    import safetensors.torch
except ImportError:  # the reader's environment has none
    safetensors = None
from .notes import ORDER, before, here, note_once, now

TEMPORARY = ("/dev/", "/proc/", "/sys/", "/tmp/", "/var/tmp/", os.path.expanduser("~/."))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# event: which of its arguments are paths that it changes
CHANGED = dict.fromkeys(["os.rename", "os.link"], slice(2)) | {"os.symlink": slice(1, 2)}
ONE = ["open", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "shutil.rmtree"]
CHANGED |= dict.fromkeys(ONE, slice(1))
CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".metadata", ".distcp")


def watch():
    """See each file before the script opens it for writing, whoever opens it."""
    folder, inside = ORDER["folder"] + os.sep, []  # not empty: a change of our own

    def hook(event, args):
        if inside or event not in CHANGED:
            return
        given = [path for path in args[CHANGED[event]] if not isinstance(path, int)]
        paths = [os.path.abspath(os.fsdecode(path)) for path in given]
        if event == "open" and not args[2] & WRITES:
            if paths and paths[0].startswith(folder) and paths[0].endswith(CHECKPOINTS):
                note_once("read", os.path.relpath(paths[0], ORDER["cwd"]))
            return
        inside.append(event)
        try:
            for path in paths:
                make_own(folder, path) if path.startswith(folder) else refuse_or_allow(path)
            if event in ("open", "os.rename") and paths and paths[-1].startswith(folder):
                wrote(paths[-1], event == "os.rename" or args[2] & os.O_TRUNC)
        finally:
            inside.pop()

    def announce(*args, f=None, filename=None, **__):  # a writer that is no Python
        path = (*args[1:], f or filename)[0]
        if isinstance(path, (str, bytes, os.PathLike)):
            hook("open", (path, "wb", os.O_WRONLY | os.O_TRUNC))

    sys.addaudithook(hook)
    before(torch, "save", announce)
    if safetensors:
        before(safetensors.torch, "save_file", announce)


def wrote(path, new):
    """Note a file that is written, whether it is new, and whether it may be a checkpoint: after a step has begun."""
    trained = bool(now.steps or now.weights)
    name = os.path.relpath(path, ORDER["cwd"])
    note_once("file", name, where=here(), new=bool(new), trained=trained)
    if trained:
        with contextlib.suppress(FileExistsError):  # whoever writes first says it to all ranks
            os.symlink(str(now.steps), f"{ORDER['notes']}/first-file")


def has_saved_twice() -> bool:
    """Whether the run has made twice the steps to its first file, and as many more as its order says."""
    first = f"{ORDER['notes']}/first-file"
    if not ORDER["beyond"] or not os.path.islink(first):
        return False
    return now.steps == 2 * int(os.readlink(first)) + ORDER["beyond"]


def refuse_or_allow(path):
    """Let a script write to caches and temporary folders, and nowhere else outside the run's folder."""
    # our notes, and the run's temporary files
    if path.startswith(os.path.dirname(ORDER["folder"]) + os.sep):
        return
    if not path.startswith(TEMPORARY) or path.startswith(ORDER["real"] + os.sep):
        where = "let it write to a relative path, below the folder it is started in"
        raise PermissionError(f"mpdemo same: the script writes to {path}; {where}")


def make_own(folder, path):
    """Replace the links on the way to a file: a linked folder by a folder of links, a linked file by a copy."""
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place = folder
        for part in os.path.relpath(path, folder).split(os.sep):
            place = os.path.join(place, part)
            if not os.path.islink(place):
                continue
            target = os.path.realpath(place)
            os.unlink(place)
            if os.path.isdir(target):
                os.mkdir(place)
                for name in os.listdir(target):
                    os.symlink(os.path.join(target, name), os.path.join(place, name))
            elif os.path.exists(target):
                shutil.copy(target, place)
