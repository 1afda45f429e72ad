"""`python -m cli` from a plain checkout; installed, it is `python -m fp4deploy.cli` or just `fp4deploy`."""

from .main import main

main()
