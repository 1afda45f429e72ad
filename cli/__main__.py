"""`python -m cli` from a plain checkout; installed, it is `python -m fp4deploy.cli` or just `fp4deploy`."""

from .main import main

if __name__ == "__main__":  # not in a process of a sweep, which imports this file again
    main()
