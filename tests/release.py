"""Make what a release consists of, in build/release: the wheel, the site and the course as zip files.

    python tests/release.py v0.1.0       (this is ``make release TAG=v0.1.0``)

Nothing is made where the tag, the package, CITATION.cff, .zenodo.json and the changelog name different versions; the
exit status is 2 then. Nothing is uploaded.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMED = {  # where each file says its version
    "mpdemo/__init__.py": r'(?m)^__version__ = "(.+)"',
    "CITATION.cff": r"(?m)^version: (\S+)",
    "CHANGELOG.md": r"(?m)^## (\d\S*)",
    ".zenodo.json": r'"version": "(.+?)"',
}
DATED = r"(?m)^date-released: \d{4}-\d\d-\d\d$"


def disagreements(tag, root=ROOT) -> list[str]:
    """Return a line for each file that doesn't name the tag's version, or no date."""
    wrong = []
    for file, expression in NAMED.items():
        found = re.search(expression, (root / file).read_text())
        if not found or f"v{found[1]}" != tag:
            wrong.append(f"{file} has {found[1] if found else 'none'}, the tag {tag}")
    if not re.search(DATED, (root / "CITATION.cff").read_text()):
        wrong.append("CITATION.cff has no date-released: YYYY-MM-DD")
    return wrong


def main(tag) -> int:
    """Check the versions, build; return 2 where they disagree."""
    if wrong := disagreements(tag):
        print("no release: the versions disagree", *wrong, sep="\n  ", file=sys.stderr)
        return 2
    folder, name = ROOT / "build" / "release", f"mpdemo-{tag.removeprefix('v')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    course = ["git", "archive", f"--prefix={name}/", "-o", folder / f"{name}-course.zip", "HEAD"]
    for command in (wheel, course, ["make", "site"]):
        subprocess.run(command, cwd=ROOT, check=True)
    shutil.make_archive(str(folder / f"{name}-site"), "zip", ROOT / "build" / "site")
    print(*sorted(folder.iterdir()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
