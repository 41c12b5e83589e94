"""A command as a terminal takes it, as a job: what the batch script makes of it, and what is refused in one line."""

import os
import re
import subprocess

import pytest

from mpdemo.errors import UserError
from mpdemo.jobs import Job, load_site, render, spec_of
from mpdemo.jobs.programs import changed, programs
from mpdemo.notebook.course import run
from mpdemo.notebook.live_view import Detached, JobCancelled

SCRIPT = "notebooks/scripts/first_ddp.py"


def launched(command, **words) -> str:
    """Return the end of a command's batch script, from srun on, in one line."""
    text = render(spec_of(command, **words), load_site("generic"))
    assert ("export MASTER_ADDR" in text) == ("--standalone" not in text)
    return " ".join(text[text.index("\nsrun") :].replace("\\\n", " ").split())


STANDALONE = "python -m torch.distributed.run --standalone --nproc-per-node"
DDP = "-m mpdemo.rungs.ddp"
MEET = '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"\' torchrun'


@pytest.mark.parametrize(
    ("command", "nodes", "end"),
    [
        ("torchrun --standalone --nproc-per-node=2 a.py --lr 1", 1, f"{STANDALONE}=2 a.py --lr 1"),
        ("torchrun --nproc_per_node 2 -m a --lr 1", 2, f"--nproc-per-node=2 {MEET} -m a --lr 1"),
        ("torchrun \\\n  a.py 'two words'", 1, f"{STANDALONE}=1 a.py 'two words'"),
        ("python -m a 1", 2, "--label python -m a 1"),
        (f"torchrun --standalone --nproc-per-node=2 {DDP}", 1, f"{STANDALONE}=2 {DDP}"),
        (f"python {DDP} --steps 2", 2, f"--label python {DDP} --steps 2"),
        ("mpdemo same --device cpu -- a.py", 1, "python -m mpdemo same --device cpu -- a.py"),
    ],
)
def test_the_batch_script_runs_what_the_terminal_runs(command, nodes, end):
    assert launched(command, nodes=nodes).endswith(end)


def test_a_training_run_has_the_processes_devices_and_folder_that_its_command_says():
    two = spec_of(f"torchrun --nproc-per-node=2 {DDP}")
    assert (two.processes_per_node, two.out, two.name) == (2, "runs/train_ddp", "train_ddp")
    by_srun = spec_of(f"python {DDP} --out=runs/b", processes_per_node=2)
    assert (by_srun.launcher, by_srun.world_size, by_srun.out) == ("srun", 2, "runs/b")
    one = spec_of("python -m mpdemo.rungs.data_parallel --out runs/a", name="b")
    assert (one.processes_per_node, one.gpus_per_process, one.out, one.name) == (1, 2, "runs/a", "b")
    assert spec_of("python -m mpdemo.rungs.pipeline --form one-process --devices 4").gpus_per_process == 4
    assert spec_of(f"python {DDP}", nodes=2).world_size == 2


def test_each_command_has_a_folder_of_its_own_by_default():
    names = [spec_of(f"torchrun --nproc-per-node={count} a.py").out for count in (1, 2, 2)]
    assert names[0] != names[1] == names[2] and names[0].startswith("runs/a-")
    assert spec_of("torchrun a.py", nodes=2).out != spec_of("torchrun a.py").out
    assert spec_of("torchrun a.py", name="31_one").out == "runs/31_one"


SHELL = [  # what it would replace or act on, and what of it is shown
    *[
        ("--out=$HOME/x", "$HOME"),
        ("${HOME}", "${HOME}"),
        ('"$HOME"', "$HOME"),
        ("$(id)", "$(id"),
        ('"`id`"', "`"),
    ],
    *[
        ("~/y", "~"),
        ("--out=~/y", "~"),
        ("s/*.py", "*"),
        ("a?", "?"),
        ("lr=[0.1]", "[0.1]"),
        ("{1,2}", "{1,2}"),
    ],
    *[(" # once more", "#"), ("a\rb", "\r"), (">log", ">"), ("$'a'", "$'")],
]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bash a.sh", "run starts torchrun, python or mpdemo, with what follows it; not 'bash a.sh'"),
        ("NCCL_DEBUG=INFO torchrun a.py", "run starts torchrun, python or mpdemo"),
        ("torchrun", "with what follows it"),
        ("torchrun a.py | tee log", r"without a shell's '\|'"),
        ("torchrun a.py && ls", "without a shell's '&&'"),
        ("torchrun a.py $FLAGS", r"without a shell's '\$FLAGS'"),
        ("python a.py\npython b.py", "one command"),
        *(
            (f"python a.py {text}", f"a shell's {re.escape(repr(sign))}; write what it stands for")
            for text, sign in SHELL
        ),
        ("python 'a.py", "No closing quotation"),
        ("python -m", "python -m: which module?"),
        ("python 'a\nb'", "command .* holds a line break"),
        (None, "what run takes, as 'python train.py', is a text; not None"),
        (["python", "a.py"], r"not \['python', 'a.py'\]"),
        (
            "torchrun --nnodes=2 a.py",
            r"torchrun --nnodes=2: .* the batch script writes the others: run\(..., nodes=2\)",
        ),
        ("torchrun --max-restarts 3 a.py", "run takes --standalone, --nproc-per-node and -m"),
        ("torchrun --nproc-per-node=gpu a.py", "invalid int value: 'gpu'"),
        ("torchrun --nproc-per-node=0 a.py", "0 is not allowed"),
        ("torchrun --standalone", "which script"),
        ("python -m mpdemo.rungs.dpp", r"no module mpdemo.rungs.dpp; there are .*; did you mean 'ddp'\?"),
        (
            f"torchrun {DDP} --batchsize 2",
            r"mpdemo.rungs.ddp: unknown argument '--batchsize'; did you mean '--batch-size'\?",
        ),
        (
            f"torchrun --nproc-per-node=3 {DDP}",
            "--batch-size 64 .all processes together. does not divide by 3 devices",
        ),
        (
            f"python {DDP}",
            "this is one alone; start them by torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs",
        ),
        ("torchrun --nproc-per-node=2 -m mpdemo.rungs.single", "was started as 2 processes; start 1"),
        (f"torchrun {DDP} --lr", "--lr: expected one argument"),
    ],
)
def test_what_is_refused_takes_one_line(command, said):
    with pytest.raises(UserError, match=said) as error:
        spec_of(command)
    assert "\n" not in str(error.value).replace(str(command), "")
    with pytest.raises(UserError, match="leave it out with nodes=2"):
        spec_of("torchrun --standalone a.py", nodes=2)


def test_what_is_quoted_reaches_the_program_as_it_is():
    """As bash hands it on, which is asked."""
    words = r"""'$HOME' '|' "a b" 5$ a#b x~ 'a*' \$X \# {} a{b}c lr=1 "5$ * ~ # [a]" "it's" '#' '`id`' '~' "\"" """
    seen = subprocess.check_output(["bash", "-c", f"printf '%s\\0' {words}"], text=True)
    assert spec_of(f"python a.py {words}").command == ("a.py", *seen.split("\0")[:-1])


@pytest.mark.parametrize("name", [".", "..", "a/../b", "/etc", "a/", "~", "x\ny", 5])
def test_a_bad_name_is_refused_by_its_own_words(name):
    with pytest.raises(
        UserError, match=f"^name {re.escape(repr(name))}(?: is not allowed|: holds a line break)"
    ):
        spec_of("python a.py", name=name)


@pytest.mark.parametrize("script", ["", "folder", "queue", "x" * 300])
def test_what_is_no_script_is_refused_before_a_job_starts(no_slurm, project, script):
    (project / "folder").mkdir()
    os.mkfifo(project / "queue")
    with pytest.raises(UserError, match=f"no script '{script}' in the project's folder"):
        run(f"python '{script}'")
    assert not (project / "runs").exists()


PROGRAMS = {  # of a project
    "main.py": "import sub.deep, torch\nfrom pkg import data",
    "pkg/__init__.py": "def late():\n    from .model import net",
    "pkg/model.py": "from .. import other\nfrom ..other import queue, loop",
    "pkg/data.py": "this is no Python",
    "pkg/__main__.py": "",
    "sub/deep.py": "import importlib\nimportlib.import_module('named')",
    "named.py": "exec(open('config.py').read())",
    "config.py": "",
    "other.py": "import loop, queue, gone",
    "unused.py": "",
    "s/main.py": "import helper, pkg\n'two words'",
    "s/helper.py": "\\0",
    "s/pkg/__init__.py": "",
    "p/added.py": "import sys\nsys.path += ['lib', 'src/x']\nimport of_lib\n__import__('of_x')",
    "p/lib/of_lib.py": "",
    "src/x/of_x.py": "",
    "src/by_path.py": "",
    "src/unused.py": "",
    "joined.py": "import os\nos.path.join('src', 'by_path.py')",
    "line.py": "x = 'python src/by_path.py --lr 1'",
    "no_ending": "import named",
    "notebooks/labs/late.py": "from mpdemo.labs import early",
    "notebooks/labs/early.py": "",
}
OF_PKG = "pkg/__init__.py pkg/model.py other.py"
OF_MAIN = f"{OF_PKG} main.py sub/deep.py pkg/data.py named.py config.py"


@pytest.mark.parametrize(
    ("command", "read"),
    [
        ("python main.py --lr 1", OF_MAIN),
        ("torchrun -m main", OF_MAIN),
        ("python -um main", OF_MAIN),
        ("python -mmain", OF_MAIN),
        ("python -u -W ignore no_ending gone.out", "no_ending named.py config.py"),
        ("python p/added.py", "p/added.py p/lib/of_lib.py src/x/of_x.py"),
        ("python joined.py", "joined.py src/by_path.py"),
        ("python line.py", "line.py src/by_path.py"),
        ("python -u -m pkg", f"{OF_PKG} pkg/__main__.py"),
        ("python -c 'import pkg.model'", OF_PKG),
        ("mpdemo same -- s/main.py", "s/main.py s/helper.py s/pkg/__init__.py"),
        ("mpdemo plan --model=main.py:make", OF_MAIN),
        ("python -m mpdemo.labs.late", "notebooks/labs/late.py notebooks/labs/early.py"),
    ],
)
def test_the_programs_of_a_command_are_what_it_would_import_from_the_project(project, command, read):
    for name, text in PROGRAMS.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    os.mkfifo(project / "queue.py")
    (project / "loop").symlink_to(project)
    (project / "loop.py").symlink_to("loop.py")
    command = spec_of(command).command
    before = programs(command)
    assert {*before} == {*read.split()}
    for name in before:
        (file := project / name).write_text(f"{file.read_text()}#")
        os.utime(file, (1, 1))  # as a copy that keeps its time
        assert changed(before, command) == f"{name} has changed"
        file.write_text(PROGRAMS[name])
    assert not changed(before, command) and changed(None, command)


def test_a_cell_finds_its_job_again_unless_a_program_has_changed(no_slurm, project, capsys):
    (project / "pkg").mkdir()
    (project / "a.py").write_text("import pkg\nprint(pkg.word)")
    (project / "pkg/__init__.py").write_text("word = 'one'")
    command = "torchrun --standalone --nproc-per-node=2 a.py"
    first = run(command)
    assert first.output() == "one\none" and capsys.readouterr().out == ""
    assert run(command).id == first.id and "not submitted again" in capsys.readouterr().out
    (project / "pkg/__init__.py").write_text("import time\nword = 'three'\ntime.sleep(60)")
    again = run(command)
    assert (
        again.id != first.id and "a new one, because pkg/__init__.py has changed" in capsys.readouterr().out
    )
    (project / "a.py").write_text("print('four')")
    assert run(command).id == again.id  # which still runs
    said = " ".join(capsys.readouterr().out.split())
    assert "not submitted again, although a.py has changed; do: cancel it, and run this again" in said
    again.cancel()
    assert run(command).output() == "four\nfour"


def test_a_job_that_was_interrupted_runs_anew(no_slurm, project, capsys, monkeypatch):
    (project / "a.py").write_text("import time\ntime.sleep(60)")
    job = run("python a.py")
    monkeypatch.setattr(Job, "wait", lambda job: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(Detached, match=rf"job {job.id} \(\S+\) is still running"):
        job.wait()
    with pytest.raises(JobCancelled, match="was interrupted, which ended it. Run the cell again"):
        job.output()
    assert job.state == "cancelled"
    again = run("python a.py")
    assert again.state == "running" and "it was cancelled, or its kernel" in capsys.readouterr().out
    again.cancel()


def test_a_failed_job_tells_its_cause_unless_it_may_fail(no_slurm, project):
    (project / "a.py").write_text("print('so far')\nraise SystemExit(7)")
    job = run("python a.py")
    with pytest.raises(Exception, match="(?s)failed, exit status 7; log: .*so far"):
        job.output()
    assert job.output(fails=True) == "so far"
