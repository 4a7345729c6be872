"""Teachers with ranks of their own: the last of the world, in the order of the recipe. Each rank that has rows of its own asks
one of every such teacher's; a teacher's rank answers, and knows nothing of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from potstill.cache.reading import weights_fingerprint
from potstill.config import Recipe
from potstill.models import load_teacher
from potstill.models.placed import Answers
from potstill.parallel.channel import Answerer, Asker, Channel, serve_all
from potstill.types import PotstillError

Channels = Sequence[tuple[int, Channel]]  # of this rank, each with the teacher's place in the recipe


def own_ranks(recipe: Recipe) -> int:
    """How many of the last ranks are teachers'."""
    return sum(teacher.ranks for teacher in recipe.teachers)


def open_channels(recipe: Recipe, world: int) -> Channels:
    """Made by all ranks of the world together."""
    made = [(index, Channel.between(asks, answers)) for index, asks, answers in _pairs(recipe, world)]
    return [(index, channel) for index, channel in made if channel is not None]


def _pairs(recipe: Recipe, world: int) -> Iterator[tuple[int, int, int]]:
    """Every teacher's place in the recipe with a rank that asks and the rank that answers it."""
    students = world - own_ranks(recipe)
    askers = range(0, students, recipe.parallel.cp * recipe.parallel.tp)  # one of those that have the same rows
    begin = students
    for index, teacher in enumerate(recipe.teachers):
        if teacher.ranks > len(askers):
            raise PotstillError(
                f"teachers[{index}].ranks {teacher.ranks} are more than the {len(askers)} ranks with rows of their own that "
                f"would ask them: set it to {len(askers)} at most"
            )
        for number, asks in enumerate(askers if teacher.ranks else ()):
            yield index, asks, begin + number % teacher.ranks
        begin += teacher.ranks


@contextmanager
def asking(recipe: Recipe, channels: Channels, seconds: float) -> Iterator[dict[int, Asker]]:
    """This rank's ends, by the teacher's place in the recipe. However the block ends, the other ends are told."""
    made: dict[int, Asker] = {}
    error: BaseException | None = None
    try:
        for index, channel in channels:
            made[index] = Asker(channel, f"the teacher {recipe.teachers[index].name}", seconds)
        yield made
    except BaseException as raised:
        error = raised
        raise
    finally:
        for asker in made.values():
            asker.close(error)


def serve(recipe: Recipe, channels: Channels, device: torch.device) -> None:
    """A teacher's rank: answers until all who ask are done; the error that ended them ends it too."""
    (index,) = {index for index, _ in channels}
    config = recipe.teachers[index]
    with ThreadPoolExecutor(1, "load") as pool:
        loading = pool.submit(load_teacher, config, device, f"teachers[{index}]")
        answers = Answers(loading, weights_fingerprint if config.cache is not None else lambda _: None)
        serve_all([Answerer(channel, answers) for _, channel in channels])
