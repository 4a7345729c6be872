"""What the command line of `potstill serve` says, and whether that can be."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from potstill.serving.http import sound_token
from potstill.serving.protocol import HEADER_BYTES
from potstill.types import PotstillError

READING = 4  # times its size that a request's body takes, until it is read
JSON = 24  # times its size that its header does
OTHER_FILES = 128  # that a process has open besides its connections


@dataclass(frozen=True)
class ServeOptions:
    """What the command line says."""

    host: str
    port: int
    token_env: str | None
    max_body_mb: float
    max_tokens: int | None
    batch_tokens: int | None
    max_answer_mb: float = 1024.0
    version: str = ""  # of potstill
    max_memory_mb: float = 2048.0
    max_connections: int = 512
    client_timeout: float = 30.0
    allowed_hosts: Sequence[str] = ()


def check_limits(options: ServeOptions) -> None:
    header = JSON * min(options.max_body_mb, HEADER_BYTES / 2**20)
    needed = READING * options.max_body_mb + header + options.max_answer_mb
    if options.max_memory_mb < needed:
        raise PotstillError(
            f"--max-memory-mb {options.max_memory_mb:g}: one request of --max-body-mb {options.max_body_mb:g} and its answer "
            f"of --max-answer-mb {options.max_answer_mb:g} take up to {needed:g}: give that, or smaller ones"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = options.max_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < files:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        except (ValueError, OSError) as error:
            raise PotstillError(
                f"--max-connections {options.max_connections}: a process may have {hard} files open here (ulimit -n): give "
                f"{max(1, hard - OTHER_FILES)} or fewer"
            ) from error


def listen(host: str, port: int) -> socket.socket:
    """On IPv4 where a name has both, as its clients expect."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server(address, family=family, backlog=256)


def token_of(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise PotstillError(f"--token-env {variable}: there is no such environment variable, or it is empty")
    if not sound_token(token):
        raise PotstillError(
            f"--token-env {variable}: it holds spaces, or characters that are not ASCII, within the token: no client could "
            "send it"
        )
    return token
