"""The command line: ``python -m mpdemo COMMAND``.

Each command lives in a module of its own with ``add_arguments(parser)`` and ``main(args) -> exit status``;
it is imported only when it is asked for, so ``python -m mpdemo env`` works where PyTorch does not.

Exit status: 0 done, 1 failed, 2 bad input, 3 stopped with a checkpoint.
"""

import errno
import importlib
import os
import sys

from mpdemo.errors import Parser, UserError, one_line
from mpdemo.world.launch import end

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # the disk's fault
COMMANDS = {
    "demo": ("mpdemo.demo", "train up the whole ladder and print one table"),
    "train": ("mpdemo.training.command", "train one rung"),
    "plan": ("mpdemo.plan.command", "which strategies fit a model on so many devices, and what each needs and sends"),
    "env": ("mpdemo.doctor", "check this machine, its PyTorch, Slurm and site"),
    "explain": ("mpdemo.jobs.explain_command", "what happened to a job, or where it hangs, and what to do"),
    "follow": ("mpdemo.jobs.follow", "print a job's state and its log until it ends; Ctrl-C leaves it running"),
    "cluster": ("mpdemo.cluster.command", "a throw-away Slurm cluster on this machine"),
    "render": ("mpdemo.trainers", "write the course's batch scripts for a site; submit nothing"),
    "rehearse": ("mpdemo.trainers", "run each job of the course on the cluster, small, and print one table"),
    "same": ("mpdemo.same.command", "is a script of YOUR own the same training on 1 and N processes; does it resume?"),
}


def main(argv=None) -> int:
    """Run one command; return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path of odd bytes is printed, too
    parser = Parser(prog="python -m mpdemo", description="One PyTorch training, from one device to many.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options = argv[: argv.index("--")] if "--" in argv else argv  # behind it, another program's
    for before, word in zip([parser.prog, *options], options, strict=False):
        if not word.strip() or word.startswith("--") and word.endswith("="):
            parser.error(f"what follows {word.strip() or before} is empty; give a value, or leave it out")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, (module_name, what) in COMMANDS.items():
        sub = commands.add_parser(name, help=what)
        if name == wanted:
            module = importlib.import_module(module_name)
            module.add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        status = module.main(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader is gone, as behind `| head`; the shell's status for it is that of SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("mpdemo: error: PyTorch is not installed here; python -m mpdemo env says more", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        what = "the disk" if error.filename is None else repr(error.filename)
        print(f"mpdemo: error: {one_line(f'cannot read or write {what}: {error.strerror}')}", file=sys.stderr)
        return 1 if error.errno in FULL else 2
    except UserError as error:
        print(f"mpdemo: error: {one_line(str(error))}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("mpdemo: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    end(main())
