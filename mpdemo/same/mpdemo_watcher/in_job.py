"""One rank of a world that a job started, with RANK from its launcher: ``python in_job.py ORDER.json``."""

import json
import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from mpdemo_watcher.serve import be_rank  # noqa: E402, since the folder above is known only now

with open(sys.argv[1]) as file:
    be_rank(json.load(file), int(os.environ["RANK"]))
