"""Make what a release consists of, in build/release: the wheel, the site and the course as zip files.

    python tests/release.py v0.1.0       (this is ``make release TAG=v0.1.0``)

Nothing is made where the tag, the package, CITATION.cff, .zenodo.json and the changelog name different versions; the
exit status is 2 then. Nothing is uploaded.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def versions(root) -> dict:
    """Return the version that each file names; "" for none."""
    changelog = (root / "CHANGELOG.md").read_text()
    cited = (root / "CITATION.cff").read_text()
    texts = {
        "mpdemo/__init__.py": (r'(?m)^__version__ = "(.+)"', (root / "mpdemo/__init__.py").read_text()),
        "CITATION.cff": (r"(?m)^version: (\S+)", cited),
        "CITATION.cff, date-released": (r"(?m)^date-released: (\d{4}-\d\d-\d\d)$", cited),
        "CHANGELOG.md": (r"(?m)^## (\d\S*)", changelog),
    }
    found = {name: re.search(expression, text) for name, (expression, text) in texts.items()}
    named = {name: match[1] if match else "" for name, match in found.items()}
    return named | {".zenodo.json": json.loads((root / ".zenodo.json").read_text())["version"]}


def disagreements(tag, root=ROOT) -> list[str]:
    """Return a line for each file that doesn't name the tag's version, or no date."""
    named = versions(root)
    dated = named.pop("CITATION.cff, date-released")
    wrong = [
        f"{file} has {version or 'none'}, the tag {tag}"
        for file, version in named.items()
        if f"v{version}" != tag
    ]
    return wrong if dated else [*wrong, "CITATION.cff has no date-released: YYYY-MM-DD"]


def main(tag) -> int:
    """Check the versions, build; return 2 where they disagree."""
    if wrong := disagreements(tag):
        print("no release: the versions disagree", *wrong, sep="\n  ", file=sys.stderr)
        return 2
    folder, name = ROOT / "build" / "release", f"mpdemo-{tag.removeprefix('v')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True
    )
    archive = [
        "git",
        "archive",
        "--format=zip",
        f"--prefix={name}/",
        "-o",
        folder / f"{name}-course.zip",
        "HEAD",
    ]
    subprocess.run(archive, cwd=ROOT, check=True)
    subprocess.run(["make", "site"], cwd=ROOT, check=True)
    shutil.make_archive(str(folder / f"{name}-site"), "zip", ROOT / "build" / "site")
    print(*sorted(folder.iterdir()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
