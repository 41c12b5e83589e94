"""Refresh the saved outputs of the notebooks, or check that they are in order.

    python tests/notebooks.py               execute all, save what changed (this is ``make notebooks``)
    python tests/notebooks.py 21 22         only those whose names begin so
    python tests/notebooks.py --all 21      save also where only measured numbers or pictures changed
    python tests/notebooks.py recordings    only the player's recordings, which ``make notebooks`` makes last
    python tests/notebooks.py --check       execute nothing: normal form and house rules

Notebooks are executed in a fresh copy of the project, so that no run of another day is found. Those of ON_TWO_NODES run
on a throw-away Slurm of two nodes. Outputs that differ only in what tests/nbval.cfg lets differ stay as they are:
without a change, git sees none.
"""

import argparse
import contextlib
import copy
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbval.plugin import coalesce_streams, get_sanitize_patterns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import documents
from documents import text_of
from kernels import FileKernelManager
from notebook_rules import NIGHT, TAG, lint, misplanned, tags, undescribed, unsourced
from project import environment, fresh_copy
from sitting_rules import breaches

from mpdemo.paths import root
from mpdemo.tools.cluster import Cluster
from mpdemo.world.processes import be_killed_with_parent

CELL_LIMIT, NBVAL_LIMIT = 300, 900  # s, for one cell and for one notebook
ON_TWO_NODES = ("11", "23", "33", "53")  # of a throw-away Slurm, 1 Gbit/s apart
SHOWS_THE_LADDER = "72_which_one"  # and times DDP itself
SOURCES = tomllib.loads((root() / "tests" / "numbers.toml").read_text())  # of numbers that no cell shows
SKIP = "nbval-skip"  # nbval's own tag
# how a notebook marks what only holds there
SPEED = re.compile(r"^( *)assert .*  # on an idle machine$", re.M)
LANGUAGE = IPythonKernel.language_info
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def notebooks(prefixes=()) -> list:
    """Return the paths of the course's notebooks (21) and their solutions (solutions/21), or those that begin so."""
    folder = root() / "notebooks"
    paths = [*documents.notebooks(), *sorted(folder.glob("solutions/*.ipynb"))]
    return [
        path for path in paths if not prefixes or str(path.relative_to(folder)).startswith(tuple(prefixes))
    ]


def normalise(notebook):
    """Bring a notebook into the form in which it is committed; return it.

    No metadata but tags, what the documents are made from, and what JupyterLab writes about the kernel, so that opening
    and saving a notebook changes nothing; of the latter, the version of Python stays that of the last refresh. Streams
    are merged as a terminal would show them; cells are counted from 1.
    """
    about = {"mpdemo": notebook.metadata.mpdemo} if "mpdemo" in notebook.metadata else {}
    version = notebook.metadata.get("language_info", {}).get("version", LANGUAGE["version"])
    language = LANGUAGE | {"version": version}
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": language} | about)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": sorted(tags(cell))} if tags(cell) else {})
        cell.source = cell.source.rstrip()
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = [_normal_output(output, count) for output in coalesce_streams(cell.outputs)]
    return notebook


def _normal_output(output, count):
    if output.output_type == "execute_result":
        output.execution_count = count
    if "data" in output:
        kept = {
            key: value
            for key, value in output.metadata.get("image/png", {}).items()
            if key in ("alt", "width")
        }
        output.metadata = nbformat.from_dict({"image/png": kept} if kept else {})
    return output


def sanitised(text) -> str:
    """Return a text without what may differ between two runs."""
    for pattern, replacement in get_sanitize_patterns((root() / "tests" / "nbval.cfg").read_text()):
        text = re.sub(pattern, replacement, text)
    return text


def compared(notebook) -> list:
    """Return what nbval compares of a notebook, sanitised: equal lists mean that nothing but numbers changed."""
    parts = []
    for cell in notebook.cells:
        parts.append((cell.source.rstrip(), sorted(tags(cell))))
        if TAG in tags(cell) or cell.cell_type != "code":
            continue
        for output in coalesce_streams(copy.deepcopy(cell.outputs)):
            forms = output.get("data") or {"text": output.get("text", "")}
            for form, text in sorted(forms.items()):
                parts.append((form, "" if form.startswith("image/") else sanitised(str(text))))
    return parts


def refresh(path, ladder, everything=False) -> str:
    """Execute one notebook and save it if something changed; return what happened, in a word.

    `ladder` is a folder that collects what timed a strategy: the notebook that shows the ladder shows the runs of the
    ones before it, as a reader sees them, where they are refreshed in the same call.
    """
    saved = nbformat.read(path, as_version=4)
    fresh = copy.deepcopy(saved)
    with tempfile.TemporaryDirectory(prefix="mpdemo-") as name:
        folder = fresh_copy(name)
        if path.stem == SHOWS_THE_LADDER:
            others = shutil.ignore_patterns("speed_ddp")
            shutil.copytree(ladder, folder / "runs", ignore=others, dirs_exist_ok=True)
        where = folder / (path.parent.relative_to(root()) if path.is_relative_to(root()) else "notebooks")
        client = NotebookClient(
            fresh,
            timeout=CELL_LIMIT,
            resources={"metadata": {"path": str(where)}},
            kernel_manager_class=FileKernelManager,
            record_timing=False,
            store_widget_state=False,
        )
        with slurm_of(path) as slurm:
            begin = time.monotonic()
            client.execute(env=environment(folder, NBVAL="1", **slurm))
        for run_folder in (folder / "runs").glob("speed_*"):
            shutil.copytree(run_folder, Path(ladder, run_folder.name), dirs_exist_ok=True)
        if "mpdemo" in fresh.metadata:
            fresh.metadata.mpdemo.seconds = round(time.monotonic() - begin)
    normalise(fresh)
    if not everything and compared(saved) == compared(fresh):
        fresh = normalise(saved)
    if text_of(fresh) == path.read_text():
        return "same"
    path.write_text(text_of(fresh))
    return "changed"


@contextlib.contextmanager
def slurm_of(path):
    """Yield the environment that leads a notebook's jobs to a throw-away Slurm; an empty one where they run here."""
    if path.parent.name == "notebooks" and path.name.startswith(ON_TWO_NODES):
        with Cluster.up(nodes=2, mbit=1000) as cluster:
            yield cluster.environ
    else:
        yield {}


def nbval(name, project, whole=True, **environ):
    """Run a notebook of the copy of the project at `project` and compare it strictly; return the completed process.

    Other tests share the cores, so nothing is learned about speed: two rounds of each measurement run its code, and
    what holds only on an idle machine is left to ``make notebooks``. Cells with the tag `NIGHT` run if it is `whole`.
    """
    path = project / "notebooks" / f"{name}.ipynb"
    notebook = without_speed(nbformat.read(path, as_version=4))
    for cell in notebook.cells:
        if NIGHT in tags(cell) and not whole:
            cell.metadata.tags = [SKIP]
    path.write_text(text_of(notebook))
    failed = root() / "build" / "failed_notebooks"
    failed.mkdir(parents=True, exist_ok=True)
    env = environment(project, MPDEMO_ROUNDS="2", MPDEMO_FAILED=str(failed), **environ)
    return run_nbval(path, project, env, CELL_LIMIT, NBVAL_LIMIT)


def run_nbval(path, folder, env, cell_limit, limit, *options):
    """Run pytest with nbval over a notebook; return the completed process."""
    options += (
        "--nbval",
        "--nbval-current-env",
        f"--nbval-cell-timeout={cell_limit}",
        "-p",
        "no:cacheprovider",
    )
    options += f"--nbval-sanitize-with={root()}/tests/nbval.cfg", "-q", str(path)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=env,
        timeout=limit,
        capture_output=True,
        text=True,
        preexec_fn=be_killed_with_parent,
    )


def without_speed(notebook):
    """Take out of a notebook the asserts that hold only on an idle machine; return it."""
    for cell in notebook.cells:
        cell.source = SPEED.sub(r"\1pass", cell.source)
    return notebook


def check(path) -> list:
    """Return what is wrong with a saved notebook: house rules and normal form."""
    notebook = nbformat.read(path, as_version=4)
    problems = lint(notebook, path.parent)
    if path.parent.name != "solutions":
        problems += unsourced(notebook, SOURCES.get(path.name[:2], {}))
        number = path.name[:2]
        if missing := list(undescribed(notebook, number)):
            problems += missing
        else:
            problems += documents.mistimed(notebook)
            problems += misplanned(notebook, notebook.metadata.mpdemo.minutes)
            problems += breaches(notebook, path)
    if text_of(normalise(notebook)) != path.read_text():
        problems.append(f"is not in normal form; run: python tests/notebooks.py {path.stem}")
    return [f"{path.name}: {said}" for said in problems]


def main() -> int:
    """Return 0 if all is in order, 1 if not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefixes", nargs="*", help="beginnings of the names, such as 21; default: all")
    parser.add_argument("--check", action="store_true", help="execute nothing")
    parser.add_argument(
        "--all", action="store_true", help="save also where only numbers and pictures changed"
    )
    args, status = parser.parse_args(), 0
    with tempfile.TemporaryDirectory(prefix="mpdemo-ladder-") as ladder:
        for path in notebooks(args.prefixes):
            try:
                if not args.check:
                    begin = time.monotonic()
                    said = refresh(path, ladder, args.all)
                    print(f"{path.name}: {said}, {time.monotonic() - begin:.0f} s", flush=True)
                    if path.parent.name == "notebooks":
                        documents.main([path])
                problems = check(path)
            except CellExecutionError as error:
                problems = [f"{path.name}: not saved, a cell failed:\n{error}"]
            print("\n".join(problems), end="\n" if problems else "", flush=True)
            status = status or int(bool(problems))
    if not args.check and (not args.prefixes or "recordings" in args.prefixes):
        folder = root() / "mpdemo/notebook/player/recordings"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler's own messages
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        program = [str(root() / "tests/recordings.py"), str(folder)]
        status = (
            subprocess.run([*torchrun, *program], env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
            or status
        )
        # what shows these recordings
        subprocess.run([sys.executable, "tests/players.py"], cwd=root(), check=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
