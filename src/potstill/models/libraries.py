"""What libraries print and raise while they load, as potstill shows it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging as transformers_logging

from potstill.shipped import locate
from potstill.types import PotstillError


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and notes that libraries print while they load and save; potstill shows its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def cannot_load(name: str, where: str, what: str, error: Exception) -> PotstillError:
    if Path(locate(name)).exists():
        return PotstillError(f"{where}: cannot load the {what} in {name} ({reason(error)})")
    if name.startswith((".", "/", "~")):
        return PotstillError(f"{where}: cannot load {name}: there is no such folder")
    return PotstillError(
        f"{where}: cannot load {name}: no such folder here, and the hub gave no {what} ({reason(error)})"
    )


def reason(error: Exception) -> str:
    """The first line of what a library says, with the next one where it ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")
