"""Keeps the reader's folder as it is: the run's folder holds links, and what the script writes becomes a copy first."""

import fcntl
import os
import shutil
import sys

import torch

try:
    import safetensors.torch
except ImportError:  # the reader's environment has none
    safetensors = None
from mpdemo_watcher.notes import ORDER, note_once

TEMPORARY = ("/dev/", "/proc/", "/sys/", "/tmp/", "/var/tmp/")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.rename", "os.symlink", "os.link", "os.chmod"}
CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".metadata", ".distcp")
inside = []  # not empty: a change of our own


def watch():
    """See each file before the script opens it for writing, whoever opens it."""
    order, run_folder = ORDER, os.path.realpath(ORDER["folder"])

    def written(path):
        path = os.path.abspath(os.fsdecode(path))
        if os.path.realpath(order["notes"]) in path or path.startswith(tuple(order["temporary"])):
            return None
        if not path.startswith(run_folder + os.sep):
            return refuse_or_allow(path)
        make_own(run_folder, path)
        return os.path.relpath(path, order["cwd"])

    def hook(event, args):
        if inside or event not in CHANGES | {"open", "shutil.rmtree"}:
            return
        if event == "open" and (not args[2] & WRITES or isinstance(args[0], int)):
            if str(args[0]).endswith(CHECKPOINTS) and os.path.abspath(args[0]).startswith(run_folder):
                note_once("read", os.path.relpath(args[0], order["cwd"]))
            return
        inside.append(event)
        try:
            paths = args[:2] if event in ("os.rename", "os.link") else args[1:2] if event == "os.symlink" else args[:1]
            names = [written(path) for path in paths if not isinstance(path, int)]
            if event in ("open", "os.rename") and names[-1] is not None:
                note_once("file", names[-1])
                if event == "os.rename" or args[2] & os.O_TRUNC:  # not one that is read, and continued
                    note_once("new", names[-1])
        finally:
            inside.pop()

    sys.addaudithook(hook)
    watch_writer(torch, "save", 1, hook)
    if safetensors:
        watch_writer(safetensors.torch, "save_file", 1, hook)


def watch_writer(module, name, place, hook):
    """See what a writer that is no Python opens."""
    function = getattr(module, name)

    def watched(*args, **options):
        path = options.get("f", options.get("filename", args[place] if len(args) > place else None))
        if isinstance(path, (str, bytes, os.PathLike)):
            hook("open", (path, "wb", os.O_WRONLY | os.O_TRUNC))
        return function(*args, **options)

    setattr(module, name, watched)


def refuse_or_allow(path):
    """Let a script write to caches and temporary folders, and nowhere else outside the run's folder."""
    home = os.path.expanduser("~") + os.sep
    if path.startswith((*TEMPORARY, home + ".")) and not path.startswith(ORDER["real"] + os.sep):
        return
    raise PermissionError(
        f"mpdemo same: the script writes to {path}; let it write to a relative path, below the folder it is started in"
    )


def make_own(run_folder, path):
    """Replace the links on the way to a file: a linked folder by a folder of links, a linked file by a copy."""
    with open(os.path.join(run_folder, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place = run_folder
        for part in os.path.relpath(path, run_folder).split(os.sep):
            place = os.path.join(place, part)
            if not os.path.islink(place):
                continue
            target = os.path.realpath(place)
            os.unlink(place)
            if os.path.isdir(target):
                link_all(target, place)
            elif os.path.exists(target):
                shutil.copy(target, place)


def link_all(real, place):
    """Make a folder of links to all that lies in another."""
    os.makedirs(place, exist_ok=True)
    for name in os.listdir(real):
        os.symlink(os.path.join(real, name), os.path.join(place, name))
