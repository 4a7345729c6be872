"""Files to read, wherever they are: on a disk by path or glob, or at an address of an object store, the hub or a server
(`s3://`, `gs://`, `hf://`, `https://` …), which fsspec reads."""

from __future__ import annotations

import glob
import os
import re
from typing import Any, BinaryIO, cast

from potstill.errors import PotstillError
from potstill.extras import EXTRAS, missing_extra
from potstill.shipped import locate

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://")
EXTRA_OF = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def is_address(path: str) -> bool:
    return ADDRESS.match(path) is not None


def matching(pattern: str, key: str) -> list[str]:
    """The files that a path, glob or address of the recipe means, in order; at least one."""
    if is_address(pattern):
        return _matching_addresses(pattern, key)
    path = os.path.expanduser(locate(pattern))
    if os.path.isdir(path):
        raise _is_a_folder(pattern, key)
    if os.path.exists(path):
        return [path]
    if not glob.has_magic(path):
        raise PotstillError(f"{key}: there is no file {pattern} (looked in {os.path.abspath(path)})")
    matches = [match for match in sorted(glob.glob(path, recursive=True)) if os.path.isfile(match)]
    if not matches:
        raise PotstillError(f"{key}: no file matches {pattern} (looked in {os.path.abspath(path)})")
    return matches


def _matching_addresses(pattern: str, key: str) -> list[str]:
    try:
        files, path = _at(pattern)
        if files.isfile(path):
            return [pattern]
        if not glob.has_magic(path):
            if files.isdir(path):
                raise _is_a_folder(pattern, key)
            raise PotstillError(f"{key}: there is no file {pattern}")
        matches = [match for match in sorted(files.glob(path)) if files.isfile(match)]
    except PotstillError:
        raise
    except Exception as error:  # each kind of store has errors of its own
        raise PotstillError(f"{key}: cannot look for {pattern}: {_said(error)}") from error
    if not matches:
        raise PotstillError(f"{key}: no file matches {pattern}")
    scheme, chain, rest = pattern.split("://")[0], *pattern.partition("::")[1:]
    # Of a file inside another one (zip://…::s3://…) both are named; others are told with their scheme.
    return [f"{scheme}://{match}::{rest}" if chain else str(files.unstrip_protocol(match)) for match in matches]


def _at(address: str) -> tuple[Any, str]:
    """The file system that an address is in, and the path there."""
    from fsspec.core import url_to_fs  # here, because most runs read a disk

    try:
        return cast(tuple[Any, str], url_to_fs(address))
    except ImportError as error:
        for scheme in re.findall(r"([a-z0-9+.-]+)://", address):
            if scheme in EXTRA_OF and _misses(EXTRA_OF[scheme], error):
                raise missing_extra(f"reading {scheme}://", EXTRA_OF[scheme]) from error
        raise


def _misses(extra: str, error: ImportError) -> bool:
    return any(package in str(error) for package in EXTRAS[extra])


def _is_a_folder(pattern: str, key: str) -> PotstillError:
    return PotstillError(f"{key}: {pattern} is a folder; give its files with a glob, such as {pattern}/*.jsonl")


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: "
    return kind + (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def open_binary(path: str) -> BinaryIO:
    if not is_address(path):
        return open(path, "rb")
    files, inside = _at(path)
    return cast(BinaryIO, files.open(inside, "rb"))


def size(path: str) -> int:
    """In bytes; 0 of what a server does not tell."""
    if not is_address(path):
        return os.path.getsize(path)
    files, inside = _at(path)
    return int(files.size(inside) or 0)


def suffix(path: str) -> str:
    """`.jsonl`, or `.jsonl.gz`."""
    stem, ending = os.path.splitext(path.split("::")[0] if is_address(path) else path)
    return os.path.splitext(stem)[1] + ending if ending == ".gz" else ending
