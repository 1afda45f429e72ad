"""Faults of a hand that had not read the tests: python -m tests.mutation.unseen [NAME ...] [--set SET]

They measure what the tests are likely to notice, where `seeded` holds what they must. Of each the test files run that
are `nearest` to the changed file, and what runs over every room; tests that were written for a survivor are named with
it. A list measures once: as soon as its survivors have tests, only a new one says anything.
"""

from __future__ import annotations

import argparse
import sys

from tests.mutation.lists import SETS
from tests.mutation.seeded import run


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults; all by default")
    parser.add_argument("--set", choices=SETS, default="FIRST", help="which list")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, each in a copy of the checkout")
    chosen = parser.parse_args()
    return 1 if run(chosen.names, chosen.jobs, SETS[chosen.set]) else 0


if __name__ == "__main__":
    sys.exit(main())
