"""The command line in a checkout, where it is the folder `cli/` beside this package. A wheel has that folder here."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "cli")]
