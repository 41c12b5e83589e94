"""Lives of a soak, lived at the same time until the minutes are over, and their counts."""

import argparse
import concurrent.futures
import itertools
import json
import random
import shutil
import time

AT_ONCE = 2  # lives


def read_arguments():
    """Return how many minutes a soak takes, and its seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def live(make, args, counts):
    """Live one life after the other, AT_ONCE at once; ``make`` returns that of a number, with dice of its own."""
    started = time.monotonic()

    def some(first):
        for number in itertools.count(first, AT_ONCE):
            if time.monotonic() > started + 60 * args.minutes:
                return
            try:
                make(number, random.Random(f"{args.seed} {number}")).live()
            except Exception as error:
                counts["errors"] += 1
                print(f"error in life {number}: {type(error).__name__}: {error}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(some, range(AT_ONCE)))
    counts["minutes"] = round((time.monotonic() - started) / 60)


def report(counts, zero, folder) -> int:
    """Print the counts; return 1, and keep the folder, if one that must be 0 is not."""
    print(json.dumps(counts, indent=1, sort_keys=True))
    if any(counts[kind] for kind in zero):
        print(f"the runs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0
