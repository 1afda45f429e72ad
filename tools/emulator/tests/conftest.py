"""Cases of the emulator that depend on the version of Triton."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton compiles the kernels")
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
UNSET = ("decoded weights, two sources, moments", "decoded weights, slices of a volume, moments")
UNORDERED = ("decoded weights, 3x3", "barriers are missing in the loop")


@pytest.fixture(autouse=True)
def _code_of_this_triton(request: pytest.FixtureRequest) -> None:
    """Skip what holds of the code of Triton 3.9 alone."""
    if TRITON >= (3, 9) or not hasattr(request.node, "callspec"):
        return
    values = request.node.callspec.params
    case = getattr(values.get("case"), "name", "")
    if case in UNSET:
        pytest.skip("before Triton 3.9 a shuffle reads registers that the code leaves unset")
    if (values.get("name"), values.get("fault")) == UNORDERED:
        pytest.skip("before Triton 3.9 these barriers order nothing that is not ordered otherwise")
