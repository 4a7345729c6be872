"""What ships with potstill: a small text, two tokenizers and a teacher. `shipped:NAME` in a recipe means one of these."""

from __future__ import annotations

from pathlib import Path

from potstill.errors import PotstillError

PREFIX = "shipped:"
FOLDER = Path(__file__).parent


def locate(name: str) -> str:
    """The path of `shipped:NAME`. A run's or checkpoint's folder stands for the model in it; any other string is a path or
    hub id already and comes back as it is."""
    if not name.startswith(PREFIX):
        return _in_a_run(name)
    path = FOLDER / name.removeprefix(PREFIX)
    if not path.exists():
        folders = [FOLDER / "corpus", FOLDER / "tokenizers"]
        there = [FOLDER / "teacher", *(p for folder in folders for p in sorted(folder.iterdir()))]
        names = ", ".join(f"{PREFIX}{p.relative_to(FOLDER)}" for p in there)
        raise PotstillError(f"{name} does not ship with potstill; what does: {names}")
    return str(path)


def _in_a_run(name: str) -> str:
    steps = sorted(Path(name).glob("checkpoints/step-????????"))  # where there can be no link, the newest stands for it
    for folder in (Path(name) / "checkpoints" / "latest", *steps[-1:], Path(name)):
        if (folder / "model" / "config.json").is_file():
            return str(folder / "model")
    return name
