"""Write the environment as JSON to a new file in the folder argv[1], one file per process."""

import json
import os
import sys
import tempfile

with tempfile.NamedTemporaryFile("w", dir=sys.argv[1], suffix=".json", delete=False) as file:
    json.dump(dict(os.environ), file)
