"""The first thing that a process started by `mpdemo.world.launch.start` runs: tie it to its parent, then its program.

    python -m mpdemo.world.rank -m mpdemo train --rung ddp ...

PyTorch takes seconds to import. A parent that is killed in that time must not leave its processes behind.
"""

import runpy
import sys

from mpdemo.world.launch import prepare_signals

if __name__ == "__main__":
    prepare_signals()
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
