"""The Debian packages the tests need beside Python's: say what is missing, install it where that is allowed.

    python tests/setup_system.py      # root and apt: installs, and says what; else prints the line that would

In CI (``CI=true``) a package that is still missing is a failure, elsewhere the tests that need it are skipped.
Only the standard library: this runs before anything is installed.
"""

import os
import shutil
import subprocess
import sys

PROGRAMS = {
    "slurm-wlm": ("sbatch", "slurmctld", "slurmd"),
    "munge": ("munged",),
    "iproute2": ("ip",),
    "chromium": ("chromium",),
    "g++": ("g++",),
}


def find(program):
    """Find a program, also in the system folders that are not on an ordinary user's PATH."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def missing(*packages) -> list[str]:
    """Return those of the packages (default: all) whose programs are not here."""
    wanted = packages or tuple(PROGRAMS)
    return [package for package in wanted if not all(find(program) for program in PROGRAMS[package])]


def install_line(packages) -> str:
    return f"sudo apt-get install --no-install-recommends {' '.join(packages)}"


def in_ci() -> bool:
    return os.environ.get("CI") == "true"


def install(packages):
    """Install with apt, or say why that failed."""
    print(f"installing Debian packages: {' '.join(packages)}", flush=True)
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for words in (["update", "-q"], ["install", "-qy", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *words], env=env, capture_output=True, text=True, timeout=900)
        if done.returncode:
            print(f"apt-get {words[0]} failed: {done.stderr.strip()[-500:]}", file=sys.stderr)
            break


def main() -> int:
    packages = missing()
    if packages and os.getuid() == 0 and shutil.which("apt-get"):
        install(packages)
        packages = missing()
    if not packages:
        return 0
    print(
        f"missing: {', '.join(packages)}; the tests that need them are skipped; enable: {install_line(packages)}"
    )
    return 1 if in_ci() else 0


if __name__ == "__main__":
    sys.exit(main())
