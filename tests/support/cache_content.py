"""What a cache holds, whatever its shards are."""

from __future__ import annotations

from pathlib import Path

from potstill.cache.store import Cache


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Key → number of tokens and bytes of each document; none may be there twice."""
    found = {}
    for shard in Cache(folder).shards:
        for number, key in enumerate(shard.keys):
            assert shard.whole(number)
            data = shard.data[shard.offsets[number] : shard.offsets[number + 1]].tobytes()
            assert bytes(key).hex() not in found
            found[bytes(key).hex()] = (int(shard.tokens[number]), data)
    return found
