"""``mpdemo explain``: what happened to a job, by its log, its run's folder or its number.

    mpdemo explain slurm-7.out        what the log shows, and whether to try again
    ssh login cat slurm-7.out | mpdemo explain -
    mpdemo explain runs/23_two        the job of a folder: state and log
    mpdemo explain 7 --live           a job that hangs: where its ranks are, and who waits for whom

``--live`` asks the nodes of a Slurm job by a step of its own (``srun --overlap``). The stacks of the ranks come from
py-spy where it is installed, else from ranks that handle SIGUSR2: faulthandler.register(signal.SIGUSR2) in your script.
If the script calls torch.distributed.debug.start_debug_server(), rank 0's port 25999 shows stacks and flight recorders.
"""

import dataclasses
import json
from pathlib import Path

from mpdemo.errors import UserError, printable
from mpdemo.jobs import local_job
from mpdemo.tools.explain import live, probe, who_waits
from mpdemo.tools.explain.asked import resolve
from mpdemo.tools.explain.findings import find, report, verdict
from mpdemo.tools.explain.reading import Log
from mpdemo.tools.terminal import coloured, wrapped

QUIET = 3.0  # s without a line, after which ranks that wait for one that is elsewhere are taken to hang
COLOUR = {"retry": "yellow", "fix": "red"}
LONG = 60.0  # s, where all ranks are in one collective: it may be large


def add_arguments(parser):
    """Declare the command's options."""
    parser.epilog = __doc__.split("\n\n", 1)[1]
    what = "a log (-: standard input), the folder of a run (runs/23_two), or a job's number"
    parser.add_argument("what", metavar="WHAT", help=what)
    parser.add_argument("--live", action="store_true", help="ask the ranks of a running job where they are")
    parser.add_argument("--json", action="store_true", help="the same for programs")


def main(args) -> int:
    """Print what is found; return 0."""
    asked = resolve(args.what)
    if args.live and asked.answer.state != "running":
        raise UserError(
            f"--live looks into a running job; {asked.headline if asked.name else f'{args.what} is a log'}"
        )
    data, cut = asked.last_bytes()
    log = Log(data)
    findings = find(log)
    told = {"job": asked.name, **asked.answer._asdict(), "logs": list(map(str, asked.logs))}
    word, why = verdict(findings, asked.answer.state, asked.resumes)
    found = []
    if args.live:
        quiet = asked.silence  # before the ranks write their stacks
        found, told["gpus"] = look(asked)
        kind, told["live"] = who_waits.sentence(found)
        told["ranks"] = [dataclasses.asdict(place) for place in found]
        word, why = verdict_live(kind, quiet)
    told |= {"findings": [finding.as_dict() for finding in findings], "verdict": word, "why": why}
    if args.json:
        print(json.dumps(told, indent=1))
        return 0
    if cut:
        print(f"Only its last {len(data) // 2**20} MiB are read; lines are counted from there.\n")
    for line in in_words(asked, told, found):
        print(printable(line))
    if findings or asked.piped or asked.logs and not args.live:
        print(report(log), end="\n\n")
    print(wrapped(f"{coloured(f'verdict: {word}', COLOUR[word]) if word else 'verdict: none'}; {why}"))
    return 0


def in_words(asked, told, found):
    """Yield the lines above those of the log."""
    if asked.name:
        yield asked.headline
        yield f"log: {', '.join(told['logs']) or 'none yet'}"
        yield ""
    if found:
        yield told["live"]
        yield from (f"  {place}" for place in found)
        yield from (f"  GPU {n}: {busy} % busy, {mib} MiB" for n, (busy, mib) in enumerate(told["gpus"]))
        for prefix in sorted({Path(place.recorder) for place in found if place.recorder}):
            yield f"torchfrtrace {prefix.parent} -p {prefix.name} compares the flight recorders that ranks write there"
        yield ""


def look(asked) -> tuple:
    """Return where the ranks of a running job are, and its GPUs."""
    if asked.slurm_id:
        return live.look_at(asked.slurm_id, asked.logs)
    return live.look_here(probe.ranks_of_launchers(local_job.ranks(asked.folder)), asked.logs)


def verdict_live(kind, quiet) -> tuple:
    """Say what to do about a job that hangs in this way, and has been quiet for so long."""
    word, why = who_waits.ADVICE[kind]
    if word and kind != "stopped" and quiet < (LONG if kind == "same" else QUIET):
        return (
            None,
            f"a line was written {quiet:.0f} s ago, so it may only be slow: only waiting will show; ask again",
        )
    return word, why
