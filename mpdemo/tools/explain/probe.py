"""Look at the ranks of a running job on this node: where each one is, what it takes, and what it can tell.

The text of this file is sent to every node of a job as ``python -c``, so it imports nothing of mpdemo. A rank's stack
comes from py-spy, where that is installed and may look; else the rank is asked by SIGUSR2 if it handles that signal (by
default it kills), and ``faulthandler`` writes the stack into the rank's stderr, mostly the job's log.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil

PAUSE = 0.1  # s in which a rank writes its stack, and its CPU time is counted
SETTLE = 0.4  # s in which the last stack has come into the log
MOST = 2**22  # bytes of a log that are read
LONGEST = 8.0  # s in which all ranks have been asked
RESERVED = 4294967290  # Slurm's numbers from here on are no steps of srun
# where PyTorch writes its flight recorder
RECORDERS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def pythons():
    """Return the Python processes that may be ours: process -> its parent, and the variables it was started with."""
    found = (process.info for process in psutil.process_iter(["pid", "exe", "ppid", "environ"]))
    ours = (info for info in found if os.path.basename(info["exe"] or "").startswith("python"))
    return {info["pid"]: (info["ppid"], info["environ"] or {}) for info in ours}


def ranks_of(job, processes):
    """Return the ranks of a Slurm job among these processes: rank -> process.

    torchrun's have RANK, those that srun starts SLURM_PROCID; the helpers below a rank inherit both.
    """
    own_step = os.environ.get("SLURM_STEP_ID")
    ours = {}
    for pid, (parent, variables) in processes.items():
        if variables.get("SLURM_JOB_ID") == job and variables.get("SLURM_STEP_ID") != own_step:
            ours[pid] = parent, variables
    name = "RANK"
    chosen = {pid: known for pid, known in ours.items() if name in known[1]}
    if not chosen:
        name = "SLURM_PROCID"
        steps = {
            pid: int(variables.get("SLURM_STEP_ID") or RESERVED) for pid, (_, variables) in ours.items()
        }
        chosen = {pid: known for pid, known in ours.items() if steps[pid] < RESERVED} or ours
    ranks = {}
    for pid, (parent, variables) in sorted(chosen.items(), reverse=True):  # the oldest last: it counts
        _, above = chosen.get(parent, (None, {}))
        if above.get(name) != variables.get(name):
            ranks[int(variables.get(name, 0))] = pid
    return ranks


def ranks_of_launchers(launched):
    """Return the ranks that these processes are, or have started where they are torchruns: rank -> process."""
    ranks = {}
    for pid, (parent, variables) in pythons().items():
        if parent in launched.values() and "TORCHELASTIC_RESTART_COUNT" in variables:
            ranks[int(variables["RANK"])] = pid
    return ranks or launched


def look(rank, pid):
    """Return what is known of a rank, and ask it for its stack; None of one that is gone."""
    try:
        process = psutil.Process(pid)
        variables = process.environ()
        process.cpu_percent()  # counted from here
        frames = of_py_spy(pid)
        asked = frames is None and may_be_asked(pid, variables)
        if asked:
            process.send_signal(signal.SIGUSR2)
        time.sleep(PAUSE)
        return {
            "rank": rank,
            "node": os.uname().nodename,
            "task": variables.get("SLURM_PROCID", ""),
            "world": world(variables),
            "asked": asked,
            "frames": frames,  # (file, line, function), the innermost first
            "cpu": process.cpu_percent() / 100,
            "mib": process.memory_info().rss // 2**20,
            "stopped": process.status() == psutil.STATUS_STOPPED,
            "pid": pid,
            "recorder": next((variables[name] for name in RECORDERS if name in variables), ""),
        }
    except (psutil.Error, OSError, ValueError):
        return None


def world(variables):
    """Return how many ranks the job has."""
    return int(variables.get("WORLD_SIZE") or variables.get("SLURM_STEP_NUM_TASKS") or 1)


def may_be_asked(pid, variables):
    """Whether a rank handles SIGUSR2; submitit's handler would save, and queue the job again."""
    with open(f"/proc/{pid}/status") as file:
        handled = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    handles = int(handled, 16) >> (signal.SIGUSR2 - 1) & 1
    return bool(handles) and not any(name.startswith("SUBMITIT") for name in variables)


def of_py_spy(pid):
    """Return the frames of a process's main thread; None where py-spy is missing or may not look."""
    program = shutil.which(
        "py-spy", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    )
    if not program:
        return None
    try:
        words = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
        said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5).stdout
        threads = json.loads(said)
        main = next((thread for thread in threads if thread["os_thread_id"] == pid), threads[0])
        return [(frame["filename"], frame["line"], frame["name"]) for frame in main["frames"]]
    except (OSError, ValueError, KeyError, IndexError, subprocess.TimeoutExpired):
        return None


def gpus():
    """Return how busy each GPU is and how much of its memory is used: (percent, MiB) of each."""
    try:
        words = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        said = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5
        ).stdout.decode()
        return [[int(word) for word in line.split(",")] for line in said.splitlines()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []


def new_text(sizes):
    """Return what some files hold beyond a size of each."""
    texts = []
    for name, size in sizes.items():
        with open(name, "rb") as file:
            file.seek(size)
            texts.append(file.read(MOST).decode(errors="replace"))
    return "".join(texts)


def main(job, begin, logs):
    """Print what is known of each rank here as a line of JSON; the ranks of all nodes are asked one after the other.

    On the first node, which writes the job's logs, also what is new in them: other nodes may see it much later.
    """
    print(json.dumps({"node": os.uname().nodename, "gpus": gpus()}))
    processes = pythons()
    ranks = ranks_of(job, processes)
    last = max((world(processes[pid][1]) for pid in ranks.values()), default=1)
    step = min(2 * PAUSE, LONGEST / last)
    for rank, pid in sorted(ranks.items()):
        time.sleep(max(0, begin + step * rank - time.time()))
        if row := look(rank, pid):
            print(json.dumps(row))
    if os.environ.get("SLURM_NODEID") == "0":
        time.sleep(max(SETTLE, begin + step * last + SETTLE - time.time()))
        print(json.dumps({"log": new_text(logs)}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
