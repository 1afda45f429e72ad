"""What the operators make of a few lines; and which lines a test has to execute to meet it."""

from __future__ import annotations

import pytest

from tests.mutation.operators import apply, mistakes

CODE = '''"""Words."""
SIZES = {"small": 3, "large": 5}


def shrink(x: int, y: int = 4, *, exact: bool = True) -> int:
    if x < 0 and y:
        raise ValueError("below 0")
    total = 0
    total += (x + 1) * y
    print("a", indent=2)
    return max(total, y)
'''


@pytest.mark.parametrize(
    ("kind", "old", "new", "lines"),
    [
        ("table", '"large": 5', "", range(1, 12)),
        ("table", "3", "4", range(1, 12)),
        ("default", "4", "5", range(6, 12)),
        ("default", "True", "False", range(6, 12)),
        ("comparison", "x < 0", "((x) <= (0))", range(6, 7)),
        ("and/or", "x < 0 and y", "((x < 0) or (y))", range(6, 7)),
        ("condition dropped", "x < 0 and y", "((x < 0))", range(6, 7)),
        ("branch", "x < 0 and y", "(not (x < 0 and y))", range(6, 7)),
        ("guard dropped", "x < 0 and y", "False", range(6, 7)),
        ("accumulation", "total += (x + 1) * y", "total = (x + 1) * y", range(9, 10)),
        ("arithmetic", "x + 1", "((x) - (1))", range(9, 10)),
        ("arithmetic", "(x + 1) * y", "((x + 1) / (y))", range(9, 10)),
        ("statement dropped", 'print("a", indent=2)', "pass", range(10, 11)),
        ("arguments exchanged", "total, y", "y, total", range(11, 12)),
        ("twin", "max", "min", range(11, 12)),
    ],
)
def test_mistakes_of_a_few_lines(kind: str, old: str, new: str, lines: range) -> None:
    made = [each for each in mistakes(CODE) if each.kind == kind and CODE[each.start : each.end] == old]
    assert [(each.new, each.lines) for each in made] == [(new, lines)]
    assert apply(CODE, made[0]) == CODE[: made[0].start] + new + CODE[made[0].end :]


def test_messages_and_layouts_of_files_have_none() -> None:
    assert not any("below" in CODE[each.start : each.end] or each.kind == "argument dropped" for each in mistakes(CODE))
