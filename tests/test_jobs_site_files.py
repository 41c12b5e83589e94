"""The site files of real clusters: their batch scripts, line by line.

``python tests/test_jobs_site_files.py`` writes the files in tests/sites anew; look at ``git diff tests/sites`` then.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from mpdemo import paths
from mpdemo.jobs import JobSpec, Site, check, load_site, render
from mpdemo.jobs.site import site_files
from mpdemo.tools.support.site_trial import try_site

FOLDER = Path(__file__).parent / "sites"
SITES = site_files()
TRIED = re.compile(r"(?m)^# Tried on 20\d\d-\d\d-\d\d, by \w")
REAL = sorted(SITES.keys() - {"generic", "throwaway"})
VARIABLES = {"COURSE_ACCOUNT": "course"}
# Lines that the documentation of a site shows, in the scripts of files written from generic.toml's comments alone.
TRIALS = {
    "alex": (
        "bash -l\n",
        "--gres=gpu:a100:8 ",
        "--clusters=alex ",
        "--export=NONE ",
        "\nunset SLURM_EXPORT_ENV ||",
    ),
    "bridges2": ("--gpus=v100-32:16 ", "--partition=GPU "),
    "cirrus": (
        "--exclusive ",
        "--gres=gpu:4 ",
        "--ntasks=8 --ntasks-per-node=4 --cpus-per-task=10 --hint=nomultithread ",
    ),
    "isambard_ai": ("--gpus-per-node=4 ", "--cpus-per-task=72 ", "\nmodule reset ||"),
    "karolina": ("--gpus-per-node=8 ", "--gpu-bind=single:1 ", "--kill-on-bad-exit=1"),
    "kestrel": (
        "--gres=gpu:4 ",
        "--mem-per-gpu=85G ",
        "export CUDA_VISIBLE_DEVICES=0,1,2,3\n",
        "env_cpe23.sh ||",
    ),
    "mahti": ("--gres=gpu:a100:4,nvme:900 ", "--partition=gpumedium "),
    "mahuika": (
        "--gpus-per-node=a100:4 ",
        "--partition=milan ",
        "--cpus-per-task=32 ",
        "--mem-per-gpu=32G ",
    ),
    "meluxina": ("--gpus-per-task=1 ", "--qos=short ", "--error=", "export NCCL_SOCKET_IFNAME=ib0\n"),
    "narval": ("--gpus-per-node=a100:4 ", "--mem-per-gpu=124G ", "\nexport TORCH_NCCL_ASYNC_HANDLING=1\n"),
    "puhti": ("--gres=gpu:v100:4 ", "--mem=0 ", " python3 -m mpdemo.rungs.ddp"),
    "roihu": ("--gres=gpu:gh200:4 ", "OMP_NUM_THREADS"),
    "vista": ("--partition=gh ", "--nodes=2 ", "--ntasks-per-node=1 ", "--account=course "),
}


def job(site):
    """A training run on two whole nodes."""
    out = "runs/toy"
    shape = {"nodes": 2, "processes_per_node": site.gpus_per_node or 4}
    return JobSpec(name="toy", command=f"-m mpdemo.rungs.ddp --out {out}".split(), out=out, **shape)


@pytest.fixture
def of_course(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def test_the_readme_counts_the_site_files_that_ran_on_their_cluster():
    tried = sum(bool(TRIED.search(SITES[name].read_text())) for name in REAL)
    assert f"\n{tried} of them have been tried there." in (paths.root() / "README.md").read_text()


@pytest.mark.parametrize("name", REAL)
def test_a_site_file_gives_its_batch_script_and_says_where_and_when_it_comes_from(name, of_course):
    site, head = load_site(name), SITES[name].read_text().split("#:")[0]
    assert check(job(site), site, ask_slurm=False) == []
    assert render(job(site), site) == (FOLDER / f"{name}.sbatch").read_text(), (
        f"if that is meant: python {__file__}"
    )
    assert ("Not tried on the site." in head) != bool(TRIED.search(head))
    if name == "juwels":  # from a course of the site's
        assert "Read in November 2026." in head
    else:
        assert re.search(r"Written on 20\d\d-\d\d-\d\d from", head) and re.search("https?://", head)
    (*_, last) = try_site(site, None)
    if not last.ok:  # a class should not learn it on its day
        assert re.search(r"has PyTorch 2\.\d+.*, and this course needs", head.splitlines()[1]), last


def test_a_site_file_in_the_main_folder_replaces_the_one_of_the_community(project, of_course):
    """Who uses a site of the community copies its file one folder up, and changes it there."""
    text = SITES["frontier"].read_text().replace("--partition=batch", "--partition=mine")
    (project / "slurm/sites/frontier.sbatch").write_text(text)
    assert "--partition=mine" in load_site("frontier").text
    assert "# JURECA-DC" in load_site("jureca").text


@pytest.mark.parametrize(("name", "lines"), TRIALS.items())
def test_a_site_file_that_a_stranger_wrote_gives_what_the_site_shows(name, lines, of_course):
    site = load_site(str(FOLDER / "trials" / f"{name}.sbatch"))
    text = render(job(site), site)
    assert check(job(site), site, ask_slurm=False) == []
    for line in lines:
        assert text.count(line) == 1, f"{line}\n{text}"


def test_what_a_site_refuses_as_a_directive_is_none(of_course):
    """Cirrus rejects the first three, and here each job takes whole nodes; Vista's GPUs come with the node."""
    for name, refused in (("cirrus", "ntasks|cpus-per-task|hint"), ("vista", "gpu|gres")):
        site = load_site(str(FOLDER / "trials" / f"{name}.sbatch"))
        assert not re.search(f"#SBATCH --({refused})", render(job(site), site))
    cirrus = load_site(str(FOLDER / "trials/cirrus.sbatch"))
    two = render(
        JobSpec("toy", ("-c", ""), "runs/toy", nodes=2, launcher="torchrun", processes_per_node=3), cirrus
    )
    assert "--gres=gpu:4 " in two and "--ntasks=2 --ntasks-per-node=1 --cpus-per-task=30 " in two


def test_the_generic_file_has_every_fact_and_its_default():
    """Who writes a site file copies this one."""
    lines = (paths.root() / "slurm/sites/generic.sbatch").read_text().splitlines()
    facts = tomllib.loads("\n".join(line.removeprefix("#:") for line in lines if line.startswith("#:")))
    assert set(facts) == set(Site.__dataclass_fields__) - {"name", "text"}
    given = {
        name: value for name, value in facts.items() if name not in ("cores_per_node", "gpus_per_node")
    }
    assert {name: getattr(Site("plain"), name) for name in given} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }


def write_files():
    """Write the batch script of every real site anew."""
    os.environ |= VARIABLES
    FOLDER.mkdir(exist_ok=True)
    for name in REAL:
        site = load_site(name)
        (FOLDER / f"{name}.sbatch").write_text(render(job(site), site))


if __name__ == "__main__":
    sys.exit(write_files())
