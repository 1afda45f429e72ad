"""The packages of the wheel, found in the tree; everything else about the project is in pyproject.toml.

The folder `cli` is installed as `fp4deploy.cli`, which setuptools cannot discover by itself. A list in pyproject.toml
would have to name every sub-package and would miss the next one."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["fp4deploy", "fp4deploy.*"]),
        "fp4deploy.cli",
        *(f"fp4deploy.cli.{name}" for name in find_packages("cli")),
    ],
    package_dir={"fp4deploy.cli": "cli"},
)
