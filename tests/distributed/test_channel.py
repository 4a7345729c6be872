"""One rank asks another: answers in any order, by shared memory and without, errors of both ends, and an end that is lost."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, on_ranks
from torch import Tensor

from potstill.parallel import channel
from potstill.parallel.channel import AHEAD, Answerer, Asker, Channel, serve_all
from potstill.parallel.watch import PeerLost
from potstill.types import PotstillError

WIDTH = 3
DOUBLE, FAIL, REFUSE, SEEN = range(4)


def square(numbers: Tensor) -> Tensor:
    return (numbers.double() ** 2)[:, None].expand(-1, WIDTH) / 7


def channels(askers: int) -> list[Channel]:
    """Those of this rank: each of the others asks the last one."""
    made = [Channel.between(rank, askers) for rank in range(askers)]
    return [one for one in made if one is not None]


def answering(askers: int) -> list[int]:
    """The last rank: what it was asked, by its first number."""
    seen: list[int] = []

    def answer(what: int, numbers: Tensor) -> Tensor:
        if what == FAIL:
            raise ValueError("no room for eleven")
        if what == REFUSE:
            raise PotstillError("teachers[0].model: nowhere to be found")
        if what == SEEN:
            return torch.tensor([[len(seen)]], dtype=torch.uint8)
        seen.append(int(numbers[0]) if len(numbers) else -1)
        return square(numbers)

    serve_all([Answerer(one, answer) for one in channels(askers)])
    return seen


def asker(how: str, seconds: float = 60.0) -> Asker:
    """`how`: where answers lie."""
    if how == "sent":
        channel.SHARED = Path("/nowhere")
    (own,) = channels(dist.get_world_size() - 1)
    made = Asker(own, "the teacher", seconds)
    if how == "full":

        def full(path: Path, size: int) -> None:
            raise OSError("no space left")

        channel._reserve = full
    return made


def begin(made: Asker, numbers: Tensor) -> Any:
    return made.begin(DOUBLE, numbers, len(numbers) * WIDTH * 8)


def asks(how: str) -> Any:
    """Two or three ranks, of which the last answers."""
    askers = dist.get_world_size() - 1
    before = channel.SHARED, channel._reserve
    try:
        if dist.get_rank() == askers:
            return answering(askers)
        made = asker(how)
        rooms = made._folder
        first = dist.get_rank() * 100
        numbers = [torch.arange(first + i, first + i + n) for i, n in enumerate((4, 0, 1, 900, 5, 4000, 7))]
        waits = [begin(made, each) for each in numbers]
        assert made._under_way == AHEAD  # the others wait for their turn
        for i in (0, 3, 1, 6, 2, 5, 4):  # also before their turn
            torch.testing.assert_close(waits[i](), square(numbers[i]), rtol=0, atol=0)
        torch.testing.assert_close(waits[3](), square(numbers[3]), rtol=0, atol=0)  # once more
        dropped = [begin(made, each) for each in numbers]
        del dropped
        gc.collect()
        again = [begin(made, each) for each in numbers]
        for i, wait in enumerate(again):
            torch.testing.assert_close(wait(), square(numbers[i]), rtol=0, atol=0)
        assert made._under_way == 0 and not made._waiting
        assert (rooms is None) == (how == "sent") and any(room.memory is not None for room in made._rooms) == (
            how == "shared memory"
        )
        made.close()
        assert rooms is None or not rooms.exists()
        return how
    finally:
        channel.SHARED, channel._reserve = before


@pytest.mark.parametrize("how", ["shared memory", "sent", "full"])
@pytest.mark.parametrize("world", [2, 3])
def test_answers_are_those_of_the_other_rank(world: int, how: str) -> None:
    *_, seen = on_ranks(world, asks, how)
    assert len(seen) >= 15 * (world - 1)


def fails() -> Any:
    if dist.get_rank() == 1:
        return answering(1)
    made = asker("shared memory")
    nothing = torch.zeros(1, dtype=torch.int64)
    said = []
    for what in (FAIL, REFUSE):
        try:
            made.begin(what, nothing)()
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    assert int(made.begin(SEEN, nothing)()[0, 0]) == 0  # it goes on
    made.close()
    return said


def test_an_error_of_who_answers_is_the_askers_in_its_words() -> None:
    said, _ = on_ranks(2, fails)
    assert said == [
        ("RuntimeError", "no room for eleven"),
        ("PotstillError", "teachers[0].model: nowhere to be found"),
    ]


def stops_for(error: Exception) -> Any:
    if dist.get_rank() == 1:
        try:
            return answering(1)
        except Exception as found:
            return type(found).__name__, str(found)
    made = asker("shared memory")
    wait = begin(made, torch.arange(5))
    made.close(error)  # while one is under way
    assert wait().shape == (5, WIDTH)
    return None


def test_an_error_of_the_asker_ends_who_answers_in_its_words() -> None:
    found = on_ranks(2, stops_for, PotstillError("data: it ended"))
    assert found[1] == ("PotstillError", "data: it ended")
    assert on_ranks(2, stops_for, ValueError("odd"))[1] == ("RuntimeError", "odd")


def asks_after(folder: Path) -> Any:
    """The first rank ends with an error; the second asks only once the last one has heard of it."""
    if dist.get_rank() == 2:
        ends = Answerer.serve

        def serve(self: Answerer) -> Exception | None:
            error = ends(self)
            (folder / f"{self._channel.peer} ended").touch()
            return error

        Answerer.serve = serve  # type: ignore[method-assign]
        try:
            return answering(2)
        except PotstillError as error:
            return str(error)
        finally:
            Answerer.serve = ends  # type: ignore[method-assign]
    made = asker("shared memory")
    if dist.get_rank() == 1:
        while not (folder / "0 ended").exists():
            time.sleep(0.01)
        assert begin(made, torch.arange(5))().shape == (5, WIDTH)
    made.close(PotstillError("data: it ended"))
    return None


def test_one_that_ends_with_an_error_leaves_nobody_without_an_answer(tmp_path: Path) -> None:
    assert on_ranks(3, asks_after, tmp_path) == [None, None, "data: it ended"]


def dies() -> Any:
    if dist.get_rank() == 1:

        def answer(what: int, numbers: Tensor) -> Tensor:
            os._exit(3)

        serve_all([Answerer(one, answer) for one in channels(1)])
    made = asker("shared memory")
    waits = [begin(made, torch.arange(5)) for _ in range(3)]
    for wait in waits:
        with pytest.raises(PeerLost, match="the connection to the teacher is lost") as lost:
            wait()
        assert lost.value.peer == 1
    made.close()
    Path("told").touch()
    return None


def test_a_rank_that_is_lost_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankFailed, match="rank 1 of 2: its process died"):
        on_ranks(2, dies)
    assert (tmp_path / "told").exists()


def hangs() -> str:
    """The last rank answers nothing before the other has given it up."""
    if dist.get_rank() == 1:

        def answer(what: int, numbers: Tensor) -> Tensor:
            while not Path("given up").exists():
                time.sleep(0.01)
            return square(numbers)

        with pytest.raises(PotstillError) as told:
            serve_all([Answerer(one, answer) for one in channels(1)])
        Path("ended").touch()
        return str(told.value)
    made = asker("shared memory", seconds=1.0)
    waits = [begin(made, torch.arange(5)) for _ in range(3)]
    for wait in waits[:2]:
        with pytest.raises(PeerLost, match="the connection to the teacher timed out: no answer for 1 s"):
            wait()
    made.close(PotstillError("data: it ended"))  # does not wait for one that does not listen
    Path("given up").touch()
    while not Path("ended").exists():  # one that comes to itself is told after all, as long as this process is there
        time.sleep(0.01)
    return "given up"


def test_a_rank_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert on_ranks(2, hangs) == ["given up", "data: it ended"]
