"""The command line: ``mpdemo COMMAND``.

Each command lives in a module of its own with ``add_arguments(parser)`` and ``main(args) -> exit status``;
it is imported only when it is asked for, so ``mpdemo env`` works where PyTorch does not.

Exit status: 0 done, 1 failed, 2 bad input, 3 stopped with a checkpoint.
"""

import argparse
import errno
import importlib
import os
import shutil
import sys
import textwrap

from mpdemo import __version__
from mpdemo.errors import UserError, did_you_mean, one_line
from mpdemo.options import Parser
from mpdemo.world.processes import end

PROGRAM = "mpdemo"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # the disk's fault
STATUS = "exit status: 0 done, 1 failed, 2 bad input"
COMMANDS = {  # name -> module, what it does, an example; in the order of the help
    "demo": ("mpdemo.demo", "train with every strategy on real digits and print one table", ""),
    "same": (
        "mpdemo.tools.same.command",
        "is a script of YOUR own the same training on 1 and N processes, and does it resume?",
        "-- train.py --epochs 3",
    ),
    "plan": (
        "mpdemo.tools.plan.command",
        "which strategies fit a model on so many devices, and what each needs and sends",
        "--model my_file:my_function --input 4096 --tokens --devices 8 --gpu h100",
    ),
    "explain": (
        "mpdemo.tools.explain.command",
        "what happened to a job, or where it hangs, and what to do",
        "4711",
    ),
    "env": (
        "mpdemo.tools.support.env",
        "check this machine, its PyTorch, Slurm and site",
        "--site leonardo",
    ),
    "render": (
        "mpdemo.tools.support.render",
        "write the course's batch scripts for a site; submit nothing",
        "--site leonardo",
    ),
    "rehearse": (
        "mpdemo.tools.support.rehearse",
        "run each job of the course on the cluster, small; print one table",
        "--only 13_data_parallel",
    ),
    "cluster": (
        "mpdemo.tools.cluster.command",
        "run a command on a throw-away Slurm cluster on this machine",
        "run --nodes 2 -- mpdemo rehearse",
    ),
}
GROUPS = {
    "learn": ("demo",),
    "your own script": ("same", "plan", "explain"),
    "your cluster": ("env", "render", "rehearse"),
    "maintain": ("cluster",),
}
STATUSES = {
    "same": "exit status: 0 same, 1 different, 2 bad input, 3 unsure, since nothing could be compared",
    "cluster": "exit status: that of the command",
}


BEGIN = """\
mpdemo: a course in notebooks (begin with notebooks/10_two_devices.ipynb), and three tools for scripts of your own
  mpdemo same -- train.py     is it the same training on 2 processes as on 1?
  mpdemo plan --model ...     what fits on which GPUs?
  mpdemo explain 4711         why did this job fail, or where does it hang?
mpdemo --help lists all commands, and mpdemo COMMAND --help the options of one"""


def overview() -> str:
    """Return the help of the whole: the commands by what they are for."""
    columns = min(100, shutil.get_terminal_size().columns)
    lines = [f"usage: {PROGRAM} COMMAND ...", "", "One PyTorch training, from one device to many."]
    for group, names in GROUPS.items():
        lines += ["", f"{group}:"]
        for name in names:
            lines.append(
                textwrap.fill(f"  {name:<9} {COMMANDS[name][1]}", columns, subsequent_indent=" " * 12)
            )
    lines += [
        "",
        f"{PROGRAM} COMMAND --help shows the options of each; --version says which mpdemo this is.",
    ]
    return "\n".join(lines)


def parser_of(name) -> tuple:
    """Return the module of a command, and its parser."""
    module_name, what, example = COMMANDS[name]
    module = importlib.import_module(module_name)
    sentence = what[0].upper() + what[1:] + ("" if what.endswith("?") else ".")
    layout = argparse.RawDescriptionHelpFormatter  # an epilog's lines stay as they are
    parser = Parser(prog=f"{PROGRAM} {name}", description=sentence, formatter_class=layout)
    module.add_arguments(parser)
    lines = [parser.epilog, f"example: {PROGRAM} {name} {example}".rstrip(), STATUSES.get(name, STATUS)]
    parser.epilog = "\n".join(line for line in lines if line)
    return module, parser


def main(argv=None) -> int:
    """Run one command; return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path of odd bytes is printed, too
    if not argv or argv in (["-h"], ["--help"]):
        print(overview() if argv else BEGIN)
        return 0
    if argv == ["--version"]:
        print("mpdemo", __version__)
        return 0
    return run(*asked(argv))


def asked(argv) -> tuple:
    """Return the module of the command that is asked for, and its arguments; refuse what no command has."""
    options = argv[: argv.index("--")] if "--" in argv else argv  # behind it, another program's
    parser = Parser(prog=PROGRAM)
    for before, word in zip([parser.prog, *options], options, strict=False):
        if (
            not word.strip()
            or word.startswith("--")
            and word.partition("=")[1:] in (("=", ""), ("=", "--"))
        ):
            parser.error(f"what follows {word.strip() or before} is empty; give a value, or leave it out")
    name = argv[0]
    if name not in COMMANDS:
        near = did_you_mean(name, [*COMMANDS, "--help", "--version"])
        parser.error(f"no command {name!r}; there are {', '.join(COMMANDS)}{near}")
    module, parser = parser_of(name)
    return module, parser.parse_args(argv[1:], argparse.Namespace(command=name))


def run(module, args) -> int:
    """Run a command; what is a user's mistake, or the machine's, becomes one line."""
    try:
        status = module.main(args)
        sys.stdout.flush()
        return status
    except (
        BrokenPipeError
    ):  # the reader is gone, as behind `| head`; the shell's status for it is that of SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return refused("PyTorch is not installed here; mpdemo env says more", 2)
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        what = "the disk" if error.filename is None else repr(error.filename)
        return refused(f"cannot read or write {what}: {error.strerror}", 1 if error.errno in FULL else 2)
    except UserError as error:
        return refused(str(error), error.status)
    except KeyboardInterrupt:
        print("mpdemo: interrupted", file=sys.stderr)
        return 130


def refused(message, status) -> int:
    """Say on stderr in one line what is wrong; return the exit status."""
    print(f"mpdemo: error: {one_line(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    end(main())
