"""What the sections of a recipe are made of: strict models, and numbers that move over a run."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


def _without_password(address: str) -> str:
    """Messages name addresses, and a run's files and reports keep them: what is not in one need not be hidden anywhere."""
    rest = re.sub(r"^https?://", "", address, flags=re.IGNORECASE)
    # Wherever it stands, for an address with a slip in it is read in another way than it was meant: an @ in a path is %40.
    before, _, host = rest.rpartition("@")
    if ":" in unquote(before) or "@" in unquote(re.split(r"[/?#\\]", host)[0]):
        raise ValueError(
            "an address holds no password, which a run's files would keep: write http://USER@HOST:PORT, and name the "
            "environment variable that holds the password with remote.api_key_env"
        )
    if "?" in rest or "#" in rest:
        raise ValueError(
            "an address ends with its path, for a run's files would keep what follows a ? or #: write http://HOST:PORT, and "
            "name the environment variable that holds the server's token with remote.api_key_env"
        )
    return address


ServerAddress = Annotated[str, AfterValidator(_without_password)]


def key(default: Any, description: str, **more: Any) -> Any:
    """A key of a section: its default, what it means, and the bounds of its value."""
    return Field(default, description=description, **more)


class Section(BaseModel):
    model_config = ConfigDict(
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        populate_by_name=True,
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="before")
    @classmethod
    def _paths_are_text(cls, keys: Any) -> Any:
        """A recipe written in Python may hold paths."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in keys.items()} if isinstance(keys, dict) else keys


class Schedule(Section):
    """A number that moves over the run: from `start` to `end` over the first `over` share of the steps, then stays."""

    start: float = Field(description="value at the first step")
    end: float = Field(description="value once the moving part is over")
    shape: Literal["constant", "linear", "cosine"] = key("linear", "how it moves; constant stays at start")
    over: Share = key(1.0, "share of the run's steps the movement takes")

    def at(self, progress: float) -> float:
        """The value at `progress` (0 at the first step, 1 at the last)."""
        done = min(1.0, max(0.0, progress) / self.over)
        if self.shape == "constant":
            done = 0.0
        elif self.shape == "cosine":
            done = 0.5 - 0.5 * math.cos(math.pi * done)
        return self.start + (self.end - self.start) * done


Scheduled = float | Schedule


def value_at(number: Scheduled, progress: float) -> float:
    return number.at(progress) if isinstance(number, Schedule) else number


def fixed_value(number: Scheduled) -> float | None:
    """None: it moves over the run."""
    if not isinstance(number, Schedule):
        return number
    return number.start if number.shape == "constant" or number.start == number.end else None
