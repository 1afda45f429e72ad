"""The packages of the wheel, found in the tree; everything else about the project is in pyproject.toml.

The folder `cli` is installed as `fp4deploy.cli`, which setuptools cannot discover by itself. A list in pyproject.toml
would have to name every sub-package and would miss the next one.

An editable install is a folder of the path that holds a link to the package and nothing else. setuptools' own is an
import hook, which type checkers do not see, and which comes after folders: a script beside a clone named `fp4deploy`
would import the clone, as a namespace package without content."""

import sys
from pathlib import Path

from setuptools import find_packages, setup

EDITABLE = "build/editable"


def link() -> bool:
    """Make the folder of an editable install; False where links cannot be made (Windows without developer mode)."""
    here = Path(__file__).resolve().parent
    target = here / EDITABLE / "fp4deploy"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.unlink(missing_ok=True)
        target.symlink_to(here / "fp4deploy", target_is_directory=True)
    except OSError:
        return False
    return True


if "editable_wheel" in sys.argv and link():
    setup(packages=find_packages(EDITABLE), package_dir={"": EDITABLE})
else:
    setup(
        packages=[
            *find_packages(include=["fp4deploy", "fp4deploy.*"], exclude=["fp4deploy.cli"]),
            "fp4deploy.cli",
            *(f"fp4deploy.cli.{name}" for name in find_packages("cli")),
        ],
        package_dir={"fp4deploy.cli": "cli"},
    )
