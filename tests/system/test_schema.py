"""Strict JSON, YAML and JSON Lines: what is refused, in which words, and that refusing is quick."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from fp4deploy.errors import InputError
from fp4deploy.system.schema import (
    MAX_DEPTH,
    Count,
    parse_json,
    parse_yaml,
    read_json,
    read_lines,
    read_text,
    text_of,
    validated,
    whole_lines,
)


class Size(BaseModel):
    height: Count = Field(le=16)
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "cannot be read as JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ("[NaN]", "it holds NaN"),
        ("[-Infinity]", "it holds -Infinity"),
        ("[1e999]", "the number 1e999 is too large"),
        ("[" + "9" * 30 + "]", "is too large"),
        ("[18446744073709551616]", "is too large"),
        ('{"a": "\\ud800"}', "half of a UTF-16 surrogate pair"),
        ('{"\\udfff": 1}', "half of a UTF-16 surrogate pair"),
        ('["a\\u0000b"]', "holds a null character"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH} levels"),
        ("[" * 100_000, f"nested deeper than {MAX_DEPTH} levels"),
    ],
)
def test_json_that_is_refused(text: str, cause: str) -> None:
    with pytest.raises(InputError) as error:
        parse_json(text, "card.json")
    assert str(error.value).startswith("card.json ")
    assert cause in str(error.value)
    assert len(str(error.value)) < 200


def test_json_that_is_taken() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deep, "f") is not None
    assert parse_json('{"é": [1, 2.5, "\\ud83d\\ude00", 18446744073709551615]}', "f") == {
        "é": [1, 2.5, "\U0001f600", 18446744073709551615]
    }
    assert str(parse_json("[NaN, 1e999]", "f", nan="keep")) == "[nan, inf]"
    assert parse_json("[NaN, 1e999, 1.5]", "f", nan="none") == [None, None, 1.5]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("a: !!int x", "the tag tag:yaml.org,2002:int is not supported"),
        ("a: !!python/object/apply:os.system [ls]", "is not supported"),
        ("&a [*a]", "the alias *a is inside what it stands for"),
        ("*a", "undefined alias"),
        ("a: .inf", ".inf is not a finite number"),
        ("a: 1\na: 2", "the key 'a' is given twice"),
        ("1: 2", "the key 1 is not text"),
        ("a: " + "9" * 30, "is too large"),
        ("a: [1, 2", "while parsing a flow sequence"),
        ('a: "\\ud800"', "half of a UTF-16 surrogate pair"),
        ("[" * 100 + "]" * 100, "nested deeper"),
        ("<<: 3", "expected a mapping"),
        ("---\na: 1\n---\nb: 1", "expected a single document"),
        ("a: \x00", "special characters are not allowed"),
    ],
)
def test_yaml_that_is_refused(text: str, cause: str) -> None:
    with pytest.raises(InputError) as error:
        parse_yaml(text, "run.yaml")
    assert str(error.value).startswith("run.yaml ")
    assert cause in str(error.value)


def test_yaml_that_is_taken() -> None:
    text = "common: &c {lr: 0.1, epochs: 2}\nfast: {<<: *c, epochs: 1}\nlist: [*c, 2024-01-01, yes]\n"
    common = {"lr": 0.1, "epochs": 2}
    assert parse_yaml(text, "f") == {
        "common": common,
        "fast": {"lr": 0.1, "epochs": 1},
        "list": [common, "2024-01-01", True],
    }
    assert parse_yaml("", "f") is None


def test_a_text_that_is_read_twice_gives_two_values() -> None:
    """Settings are written into the tree of a configuration."""
    text = "train: {epochs: 2}"
    first: Any = parse_yaml(text, "f")
    first["train"]["epochs"] = 3
    assert parse_yaml(text, "f") == {"train": {"epochs": 2}}


@pytest.mark.parametrize("form", ["[{}]", "{{<<: [{}]}}"], ids=["aliases", "merge keys"])
def test_aliases_that_expand_to_billions_are_refused_at_once(form: str) -> None:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 12):
        lines.append(f"a{level}: &a{level} " + form.format(", ".join([f"*a{level - 1}"] * 10)))
    start = time.perf_counter()
    with pytest.raises(InputError, match="more than 20000 values"):
        parse_yaml("\n".join(lines), "bomb.yaml")
    assert time.perf_counter() - start < 2


def test_a_message_names_file_field_value_and_limit() -> None:
    assert validated(Size, {"height": 3, "names": ["a"]}, "f") == Size(height=3, names=("a",))
    for value, message in (
        ({"height": 17}, "f: height = 17: input should be less than or equal to 16. Write it again."),
        ({"height": True}, "f: height = True: input should be a valid integer. Write it again."),
        ({"height": "3"}, "f: height = '3': input should be a valid integer. Write it again."),
        ({}, "f: height is missing. Write it again."),
        ({"height": -1, "names": [1]}, "f: height = -1: input should be greater than or equal to 0; names.0 = 1: "
                                       "input should be a valid string. Write it again."),
    ):  # fmt: skip
        with pytest.raises(InputError) as error:
            validated(Size, value, "f", "Write it again.")
        assert str(error.value) == message


def test_a_message_stays_short_and_escapes_what_it_quotes() -> None:
    with pytest.raises(InputError) as error:
        validated(Size, {"height": "\x1b[31m" * 10_000, "names": list(range(1000))}, "f")
    assert "\x1b" not in str(error.value)
    assert "and 996 more" in str(error.value)
    assert len(str(error.value)) < 700


def test_what_is_no_text_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no file"):
        read_text(tmp_path / "absent")
    with pytest.raises(InputError, match="There is no file"):
        read_text(tmp_path)
    with pytest.raises(InputError, match="There is no file|cannot be read"):
        read_text(tmp_path / "null\0byte")
    path = tmp_path / "file"
    path.write_bytes(b"ab\xff")
    with pytest.raises(InputError, match="is not UTF-8 text: byte 2"):
        read_text(path)
    path.write_bytes(b"x" * 2049)
    with pytest.raises(InputError, match="larger than 2 KiB"):
        read_text(path, most=2048)
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(path) == [1]


class TestLines:
    def test_a_cut_last_line_is_dropped(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"epoch": 1}\n\n{"epoch": 2}\n{"epo')
        assert list(read_lines(path)) == [(1, {"epoch": 1}), (3, {"epoch": 2})]
        path.write_bytes(b'{"epoch": 1}\n\xc3')
        assert list(read_lines(path)) == [(1, {"epoch": 1})]
        path.write_bytes(b'{"epoch": 1}\n{"epoch": 2}')
        assert [number for number, _ in read_lines(path)] == [1, 2]
        assert list(read_lines(tmp_path / "absent")) == []

    @pytest.mark.parametrize("damage", [b'{"epo\n', b"\xff\n", b"NaN\n"])
    def test_a_damaged_line_is_named(self, tmp_path: Path, damage: bytes) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"epoch": 1}\n' + damage + b'{"epoch": 3}\n')
        with pytest.raises(InputError, match=r"metrics\.jsonl, line 2"):
            list(read_lines(path))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-16"])
def test_text_of_every_encoding_with_a_byte_order_mark(encoding: str) -> None:
    mark = "\ufeff" if encoding.endswith("e") else ""
    assert text_of((mark + "Straße\n猫").encode(encoding)) == "Straße\n猫"


@pytest.mark.parametrize(
    "bad", ["", "{", "[1", "nul", '{"a": 1, "a": 2}', "[" * 100, '"\\ud800"', str(1 << 64), "\xff"]
)
def test_logs_keep_every_line_that_can_be_read(bad: str, tmp_path: Path) -> None:
    """Wherever the others lie, and with the numbers that are none: a training that diverged has NaN as its loss."""
    kept = {'{"epoch": 1, "loss": NaN}': {"epoch": 1, "loss": None}, '{"epoch": 2, "loss": [1.5, -Infinity, 1e999]}': {
        "epoch": 2, "loss": [1.5, None, None]}, '{"epoch": 3}': {"epoch": 3}}  # fmt: skip
    for place in range(len(kept) + 1):
        lines = [each.encode() for each in kept]
        lines.insert(place, bad.encode("latin-1"))
        path = tmp_path / "log.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        assert list(whole_lines(path)) == list(kept.values())
