"""The page of a self-test, from its template: the frame, style and rules of the reports (`report.html`)."""

from __future__ import annotations

from fp4deploy.report.html import Tile, described, environment
from fp4deploy.selftest.records import FAILED, NOT_POSSIBLE, PROVEN, SelfTestRecord, Status

CHIPS = {PROVEN: "ok", FAILED: "bad", NOT_POSSIBLE: "idle"}


def render(record: SelfTestRecord) -> str:
    """The whole page."""
    notes: dict[Status, str] = {
        PROVEN: "shown on this machine",
        FAILED: "differs, or did not run",
        NOT_POSSIBLE: "with the reason",
    }
    tiles = [Tile(status, str(record.count(status)), note) for status, note in notes.items()]
    return (
        environment()
        .get_template("selftest.html.j2")
        .render(record=record, tiles=tiles, chips=CHIPS, machine=described(record.environment))
    )
