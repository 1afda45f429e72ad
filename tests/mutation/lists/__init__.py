"""Lists of faults of hands that had not read the tests, each written from the code alone; none of them grows."""

from __future__ import annotations

from tests.mutation.lists import (
    eighth,
    eleventh,
    fifteenth,
    fifth,
    first,
    fourteenth,
    fourth,
    ninth,
    second,
    seventh,
    sixth,
    tenth,
    third,
    thirteenth,
    twelfth,
)
from tests.mutation.seeded import Seeded

SETS: dict[str, dict[str, Seeded]] = {
    "FIRST": first.FAULTS,
    "SECOND": second.FAULTS,
    "THIRD": third.FAULTS,
    "FOURTH": fourth.FAULTS,
    "FIFTH": fifth.FAULTS,
    "SIXTH": sixth.FAULTS,
    "SEVENTH": seventh.FAULTS,
    "EIGHTH": eighth.FAULTS,
    "NINTH": ninth.FAULTS,
    "TENTH": tenth.FAULTS,
    "ELEVENTH": eleventh.FAULTS,
    "TWELFTH": twelfth.FAULTS,
    "THIRTEENTH": thirteenth.FAULTS,
    "FOURTEENTH": fourteenth.FAULTS,
    "FIFTEENTH": fifteenth.FAULTS,
}
