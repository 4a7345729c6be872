"""A pickle that leaves a mark when someone reads it."""

from __future__ import annotations

from pathlib import Path


class Planted:
    """Whoever unpickles it runs code: the file `mark` is there then."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.mark,)
