"""Files that are never half there: written beside, synced, renamed into place."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from potstill.errors import PotstillError

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished-"


def lock(path: Path, how: int) -> int:
    """A handle on a file that is locked as `fcntl.flock` is told, until the handle is closed or its process ends, however it
    ends. BlockingIOError: another has it."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, how)
    except BaseException:
        os.close(handle)
        raise
    return handle


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    with new_file(path) as file:
        file.write(content)


def draft_of(path: Path) -> Path:
    """Where this process writes what is to become `path`: others, on other hosts too, may be writing the same."""
    return path.with_name(f"{UNFINISHED}{_writer()}-{path.name}")


def _writer() -> str:
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"{host}-{os.getpid()}"


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to fill. It appears at `path` only when the block ends without an error."""
    beside = draft_of(path)
    try:
        beside.unlink(missing_ok=True)
        with open(beside, "xb") as file:  # never through a link that stands there
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise could_not_write(path, error) from error
    finally:
        with suppress(OSError):
            beside.unlink()


def open_log(path: Path) -> TextIO:
    """A file to add lines to; through no link, which may lead out of its folder."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, "a", encoding="utf-8", buffering=1, opener=opener)
    except OSError as error:
        raise could_not_write(path, error) from error


@contextmanager
def new_folder(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A folder to fill. It appears at `path`, with a manifest of its files' sizes and checksums, only when the block ends
    without an error and `check`, called last, raises none; whatever happens, nothing half-written stands at `path`."""
    beside = begin_folder(path)
    with filling(beside, path):
        yield beside
        finish_folder(beside, path, checksums(beside), check)


def begin_folder(path: Path) -> Path:
    """A folder to fill, beside `path`."""
    beside = path.with_name(f"{UNFINISHED}{path.name}-{_writer()}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise could_not_write(path, error) from error
    return beside


@contextmanager
def filling(beside: Path, path: Path) -> Iterator[None]:
    """An error in the block removes what is to become `path`, and is told in one sentence where the disk is behind it."""
    try:
        yield
    except BaseException as error:
        refused = refusal(beside, error)
        shutil.rmtree(beside, ignore_errors=True)
        if refused is not None:
            raise could_not_write(path, refused) from error
        raise


def finish_folder(beside: Path, path: Path, files: Mapping[str, Any], check: Callable[[], None]) -> None:
    """Put a folder that is filled in its place. `files`: what `checksums` said of them, here or on other ranks."""
    write_text(beside / MANIFEST, json.dumps({"files": dict(sorted(files.items()))}, indent=1))
    check()
    beside.rename(path)
    _sync(path.parent)


def could_not_write(path: Path, error: OSError) -> PotstillError:
    return PotstillError(f"could not write {path}: {error.strerror or error}; what was there before is untouched")


def refusal(folder: Path, error: BaseException) -> OSError | None:
    """What the disk said, where that is behind an error: libraries that write for us make something else of a full disk. Where
    the error does not tell, what the disk says to one more small file."""
    if isinstance(error, OSError):
        return error
    if told := re.search(r"\(os error (\d+)\)", str(error)):  # as libraries in Rust have it
        return OSError(int(told[1]), os.strerror(int(told[1])))
    path = folder / f"{UNFINISHED}refused"
    try:
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    finally:
        path.unlink(missing_ok=True)
    return None


def damage(folder: Path, share: int = 0, of: int = 1) -> str | None:
    """What is wrong with a folder that `new_folder` made, or None. Of several processes, each looks at a share of it."""
    try:
        if share == 0:
            _refuse_links(folder)
        expected: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["files"]
        expected = {name: expected[name] for name in sorted(expected)[share::of]}
        return checksums_differ(folder, expected)
    except FileNotFoundError:
        return "its manifest is missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    except OSError as error:  # a disk that does not answer is no proof that the data are lost
        raise PotstillError(
            f"cannot read {folder} ({error.strerror or error}): nothing was changed; try again"
        ) from error


def _refuse_links(folder: Path) -> None:
    """Who loads a folder reads whatever is in it, also what has no checksum. Another folder of the same kind would not do: that
    something was put there is for its user to know."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise PotstillError(
                f"{path} is a link, and may lead out of {folder}: copy that with its links followed (cp -rL), if you trust "
                "where they lead"
            )


def checksums_differ(folder: Path, expected: Mapping[str, Any]) -> str | None:
    """What is wrong with some files of a folder, given what `checksums` once said of them, or None."""
    there = {name for name in expected if (folder / name).is_file()}
    return _difference(expected, {name: _checksum(folder / name, sync=False) for name in there})


def checksums(folder: Path, names: Iterable[str] | None = None) -> dict[str, dict[str, int]]:
    """Of all files in a folder, or of some, which are synced."""
    every = (
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST
    )
    found = {name: _checksum(folder / name, sync=True) for name in sorted(every if names is None else names)}
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(inner)  # a file is there after a crash only if its name in its folder is
    return found


def _difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    for name, entry in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != entry:
            return f"{name} is not what was written"
    return None


def model_damage(folder: Path, weights: bool = True) -> str | None:
    """What is wrong with a model inside a checkpoint, by the checkpoint's manifest one folder up, or None. Other models have no
    such manifest, and nothing to be compared with. Without `weights`, those are not looked at, since that takes a while."""
    folder = folder.resolve()
    above = folder.parent / MANIFEST
    if not above.is_file():
        return None
    try:
        files = json.loads(above.read_text(encoding="utf-8"))["files"]
        inside = {name: entry for name, entry in files.items() if name.startswith(f"{folder.name}/")}
        expected = {name: entry for name, entry in inside.items() if weights or not name.endswith(".safetensors")}
        return checksums_differ(folder.parent, expected) if "progress.json" in files else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        of_a_checkpoint = (folder.parent / "progress.json").is_file()
        return f"{above} cannot be read" if of_a_checkpoint else None
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror or error})"


def point(link: Path, target: Path) -> Path | None:
    """Make `link` a relative symbolic link to `target`, replacing an older one at once. Where a folder is in its place (a copy
    that followed links), that is moved aside, and told."""
    beside, aside = link.with_name(f"{UNFINISHED}{link.name}"), link.with_name(f"copied-{link.name}")
    copied = link.is_dir() and not link.is_symlink()
    if copied:  # first: where there can be no link, it would go on to stand for another target
        shutil.rmtree(aside, ignore_errors=True)
        link.rename(aside)
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(target, link.parent))
    beside.replace(link)
    return aside if copied else None


def remove_folder(path: Path) -> None:
    """All of it or, to its readers, nothing: what a kill or a refusal leaves of it no longer has its name."""
    beside = path.with_name(f"{UNFINISHED}removed-{path.name}")
    path.rename(beside)
    shutil.rmtree(beside)


def remove_unfinished(folder: Path, pattern: str = "*") -> list[Path]:
    """Remove what an interrupted writer left. Gives what cannot be removed."""
    kept = []
    for left in folder.glob(f"{UNFINISHED}{pattern}"):
        try:
            remove(left)
        except OSError:
            kept.append(left)
    return kept


def remove(path: Path) -> None:
    """A file, a folder with all in it, or nothing; of a link the link."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line of a log with its object; None where it is damaged or torn: no JSON object with a whole number `step`."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                record = None
            good = isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] < 2**53
            yield line, record if good else None


def _checksum(path: Path, sync: bool) -> dict[str, int]:
    checksum, size = 0, 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(1 << 22):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return {"bytes": size, "crc32": checksum}


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
