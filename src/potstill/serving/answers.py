"""Answers of `potstill serve`, and the names that it is asked under."""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response

PIECE = 256 * 2**10  # bytes of an answer that are handed to its connection at once


def host_of(given: str) -> str:
    """Of a Host header, without the port."""
    name = given.partition("]")[0].lstrip("[") if given.startswith("[") else given.partition(":")[0]
    return name.lower().rstrip(".")


def numeric(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def words(code: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return as_json({"error": text}, code, headers)


def as_json(content: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=code, headers=headers)


def streamed(
    parts: Sequence[memoryview],
    headers: Mapping[str, str],
    media_type: str = "application/octet-stream",
    left: Callable[[int], None] = lambda size: None,
) -> Response:
    """Handed over piece by piece, each when the one before is on its way: what a client has not read is not copied. A part that
    is on its way is let go of; `left` is told how many bytes the others have."""
    from starlette.responses import StreamingResponse

    async def pieces() -> AsyncIterator[memoryview]:
        while waiting:
            left(sum(map(len, waiting)))
            for at in range(0, len(waiting[0]), PIECE):
                yield waiting[0][at : at + PIECE]
            waiting.popleft()

    waiting = deque(parts)
    length = {"content-length": str(sum(map(len, waiting)))}
    del parts
    return StreamingResponse(pieces(), headers={**headers, **length}, media_type=media_type)
