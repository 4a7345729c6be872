"""Small files in a run's folder by which schedulers, torchrun and processes that do not know of each other come to terms.

RUN/stop        whoever makes it (`touch`) asks the run to save and to end, with exit code 0; the next start removes it
RUN/finished    is there once the last step is saved and all else is done
RUN/error.json  the mistake that ended the run, and its step: a restart at that step would only find it again
RUN/.owner      a word of the process that writes here; one that finds another's has been replaced, and saves nothing
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from potstill.files import write_text
from potstill.parallel.watch import RanksLost
from potstill.types import PotstillError

STOP, FINISHED, ERROR, OWNER = "stop", "finished", "error.json", ".owner"


def restarted() -> bool:
    """Whether torchrun began this process anew, after one died: nobody has mended anything since."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


@dataclass(frozen=True)
class Markers:
    """Those of one run, in the hands of the process that writes in its folder."""

    folder: Path
    last_step: Callable[[], int]  # that is saved
    nonce: str

    @classmethod
    def begin(cls, folder: Path, last_step: Callable[[], int]) -> Markers:
        """Take over a run. What was left for an earlier process is removed."""
        if restarted():
            _refuse_same_error(folder, last_step())
        else:  # to a restart, that the run was asked to stop still holds
            (folder / STOP).unlink(missing_ok=True)
        for name in (FINISHED, ERROR):
            (folder / name).unlink(missing_ok=True)
        markers = cls(folder, last_step, secrets.token_hex(8))
        write_text(folder / OWNER, markers.nonce)
        return markers

    def ours(self) -> bool:
        """Whether this rank sees the word that the first one wrote."""
        with suppress(OSError):
            return (self.folder / OWNER).read_bytes() == self.nonce.encode()
        return False

    def check_owner(self) -> None:
        """To be asked just before something is put in place."""
        path = self.folder / OWNER
        try:
            ours = path.read_bytes() == self.nonce.encode()
        except OSError as error:
            raise PotstillError(f"{path} cannot be read ({error.strerror or error}): nothing was saved") from error
        if not ours:
            raise PotstillError(f"another process has taken over {self.folder} (see {path}): nothing was saved")

    def asked_to_stop(self) -> bool:
        return (self.folder / STOP).exists()

    def finished(self) -> None:
        write_text(self.folder / FINISHED, "")

    @contextmanager
    def telling_errors(self) -> Iterator[None]:
        """A mistake that ends the block is written down, unless the run is another's by now."""
        try:
            yield
        except RanksLost:  # which a restart may mend
            raise
        except PotstillError as error:
            with suppress(PotstillError):
                self.check_owner()
                write_text(self.folder / ERROR, json.dumps({"step": self.last_step(), "error": str(error)}))
            raise


def _refuse_same_error(folder: Path, step: int) -> None:
    try:
        left = json.loads((folder / ERROR).read_text(encoding="utf-8"))
        same, said = left["step"] == step, left["error"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if same:
        raise PotstillError(said)
