"""Packages that only some uses need, and what to do where they are missing."""

from __future__ import annotations

from potstill.errors import PotstillError

# As in pyproject.toml; a test compares them.
EXTRAS = {
    "gcs": ("gcsfs",),
    "http": ("aiohttp", "requests"),
    "import": ("array-record", "protobuf"),
    "lora": ("peft",),
    "math": ("math-verify",),
    "quant": ("bitsandbytes",),
    "s3": ("s3fs",),
    "serve": ("starlette", "uvicorn"),
    "wandb": ("wandb",),
}


def missing_extra(what: str, extra: str) -> PotstillError:
    """`what` needs the packages of an extra. potstill itself is installed from a checkout, so its own name installs nothing."""
    packages = EXTRAS[extra]
    needs = f"{what} needs {' and '.join(packages)}"
    return PotstillError(f"{needs}: pip install {' '.join(packages)} (or, in a checkout: pip install -e '.[{extra}]')")
