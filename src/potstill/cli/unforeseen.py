"""The last net: an error that nobody foresaw becomes one sentence and a file with its trace."""

from __future__ import annotations

import os
import platform
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from potstill.errors import PotstillError
from potstill.files import write_text

EXIT_CODE = 70  # sysexits.h: an internal software error, to be told from a mistake of the user's, which is 1


class Unforeseen(Exception):
    """Carries another error, its cause, past those who would take it for one of theirs."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder


@contextmanager
def traces_in(folder: Path | None) -> Iterator[None]:
    """What nobody foresaw in this block leaves its trace in `folder`, if that is there by then."""
    try:
        yield
    except (PotstillError, Unforeseen):
        raise
    except Exception as error:  # of which typer would take some for its own: a broken pipe, a file that ends too early
        if type(error).__module__.startswith(("typer", "click")):  # a usage error, or an exit
            raise
        raise Unforeseen(folder) from error


def explain(error: BaseException, folder: Path | None, version: str) -> str:
    """The sentence for an error that nobody foresaw, after its trace was written."""
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    said = f"{name}: {lines[0][:300]}" if lines else name
    if isinstance(error, MemoryError):
        said = "there was not enough memory"
    written = _written(error, folder, version)
    place = f"the trace is in {written}; please report it" if written else "the trace could not be written"
    return f"potstill did not expect this: {said} ({place}, or see it with --debug)"


def _written(error: BaseException, folder: Path | None, version: str) -> Path | None:
    about = f"potstill {version}, Python {platform.python_version()}, {platform.platform()}\n\n"
    text = about + "".join(traceback.format_exception(error))
    name = f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    if folder is not None and folder.is_dir():
        try:
            write_text(folder / name, text.encode(errors="backslashreplace").decode())
            return folder / name
        except PotstillError:
            pass  # the temporary folder may have room
    try:
        handle, path = tempfile.mkstemp(prefix="potstill-", suffix=f"-{name}")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return None
    return Path(path)


def stdout_is_gone() -> bool:
    """Whether whoever read our output has left, as `head` does. What is still to be written then goes nowhere."""
    try:
        output = sys.stdout.fileno()
    except ValueError:  # what stands in its place in a notebook is no file
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    gone = any(flags & select.POLLERR for _, flags in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone
