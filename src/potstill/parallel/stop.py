"""What asks a run to stop from outside: a signal, or a file in its folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    asked: Callable[[], bool]  # by the file
    name: str | None = None  # of the first SIGTERM or SIGINT received, or of the file

    def __call__(self) -> bool:
        if self.name is None and self.asked():
            self.name = "RUN/stop"
        return self.name is not None


@contextmanager
def stop_signal(asked: Callable[[], bool]) -> Iterator[Stop]:
    """SIGTERM and Ctrl-C end a run after the step under way, with a checkpoint. A second Ctrl-C interrupts at once."""
    stop = Stop(asked)

    def received(number: int, frame: FrameType | None) -> None:
        if stop.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.name = signal.Signals(number).name

    main = threading.current_thread() is threading.main_thread()  # Python allows handlers there only
    before = {number: signal.signal(number, received) for number in (signal.SIGTERM, signal.SIGINT) if main}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
