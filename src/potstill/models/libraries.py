"""What libraries print and raise while they load, as potstill shows it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from potstill.files import model_damage
from potstill.shipped import locate
from potstill.types import PotstillError

MOST_MODULES = 10_000  # layers, or experts of a layer


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


def refuse_damaged(name: str, where: str, weights: bool = True) -> None:
    """A checkpoint that is not what was written any more would load, and give wrong numbers."""
    if what := model_damage(Path(locate(name)), weights):
        raise PotstillError(
            f"{where}: the checkpoint of {name} is damaged ({what}): use another, or go on with that run, which goes "
            "back to a "
            "whole one"
        )


@contextmanager
def loading(name: str, where: str, what: str) -> Iterator[None]:
    """Whatever a library raises over the files of a model is one sentence: their content reaches the code of each
    architecture, which may raise anything."""
    try:
        with quiet():
            yield
    except PotstillError:
        raise
    except Exception as error:
        raise _cannot_load(name, where, what, error) from error
    except BaseException as error:
        # What a library in Rust raises; it has no name that can be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise _cannot_load(name, where, what, error) from error


def check_counts(config: PreTrainedConfig, name: str, where: str) -> None:
    """Refuse a config by which transformers would build modules for hours: its numbers come from a file."""
    for part in (config, config.get_text_config()):
        for key, value in part.to_dict().items():
            if key.startswith(("num_", "n_")) and key.endswith(("layers", "layer", "experts")) and _is_count(value):
                raise PotstillError(f"{where}: the config in {name} has {key} {value}: no model is that large")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > MOST_MODULES


def _cannot_load(name: str, where: str, what: str, error: BaseException) -> PotstillError:
    said = reason(error)[:300]
    if not isinstance(
        error, OSError | ValueError | ImportError | RuntimeError
    ):  # as KeyError, whose text is a bare key
        said = f"{type(error).__name__}: {said}"
    if Path(locate(name)).exists():
        return PotstillError(f"{where}: cannot load the {what} in {name} ({said})")
    if name.startswith((".", "/", "~")):
        return PotstillError(f"{where}: cannot load {name}: there is no such folder")
    return PotstillError(f"{where}: cannot load {name}: no such folder here, and the hub gave no {what} ({said})")


def reason(error: BaseException) -> str:
    """The first line of what a library says, with the next one where it ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")
