"""python -m tests.fuzz; see `deep`, a module of its own because a spawned process cannot import a `__main__`."""

import sys

from tests.fuzz.deep import main

if __name__ == "__main__":
    sys.exit(main())
