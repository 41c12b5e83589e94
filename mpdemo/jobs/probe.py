"""Look at the ranks of a running job on this node: where each one is, what it takes, and what it can tell.

The text of this file is sent to every node of a job as ``python -c``, so it imports the standard library alone. A
rank's stack comes from py-spy, where that is installed and may look; else the rank is asked by SIGUSR2 if it handles
that signal (by default it kills), and ``faulthandler`` writes the stack into the rank's stderr, mostly the job's log.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

PAUSE = 0.1  # s in which a rank writes its stack, and its CPU time is counted
SETTLE = 0.4  # s in which the last stack has come into the log
MOST = 2**22  # bytes of a log that are read
LONGEST = 8.0  # s in which all ranks have been asked
CLOCK = os.sysconf("SC_CLK_TCK")  # the kernel counts a process's CPU time in these
RESERVED = 4294967290  # Slurm's numbers from here on are no steps of srun
RECORDERS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # where PyTorch writes its flight recorder


def read(pid, name):
    """Return a file of /proc/PID; nothing of a process that is gone or not ours."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def environment(pid):
    """Return the variables with which a process was started."""
    return dict(entry.partition("=")[::2] for entry in read(pid, "environ").split("\0") if "=" in entry)


def status(pid):
    """Return the fields of /proc/PID/status."""
    return dict(line.partition(":\t")[::2] for line in read(pid, "status").splitlines())


def parents():
    """Return the parent of each Python process that may be ours."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: int(status(pid).get("PPid") or 0) for pid in pids if is_python(pid)}


def is_python(pid):
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def ranks_of(job):
    """Return the ranks of a Slurm job on this node: rank -> process.

    torchrun's have RANK, those that srun starts SLURM_PROCID; the helpers below a rank inherit both.
    """
    above, ours = parents(), {}
    for pid in above:
        variables = environment(pid)
        if variables.get("SLURM_JOB_ID") == job and variables.get("SLURM_STEP_ID") != os.environ.get("SLURM_STEP_ID"):
            ours[pid] = variables
    if not any("RANK" in variables for variables in ours.values()):
        steps = {pid: v for pid, v in ours.items() if int(v.get("SLURM_STEP_ID") or RESERVED) < RESERVED}
        ours = steps or ours
        return {int(ours[pid].get("SLURM_PROCID", 0)): pid for pid in topmost(ours, above, "SLURM_PROCID")}
    ours = {pid: variables for pid, variables in ours.items() if "RANK" in variables}
    return {int(ours[pid]["RANK"]): pid for pid in topmost(ours, above, "RANK")}


def ranks_of_launchers(processes):
    """Return the ranks that these processes are, or have started where they are torchruns: rank -> process."""
    started = {pid: environment(pid) for pid, parent in parents().items() if parent in processes.values()}
    ranks = {pid: variables for pid, variables in started.items() if "TORCHELASTIC_RESTART_COUNT" in variables}
    return {int(variables["RANK"]): pid for pid, variables in ranks.items()} or processes


def topmost(ours, above, name):
    """Return the processes whose parent is not one of the same rank, the oldest last: it counts."""
    tops = [pid for pid, variables in ours.items() if ours.get(above[pid], {}).get(name) != variables.get(name)]
    return sorted(tops, reverse=True)


def look(rank, pid):
    """Return what is known of a rank; ask it for its stack."""
    variables, ticks, began = environment(pid), busy(pid), time.monotonic()
    frames = of_py_spy(pid)
    asked = frames is None and may_be_asked(pid, variables)
    if asked:
        os.kill(pid, signal.SIGUSR2)
    time.sleep(PAUSE)
    seconds = time.monotonic() - began
    return {
        "rank": rank,
        "pid": pid,
        "node": os.uname().nodename,
        "task": variables.get("SLURM_PROCID", ""),
        "world": world(variables),
        "asked": asked,
        "frames": frames,  # (file, line, function), the innermost first
        "cpu": round((busy(pid) - ticks) / CLOCK / seconds, 2),
        "mib": int(status(pid).get("VmRSS", "0 kB").split()[0]) // 1024,
        "recorder": next((variables[name] for name in RECORDERS if name in variables), ""),
    }


def world(variables):
    """Return how many ranks the job has."""
    return int(variables.get("WORLD_SIZE") or variables.get("SLURM_STEP_NUM_TASKS") or 1)


def may_be_asked(pid, variables):
    """Whether a rank handles SIGUSR2; submitit's handler would save, and queue the job again."""
    handles = int(status(pid).get("SigCgt", "0"), 16) >> (signal.SIGUSR2 - 1) & 1
    return bool(handles) and not any(name.startswith("SUBMITIT") for name in variables)


def busy(pid):
    """Return the CPU time of a process so far, in ticks."""
    fields = read(pid, "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if fields else 0


def of_py_spy(pid):
    """Return the frames of a process's main thread; None where py-spy is missing or may not look."""
    program = shutil.which("py-spy", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if not program:
        return None
    try:
        words = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
        said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5).stdout
        threads = json.loads(said.decode())
        main = next((thread for thread in threads if thread["os_thread_id"] == pid), threads[0])
        return [(frame["filename"], frame["line"], frame["name"]) for frame in main["frames"]]
    except (OSError, ValueError, KeyError, IndexError, subprocess.TimeoutExpired):
        return None


def gpus():
    """Return how busy each GPU is and how much of its memory is used: (percent, MiB) of each."""
    try:
        words = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5).stdout.decode()
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
    ranks, step = ranks_of(job), 2 * PAUSE
    for rank, pid in sorted(ranks.items()):
        step = min(step, LONGEST / world(environment(pid)))
        time.sleep(max(0, begin + step * rank - time.time()))
        print(json.dumps(look(rank, pid)))
    if os.environ.get("SLURM_NODEID") == "0":
        last = max((world(environment(pid)) for pid in ranks.values()), default=1)
        time.sleep(max(SETTLE, begin + step * last + SETTLE - time.time()))
        print(json.dumps({"log": new_text(logs)}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
