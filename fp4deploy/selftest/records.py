"""The file of `fp4deploy selftest`, as types.

A reader of format 1 finds every key below; later versions may add keys. `figures` are finite numbers and short texts,
by name; times are milliseconds where the name ends in "ms". Nothing in the file names a user, a folder or a host.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fp4deploy.bench.records import Machine, Record

FORMAT: Literal[1] = 1
Status = Literal["proven", "failed", "not possible here"]
PROVEN: Status = "proven"
FAILED: Status = "failed"
NOT_POSSIBLE: Status = "not possible here"


class CheckRecord(Record):
    """One check: what it claims, whether that was shown, and how (`detail`: the evidence, the error or the reason)."""

    group: str
    claim: str
    status: Status
    detail: str
    figures: dict[str, float | int | str] = Field(default_factory=dict)
    seconds: float


class SelfTestRecord(Record):
    """All of the file. complete: every check was run; False after Ctrl-C. device: "cpu", or the GPU's architecture."""

    format: Literal[1] = FORMAT
    fp4deploy: str
    created: str
    complete: bool = False
    device: str
    environment: Machine
    checks: list[CheckRecord] = Field(default_factory=list)

    def count(self, status: Status) -> int:
        """How many checks ended so."""
        return sum(check.status == status for check in self.checks)

    def sentence(self) -> str:
        """The counts, and what they are counts of."""
        counts = ", ".join(f"{self.count(status)} {status}" for status in (PROVEN, FAILED, NOT_POSSIBLE))
        return f"On {self.device}: {counts}{'' if self.complete else '; interrupted'}."
