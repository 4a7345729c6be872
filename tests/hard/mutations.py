"""What is done to files and to words: literal tables, each entry a function of what was there and of random numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _part(data: bytes, numbers: random.Random) -> tuple[int, int]:
    """Where a part of at most 64 bytes begins and ends."""
    begin = numbers.randrange(len(data) + 1)
    return begin, min(len(data), begin + numbers.randrange(1, 65))


def _with_bits(data: bytes, numbers: random.Random, bits: int) -> bytes:
    if not data:
        return b"\0"
    place = numbers.randrange(len(data))
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


def _cut(data: bytes, numbers: random.Random) -> bytes:
    return data[: numbers.randrange(len(data) + 1)]


def _replaced(data: bytes, numbers: random.Random, make: Callable[[bytes], bytes]) -> bytes:
    begin, end = _part(data, numbers)
    return data[:begin] + make(data[begin:end]) + data[end:]


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit flipped": lambda data, numbers: _with_bits(data, numbers, 1 << numbers.randrange(8)),
    "a byte changed": lambda data, numbers: _with_bits(data, numbers, numbers.randrange(1, 256)),
    "truncated": _cut,
    "emptied": lambda data, numbers: b"",
    "a part zeroed": lambda data, numbers: _replaced(data, numbers, lambda part: bytes(len(part))),
    "a part removed": lambda data, numbers: _replaced(data, numbers, lambda part: b""),
    "a part twice": lambda data, numbers: _replaced(data, numbers, lambda part: part + part),
    "a part of noise": lambda data, numbers: _replaced(data, numbers, lambda part: numbers.randbytes(len(part))),
    "bytes at the end": lambda data, numbers: data + numbers.randbytes(numbers.randrange(1, 100)),
    "halves exchanged": lambda data, numbers: data[len(data) // 2 :] + data[: len(data) // 2],
}


def _foreign(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_instead(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


FILES: dict[str, Callable[[Path, random.Random], object]] = {
    "removed": lambda path, numbers: path.unlink(),
    "a folder in its place": lambda path, numbers: _folder_instead(path),
    "a link to nowhere": lambda path, numbers: _link_instead(path, "nowhere"),
    "a link to itself": lambda path, numbers: _link_instead(path, path.name),
    "a picture in its place": lambda path, numbers: _foreign(path, b"\x89PNG\r\n\x1a\n" + numbers.randbytes(200)),
    "a text in its place": lambda path, numbers: _foreign(path, b"not what you expect\n" * 5),
    "a stray file beside": lambda path, numbers: path.with_name(f"{path.name}.bak").write_bytes(path.read_bytes()),
    "an orphan beside": lambda path, numbers: path.with_name(f".unfinished-{path.name}").write_bytes(b"half"),
}


def hurt(path: Path, numbers: random.Random) -> str:
    """Damage a file in one of these ways; says which."""
    if numbers.random() < 0.25:
        name = numbers.choice(list(FILES))
        FILES[name](path, numbers)
        return name
    name = numbers.choice(list(BYTES))
    data = BYTES[name](path.read_bytes(), numbers)
    path.unlink()  # it may be a link to, or share its blocks with, what others use
    path.write_bytes(data)
    return name


def files_in(folder: Path) -> list[Path]:
    found = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.is_file() and not path.is_symlink() and path.name != ".lock")


def copied(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(folder, to, symlinks=True)


DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]

# In place of any value of a JSON or YAML document
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 7.5, -0.0, 1e-300, 1e300, 2**31, 2**63, 10**30, -(10**30), float("nan"), float("inf"),
    "", " ", "x", "null", "1e3", "../x", "no/such/folder", "${x}", "${oc.env:HOME}", "\\${x}",
    "é\u0000", "\x1b[31mred", "\u202e", "x" * 3000, "{{ x }}", "*", "shipped:teacher",
    [], [None], [1, "x"], {}, {"x": 1}, {"": {}}, DEEP,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a document stand."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, sub in inside for place in places(sub, (*path, key)))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _removed(document: Any, path: tuple[Any, ...], numbers: random.Random) -> None:
    del _at(document, path[:-1])[path[-1]]


def _renamed(document: Any, path: tuple[Any, ...], numbers: random.Random) -> None:
    holder = _at(document, path[:-1])
    if isinstance(holder, dict):
        holder[numbers.choice(["", "x", f"{path[-1]}s", f"{path[-1]}"[1:], "a.b"])] = holder.pop(path[-1])
    else:
        holder.append(holder[path[-1]])


def _put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    _at(document, path[:-1])[path[-1]] = value


def _near(value: Any, numbers: random.Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return numbers.choice([-value, value * 2, value + 1, value - 1, value * 1000, value / 2, str(value)])
    if isinstance(value, str):
        return numbers.choice([value[:-1], value + "x", value.upper(), value * 50, [value], value[::-1]])
    return numbers.choice([[value], {"x": value}, str(value)[:200]])


DOCUMENTS: dict[str, Callable[[Any, tuple[Any, ...], random.Random], None]] = {
    "an odd value": lambda document, path, numbers: _put(document, path, numbers.choice(ODD)),
    "a near value": lambda document, path, numbers: _put(document, path, _near(_at(document, path), numbers)),
    "a key removed": _removed,
    "a key renamed": _renamed,
    "another value of it": lambda document, path, numbers: _put(
        document, path, _at(document, numbers.choice(places(document)[1:]))
    ),
}


def changed(document: Any, numbers: random.Random, times: int = 2) -> tuple[Any, str]:
    """A copy of a JSON document with up to so many changes; says which."""
    document = json.loads(json.dumps(document))
    done = []
    for _ in range(numbers.randrange(1, times + 1)):
        there = places(document)[1:]
        if not there:
            break
        name, path = numbers.choice(list(DOCUMENTS)), numbers.choice(there)
        before = json.dumps(document)
        try:
            DOCUMENTS[name](document, path, numbers)
            document = json.loads(json.dumps(document))  # no part of it is another part of it
        except (IndexError, KeyError, TypeError, ValueError):  # the last: it was put into itself
            document = json.loads(before)
            continue
        done.append(f"{name} at {'.'.join(map(str, path))}")
    return document, "; ".join(done)
