"""Where a teacher's model is: on the student's ranks, whole or spread over them, or on ranks of its own.

Own ranks are the last of the world, in the order of the recipe; each copy of a teacher lies over `tp` of them, the first of
which answers. Of the student's ranks that have the same rows the first asks one copy of every such teacher. A teacher's rank
knows nothing of losses.

    with world(recipe.parallel, device, recipe.train.batch_size, own_ranks(recipe)) as here:
        if not here.student:
            return serve_teacher(recipe, here, device)
        with asking(recipe, here, device, recipe.train.timeout) as askers:
            open_teachers(…, askers)

Both make the groups between the ranks, so that every rank of the world calls one of them, at the same place.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from potstill.cache.reading import weights_fingerprint
from potstill.config import Recipe, TeacherConfig
from potstill.models import LanguageModel, load_teacher
from potstill.models.placed import Answers, follow
from potstill.models.spread import Spread, load_spread
from potstill.parallel.channel import IDLE, Answerer, Asker, Channel, serve_all
from potstill.parallel.context import Context, split_context
from potstill.parallel.mesh import Axis, Ranks
from potstill.parallel.team import Lockstep, Team, sharing_rows, students
from potstill.parallel.watch import RESUMES, PeerLost, RanksLost, note_loss, note_place
from potstill.types import PotstillError

Fingerprint = Callable[[LanguageModel], str | None]


def no_fingerprint(_: LanguageModel) -> None:
    """Of a teacher that nobody asks for one."""


def own_ranks(recipe: Recipe) -> int:
    """How many of the last ranks are teachers'."""
    return sum(teacher.ranks for teacher in recipe.teachers)


@dataclass(frozen=True)
class Copy:
    """The copy of a teacher that lies over this rank of its own, and others."""

    index: int  # of the teacher in the recipe
    team: Team
    tp: DeviceMesh | None


@dataclass(frozen=True)
class Channels:
    """Of this rank: each with the teacher's place in the recipe; and the copy that is here, if any."""

    made: Sequence[tuple[int, Channel]]
    copy: Copy | None


def _open_channels(recipe: Recipe, here: Ranks, device: torch.device) -> Channels:
    """Made by all ranks of the world together, in one order."""
    if not here.many:
        return Channels([], None)
    begin, found = here.world - own_ranks(recipe), None
    for index, teacher in enumerate(recipe.teachers):
        if teacher.ranks:
            grid = torch.arange(begin, begin + teacher.ranks).view(-1, teacher.copy_ranks)
            copy = _copy(index, grid, here, device)
            found, begin = copy or found, begin + teacher.ranks
    pairs = _pairs(recipe, here.world)
    made = [(index, Channel.between(asks, answers)) for index, asks, answers in pairs]
    return Channels([(index, channel) for index, channel in made if channel is not None], found)


def _copy(index: int, grid: torch.Tensor, here: Ranks, device: torch.device) -> Copy | None:
    """`grid`: a row of ranks for each copy."""
    size = grid.shape[1]
    mesh = DeviceMesh(device.type, grid, mesh_dim_names=("copy", "tp")) if size > 1 else None
    found = None
    for members in grid.tolist():
        group = dist.new_group(members, IDLE, "gloo") if size > 1 else None
        if here.rank in members:
            team = Team((Axis(members.index(here.rank), size, group),))
            found = Copy(index, team, None if mesh is None else mesh["tp"])
    return found


def _pairs(recipe: Recipe, world: int) -> Iterator[tuple[int, int, int]]:
    """Every teacher's place in the recipe with a rank that asks and the rank that answers it."""
    begin = world - own_ranks(recipe)
    askers = range(0, begin, recipe.parallel.cp * recipe.parallel.tp)  # one of those that have the same rows
    for index, teacher in enumerate(recipe.teachers):
        copies = range(begin, begin + teacher.ranks, teacher.copy_ranks)
        if len(copies) > len(askers):
            raise PotstillError(
                f"teachers[{index}].ranks {teacher.ranks} are {len(copies)} copies of it, more than the {len(askers)} ranks "
                f"with rows of their own that would ask them: set it to {len(askers) * teacher.copy_ranks} at most"
            )
        for number, asks in enumerate(askers if copies else ()):
            yield index, asks, copies[number % len(copies)]
        begin += teacher.ranks


@contextmanager
def asking(recipe: Recipe, here: Ranks, device: torch.device, seconds: float) -> Iterator[dict[int, Asker]]:
    """What a rank of the student asks teachers with ranks of their own through, by their place in the recipe; nothing, if it is
    another that asks for it. However the block ends, the other ends are told. `seconds`: how long an answer may take."""
    made: dict[int, Asker] = {}
    error: BaseException | None = None
    try:
        for index, channel in _open_channels(recipe, here, device).made:
            made[index] = Asker(channel, f"the teacher {recipe.teachers[index].name}", seconds)
        yield made
    except PeerLost as lost:  # outside of a step, which would say more
        error = RanksLost(f"{lost} (rank {lost.peer}): see there what ended it; {RESUMES}")
        raise error from lost
    except BaseException as raised:
        error = raised
        raise
    finally:
        for asker in made.values():
            asker.close(error)


def serve_teacher(recipe: Recipe, here: Ranks, device: torch.device) -> None:
    """What a teacher's rank does: it answers until all who ask are done; the error that ended them ends it too. A signal does
    not: who asks is told to stop by the same one, and needs its answers until then."""
    with _signals_ignored():
        _serve_teacher(recipe, here, device)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()  # Python allows handlers there only
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT) if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve_teacher(recipe: Recipe, here: Ranks, device: torch.device) -> None:
    channels = _open_channels(recipe, here, device)
    copy = channels.copy
    assert copy is not None
    config, where = recipe.teachers[copy.index], f"teachers[{copy.index}]"
    note_place(here, 0, f", which has the teacher {config.name}")
    fingerprint: Fingerprint = weights_fingerprint if config.cache is not None else no_fingerprint
    load: Callable[[], LanguageModel] = partial(load_teacher, config, device, where)
    if copy.tp is not None:
        load = partial(load_spread, config, device, where, Spread(copy.team, copy.tp), fingerprint)
    if not copy.team.leads:
        follow(load, copy.team)
        return
    with ThreadPoolExecutor(1, "load") as pool:
        answers = Answers(pool.submit(load), fingerprint, copy.team)
        error: BaseException | None = None
        try:
            serve_all([Answerer(channel, answers) for _, channel in channels.made])
        except PeerLost as lost:
            with suppress(RuntimeError):  # the store is gone, and with it rank 0
                note_loss(here)
            error = RanksLost(f"lost rank {lost.peer}, which asks the teacher {config.name} ({lost}): {RESUMES}")
            raise error from lost
        except BaseException as raised:
            error = raised
            raise
        finally:
            answers.end(error)


def load_in_place(
    config: TeacherConfig,
    device: torch.device,
    where: str,
    here: Ranks,
    *,
    head_rows: int | None = None,
    fingerprint: Fingerprint = no_fingerprint,
    key: str | None = None,
) -> LanguageModel:
    """A teacher on the student's ranks, as the recipe places it. `head_rows`: ids of the student's head, with which the
    teacher's is to be cut; None: it stays whole. `fingerprint`: as in `load_spread`."""
    _check_tp(config, here, where)
    sharded = config.placement != "replicate" and here.mesh is not None and here.fsdp.size() > 1
    tp = None if config.tp == 1 or here.tp.size == 1 or config.quantize or here.mesh is None else here.mesh["tp"]
    notes: list[str] = []
    if config.placement != "replicate" and not sharded:
        notes = [f"{where}.placement: there is one rank to {config.placement} it over: it is whole there"]
    if not sharded and tp is None:
        model = load_teacher(config, device, where, key)
    else:
        team = students(here) if sharded else Team((here.tp,))
        fsdp = here.fsdp if sharded else None
        spread = Spread(team, tp, fsdp, config.placement == "offload", head_rows)
        model = load_spread(config, device, where, spread, fingerprint, key)
    model.notes = [*model.notes, *notes]
    _read_in_parts(model, here)
    together = sharded or tp is not None or model.context is not None
    model.lockstep = Lockstep(sharing_rows(here) if together else Team(()), here.dp if sharded else Axis())
    return model


def _read_in_parts(model: LanguageModel, here: Ranks) -> None:
    """Over context-parallel ranks, where it can be: else each of them reads the whole."""
    if here.cp.group is None or model.attention == "own":
        return
    try:
        split_context(model.model)
    except PotstillError:
        return
    model.context = Context(here.cp.group, here.cp.size, here.cp.index)


def _check_tp(config: TeacherConfig, here: Ranks, where: str) -> None:
    if config.tp not in ("auto", 1, here.tp.size):
        raise PotstillError(
            f"{where}.tp: on the student's ranks a teacher's matrices are shared as the student's are (parallel.tp "
            f"{here.tp.size}) or not at all: set it to {here.tp.size} or 1, or give it ranks of its own"
        )
