"""Every spelling of a GPU architecture is read, and written as each tool wants it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp4deploy.architecture import HARDWARE, Architecture
from fp4deploy.errors import InputError

SPELLINGS = ["sm120", "sm_120", "120", "sm_120a", "SM120", " sm120a ", "12.0", "sm_12.0"]


@pytest.mark.parametrize("text", SPELLINGS)
def test_every_spelling_is_read(text: str) -> None:
    assert Architecture.find(text) == Architecture.parse(text) == Architecture(12, 0)


@pytest.mark.parametrize(
    "text", ["blackwell", "", "sm_", "sm_12 0", "sm", "8", "sm_120b", "12.00", "sm-120", "²²", "1200"]
)
def test_other_texts_are_refused(text: str) -> None:
    assert Architecture.find(text) is None
    with pytest.raises(InputError) as error:
        Architecture.parse(text)
    assert f"'{text}' is not a supported GPU architecture" in str(error.value)
    assert "Valid: sm80, sm_80" in str(error.value)


def test_a_number_of_any_length_is_no_architecture() -> None:
    assert Architecture.find("sm_" + "1" * 5000) is None  # beyond what int() reads


def test_errors_list_the_valid_architectures() -> None:
    valid = (Architecture(9, 0), Architecture(12, 0))
    assert Architecture.parse("sm_90a", valid) == valid[0]
    with pytest.raises(InputError) as error:
        Architecture.parse("sm121", valid)
    assert str(error.value) == ("'sm121' is not a supported GPU architecture. Valid: sm90, sm120.")


@pytest.mark.parametrize(
    ("capability", "text", "triton", "nvcc", "number"),
    [
        ((7, 5), "sm75", "sm_75", "sm_75", 75),
        ((8, 9), "sm89", "sm_89", "sm_89", 89),
        ((9, 0), "sm90", "sm_90", "sm_90a", 90),
        ((10, 3), "sm103", "sm_103", "sm_103a", 103),
        ((10, 7), "sm107", "sm_107", "sm_107a", 107),
        ((11, 0), "sm110", "sm_110", "sm_110a", 110),
        ((12, 1), "sm121", "sm_121", "sm_121a", 121),
    ],
)
def test_what_each_tool_calls_it(
    capability: tuple[int, int], text: str, triton: str, nvcc: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    found = Architecture.of_device(0)
    assert (str(found), found.triton_name, found.nvcc_target, found.number) == (text, triton, nvcc, number)
    assert found.capability == capability
    assert all(Architecture.parse(name) == found for name in (text, triton, nvcc, str(number)))


def test_newer_compares_as_larger() -> None:
    names = ["sm75", "sm80", "sm89", "sm90", "sm100", "sm103", "sm107", "sm110", "sm120", "sm121"]
    assert [str(each) for each in sorted(map(Architecture.parse, reversed(names)))] == names


def test_two_forms_of_fp4_tensor_cores() -> None:
    """`tcgen05` and much shared memory go together; both orders of the table are those of the architectures."""
    assert list(HARDWARE) == sorted(HARDWARE)
    fp4 = {arch: found.shared_kib for arch, found in HARDWARE.items() if arch.number >= 100}
    assert {arch: 227 if arch.tensor_memory else 99 for arch in fp4} == fp4
    assert [str(arch) for arch in fp4 if arch.tensor_memory] == ["sm100", "sm103", "sm107", "sm110"]
    assert not any(arch.tensor_memory for arch in HARDWARE if arch.number < 100)


def test_the_table_of_gpus_names_every_architecture() -> None:
    """docs/gpus.md has a row for each, with the products that the code names."""
    page = Path(__file__).resolve().parents[1] / "docs" / "gpus.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    for arch, found in HARDWARE.items():
        row = next((row for row in rows if str(arch).upper() in row.split("|")[2]), "")
        assert not found.by_default or all(name in row for name in found.gpus.split(", ")), (arch, row)
