"""What a static check of training scripts says of the planted faults and right scripts of tests/test_same.py.

    python -m pip install torch-preflight
    python tests/bench/scoreboard.py torch-preflight check

A fault is found if the check reports an error that it does not report of the script without the fault. A right script
that it reports an error of is a false alarm. What `same` says of the same scripts is what tests/test_same.py asserts.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import test_same

ERROR = re.compile(r"error +([A-Z]+\d+)")


def errors(command, text) -> list:
    """Return the errors that a check reports of a script, by their code."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(text)
        done = subprocess.run([*command, "train.py"], cwd=folder, capture_output=True, text=True)
    return ERROR.findall(done.stdout)


def texts(case) -> tuple:
    """Return the script of a case as it is, and with the case's changes."""
    words, *changes = case
    script = words.rpartition("-- ")[2].split()[0]
    return test_same.planted(script), test_same.planted(script, *changes)


def main(command):
    """Print a line for each script, and how many are right."""
    alarms = {name: errors(command, texts(case)[1]) for name, (_, *case) in test_same.RIGHT.items()}
    found = {}
    for name, case in test_same.FAULTS.items():
        before, after = (Counter(errors(command, text)) for text in texts(case))
        found[name] = after - before
    for title, rows in (("right", alarms), ("fault", found)):
        print(*(f"{title:6} {name:60} {' '.join(codes)}" for name, codes in rows.items()), sep="\n")
    print(f"{sum(map(bool, found.values()))} of {len(found)} faults found")
    print(f"{sum(map(bool, alarms.values()))} of {len(alarms)} right scripts condemned")


if __name__ == "__main__":
    main(sys.argv[1:])
