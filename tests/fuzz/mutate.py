"""Mutations of files: of bytes, of text, of the values inside JSON, of the header of a safetensors file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Mutate = Callable[[bytes, random.Random], bytes]

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 17, 0.5, 1.5, -0.0, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64,
    10**30, 1e38, 1e308, -1e308, 1e-45, float("nan"), float("inf"), "", "x", "x" * 5000, "\ud800", "\0", "../../x.png",
    "/etc/hostname", "C:\\x", "2024-01-01", "!!int x", "\x1b[31m", "<script>", "fp16", "nvfp4", "nvfp4_qat", "set",
    [], {}, [[]], [None], {"a": 1}, [0] * 2000, [1e38], ["a", "a"], list(range(300)), DEEP,
)  # fmt: skip
TOKENS = (
    b"NaN", b"-Infinity", b"1e999", b"\\ud800", b"\\u0000", b"\xff", b"\xc3", b"null", b"true", b"[" * 3000, b"{" * 300,
    b'{"a":' * 100, b"9" * 5000, b"0", b"-", b",", b'"', b"}", b"]", b":", b"\n", b"\0", b"",
)  # fmt: skip
YAML_TOKENS = (
    b"&a ", b"*a", b"<<: *a\n", b"!!int x", b"!!python/name:os.system ", b"2024-01-01", b": ", b"- ", b"\t", b"{", b"[",
    b"? ", b"|\n", b"> ", b"&a [*a, *a]", b".nan", b".inf", b"0x", b"1:30:00", b"~", b"---\n", b"%YAML 9.9\n", b"'",
    b"[" * 300, b"a: &a [x,x,x]\nb: &b [*a,*a,*a]\n",
)  # fmt: skip


def of_bytes(content: bytes, draw: random.Random) -> bytes:
    """Flip, cut, repeat, insert or overwrite bytes, once to four times."""
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = draw.randrange(len(found) + 1)
        end = min(len(found), place + draw.choice((1, 1, 2, 4, 8, 64)))
        match draw.randrange(6):
            case 0 if place < len(found):
                found[place] ^= 1 << draw.randrange(8)
            case 1:
                del found[place:end]
            case 2:
                found[place:place] = found[place:end] * draw.choice((1, 3, 100))
            case 3:
                found[place:end] = bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF))]) * (end - place)
            case 4:
                del found[place:]
            case _:
                found[place:end] = draw.randbytes(end - place)
    return bytes(found)


def of_text(tokens: tuple[bytes, ...]) -> Mutate:
    """Splice tokens into a text, or change its bytes."""

    def mutate(content: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.3:
            return of_bytes(content, draw)
        place = draw.randrange(len(content) + 1)
        return content[:place] + draw.choice(tokens) + content[min(len(content), place + draw.choice((0, 0, 1, 5))) :]

    return mutate


def of_tree(tree: Any, draw: random.Random) -> Any:
    """A copy with one to three values replaced, removed, added or exchanged."""
    tree = _copied(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return _copied(draw.choice(ODD))
        holder, key = draw.choice(places)
        match draw.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(("extra", "", "x" * 600, "__class__", str(key) + " "))] = _copied(holder[key])
            case 1:
                holder.insert(key, _copied(holder[key]))
            case 2:
                other, place = draw.choice(places)
                holder[key] = _copied(other[place])
            case 3 if type(holder[key]) in (int, float):
                holder[key] = draw.choice((-1, 0, 1, 2, 1000, 0.5, 1e30)) * holder[key]
            case 4 if isinstance(holder[key], str):
                holder[key] = holder[key] + draw.choice((" ", "x", "\0", "\ud800", "/../", "é"))
            case _:
                holder[key] = _copied(draw.choice(ODD))
    return tree


def _copied(tree: Any) -> Any:
    """`copy.deepcopy` for trees of dicts and lists, whose leaves are not changed."""
    if isinstance(tree, dict):
        found = copy.copy(tree)
        found.update((key, _copied(value)) for key, value in tree.items())
        return found
    return [_copied(each) for each in tree] if isinstance(tree, list) else tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    rest = [tree]
    while rest:
        value = rest.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            found.append((value, key))
            rest.append(value[key])
        if len(found) > 5000:
            break
    return found


def of_json(content: bytes, draw: random.Random) -> bytes:
    """Change the values of a JSON text, or the text."""
    if draw.random() < 0.25:
        return of_text(TOKENS)(content, draw)
    return json.dumps(of_tree(json.loads(content), draw)).encode("utf-8", errors="surrogatepass")


def of_lines(content: bytes, draw: random.Random) -> bytes:
    """Change one line of a JSON Lines file."""
    lines = content.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    lines[place] = of_json(lines[place].rstrip(b"\n"), draw) + draw.choice((b"\n", b"\n", b""))
    return b"".join(lines)


def of_safetensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header of a safetensors file, or its bytes; the length of the header is made right."""
    if draw.random() < 0.3:
        return of_bytes(content, draw)
    size = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    metadata = header.get("__metadata__", {})
    keys = [key for key, value in metadata.items() if value.startswith("{")]
    if keys and draw.random() < 0.7:  # JSON inside the metadata
        key = draw.choice(keys)
        metadata[key] = json.dumps(of_tree(json.loads(metadata[key]), draw))
    else:
        header = of_tree(header, draw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest
