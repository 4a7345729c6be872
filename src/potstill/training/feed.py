"""What each optimizer step trains on, with what the teachers made ready: texts of the data set, of the student, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from potstill.cache.reading import chat_kwargs
from potstill.config import Recipe
from potstill.data import Encoder, Prefetched, StepBatch, StoppedWaiting
from potstill.models import LanguageModel
from potstill.rollouts.buffer import Buffer, Layout, load_saved, settings_of
from potstill.rollouts.engine import Engine
from potstill.rollouts.prompt_batches import Drafts, Kind
from potstill.rollouts.prompts import Answers, Prompter, stop_ids, tokenizer_stop_ids
from potstill.rollouts.remote_writer import RemoteWriter
from potstill.rollouts.transformers import TransformersEngine
from potstill.rollouts.vllm import open_vllm
from potstill.teachers.open import Prepared, prepared
from potstill.teachers.remote import RemoteOrigin
from potstill.training.run import Progress
from potstill.training.setup import Parts
from potstill.types import Batch, PotstillError, Teacher

PREPARING = 4  # micro-batches of a step that teachers make ready at once
AHEAD = 2  # drafts that wait to be written
POLL_SECONDS = 0.1


class Feed:
    """An iterator of prepared windows, and what a checkpoint needs of it."""

    def __init__(self, windows: Iterator[Prepared], buffer: Buffer | None = None, notes: Sequence[str] = ()) -> None:
        self._windows, self._buffer = windows, buffer
        self.notes = notes  # what is worth a word before the first step
        self._stack = ExitStack()

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        return next(self._windows)

    def advance(self, version: int) -> None:
        """The student has new weights, after so many optimizer steps: whoever writes with them is handed them."""
        if self._buffer is not None:
            self._buffer.advance(version)

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Put what was written, and is still to be trained on after `state`, into a checkpoint."""
        if self._buffer is not None:
            self._buffer.save(folder, state)

    def closing(self, what: Callable[[], None]) -> None:
        self._stack.callback(what)

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


Interrupted = Callable[[], bool]


def open_feed(
    recipe: Recipe,
    parts: Parts,
    progress: Progress,
    folder: Path,
    checkpoint: Path | None,
    interrupted: Interrupted = lambda: False,
) -> Feed:
    """From where `progress` says. `folder`: of the run; `checkpoint`: the one it goes on from. `interrupted`: whether to stop
    waiting (StoppedWaiting), for a server that is away, say."""
    if progress.data is not None and ("draft" in progress.data) != recipe.rollouts.writes:
        then, now = ("is written", "is not") if "draft" in progress.data else ("is not written", "is")
        raise PotstillError(
            f"rollouts: the text of the run in {folder} {then}, and the recipe's {now}: its place in the data means nothing; "
            "choose another folder with run="
        )
    if recipe.rollouts.writes:
        return _written(recipe, parts, progress, folder, checkpoint, interrupted)
    source = parts.windows(progress.data)
    read = Prefetched(source, depth=source.group_windows)
    ready = prepared(read, parts.teachers, progress.counts, workers=recipe.data.workers)
    windows = Prefetched(ready, depth=1, interrupted=interrupted)
    feed = Feed(windows)
    feed.closing(read.close)
    feed.closing(windows.close)
    return feed


def _written(
    recipe: Recipe,
    parts: Parts,
    progress: Progress,
    folder: Path,
    checkpoint: Path | None,
    interrupted: Interrupted,
) -> Feed:
    state = progress.data
    layout = _layout(recipe, parts)
    _check_state(recipe, layout, state)
    engines = open_engines(recipe, parts, folder, progress.step)
    drafts = Prefetched(open_drafts(recipe, parts, None if state is None else state["draft"]), AHEAD)
    other = parts.writer is not None and not parts.writer_shares_tokens
    buffer = Buffer(
        drafts,
        engines,
        Answers(
            parts.student,
            _encoder(recipe, parts),
            chat_kwargs(parts.data),
            parts.writer.tokenizer if other and parts.writer is not None else None,
        ),
        recipe.rollouts,
        layout,
        seed=_seed(recipe),
        version=progress.step,
        counts=progress.counts,
        waiting=[] if checkpoint is None else load_saved(checkpoint),
        taken=0 if state is None else state["taken"],
        translates=other,
        last=progress.total_steps,
    )
    at_once = max([PREPARING, *(teacher.ahead for teacher in parts.teachers)])
    pool = ThreadPoolExecutor(at_once, "prepare")
    notes = [note for engine in engines.values() if isinstance(engine, TransformersEngine) for note in engine.notes]
    feed = Feed(_ahead(buffer, parts.teachers, pool, interrupted), buffer, notes)
    feed.closing(drafts.close)
    feed.closing(lambda: pool.shutdown(cancel_futures=True))
    feed.closing(buffer.close)
    return feed


def _layout(recipe: Recipe, parts: Parts) -> Layout:
    pad = parts.student.tokenizer.pad_token_id
    return Layout(recipe.train.batch_size, recipe.train.micro, 0 if pad is None else int(pad), recipe.data.packing)


def _check_state(recipe: Recipe, layout: Layout, state: dict[str, Any] | None) -> None:
    """A generation that was begun goes on as it was begun."""
    if state is None or not state["taken"]:
        return
    then, now = state["settings"], settings_of(recipe.rollouts, layout)
    changed = [f"{key} {then.get(key)} → {value}" for key, value in now.items() if then.get(key) != value]
    if changed:
        raise PotstillError(
            f"the checkpoint stands within a generation that was written with other settings ({'; '.join(changed)}): go on "
            "from a checkpoint at the end of one, or choose another folder with run="
        )


def open_drafts(recipe: Recipe, parts: Parts, state: dict[str, Any] | None) -> Drafts:
    rollouts, data = recipe.rollouts, parts.data
    most = data.max_length - rollouts.sampling.max_new_tokens

    def prompter(tokenizer: Any) -> Prompter:
        return Prompter(tokenizer, most=most, prompt_tokens=rollouts.prompt_tokens, kwargs=chat_kwargs(data))

    prompters: dict[Kind, Prompter] = {"student": prompter(parts.student.tokenizer)}
    if parts.writer is not None:
        prompters["teacher"] = prompter(parts.writer.tokenizer)
    rows = recipe.train.batch_size * rollouts.steps_per_generation
    return Drafts(
        data,
        rollouts,
        _encoder(recipe, parts),
        prompters,
        parts.student.tokenizer,
        groups=rows // rollouts.num_generations,
        seed=recipe.train.seed,
        epochs=recipe.train.epochs,
        state=state,
        changed_data_ok=recipe.checkpoint.resume == "force",
    )


def open_engines(recipe: Recipe, parts: Parts, folder: Path, version: int) -> dict[Kind, Engine]:
    rollouts, chats = recipe.rollouts, any(source.messages for source in recipe.data.sources)
    engines: dict[Kind, Engine] = {}

    def transformers(model: LanguageModel, who: str, copies: bool, autocast: Any) -> Engine:
        return TransformersEngine(
            model,
            rollouts.sampling,
            stop_ids=stop_ids(model, chats),
            batch_size=rollouts.engine.batch_size,
            copies=copies,
            who=who,
            **({"autocast": autocast} if recipe.train.precision == "bf16" else {}),
        )

    if rollouts.on_policy_fraction:
        if rollouts.engine.kind == "vllm":
            engines["student"] = open_vllm(
                parts.student,
                rollouts,
                stop_ids=stop_ids(parts.student, chats),
                max_length=parts.data.max_length,
                folder=folder / "vllm",
                version=version,
            )
        else:
            engines["student"] = transformers(parts.student, "the student", rollouts.overlaps, parts.autocast)
    if rollouts.teacher_fraction:
        if parts.writer is None:
            raise PotstillError(
                "rollouts.teacher_fraction: the first teacher is a cache, which cannot write: give it as model"
            )
        if isinstance(parts.writer, RemoteOrigin):
            ends = tokenizer_stop_ids(parts.writer.tokenizer, chats)
            engines["teacher"] = RemoteWriter(parts.writer, rollouts.sampling, ends)
        else:
            engines["teacher"] = transformers(parts.writer, "the teacher", False, parts.autocast)
    return engines


def count_steps(recipe: Recipe, parts: Parts, progress: Callable[[int], None]) -> int:
    """How many optimizer steps the epochs of a recipe with written text have."""
    total = 0
    for draft in open_drafts(recipe, parts, None):
        rows = sum(len(g.examples) if g.kind == "data" else recipe.rollouts.num_generations for g in draft.groups)
        total += -(-rows // recipe.train.batch_size)
        progress(total)
    return total


def _encoder(recipe: Recipe, parts: Parts) -> Encoder:
    return Encoder(parts.student.tokenizer, max_length=parts.data.max_length, append_eos=parts.data.append_eos)


def _seed(recipe: Recipe) -> int:
    return recipe.train.seed if recipe.rollouts.sampling.seed is None else recipe.rollouts.sampling.seed


class _Pending(Sequence[Sequence[Any]]):
    """What teachers make ready on other threads, waited for where it is needed."""

    def __init__(self, futures: Sequence[Future[list[Any]]], interrupted: Interrupted) -> None:
        self._futures, self._interrupted = futures, interrupted

    def __len__(self) -> int:
        return len(self._futures)

    def __getitem__(self, index: Any) -> Any:
        while True:
            try:
                return self._futures[index].result(POLL_SECONDS)
            except TimeoutError:
                if self._futures[index].done():  # it was its own error
                    raise
                if self._interrupted():
                    raise StoppedWaiting from None


def _ahead(
    buffer: Buffer, teachers: Sequence[Teacher], pool: ThreadPoolExecutor, interrupted: Interrupted
) -> Iterator[Prepared]:
    """Later micro-batches are made ready while earlier ones train; and what is written for the next step already."""

    def ready(batch: Batch) -> list[Any]:
        return [teacher.prepare(batch) for teacher in teachers]

    def begun(window: StepBatch) -> Prepared:
        return Prepared(window, _Pending([pool.submit(ready, batch) for batch in window.batches], interrupted))

    for windows in buffer:
        following = begun(windows[0])
        for window in windows[1:]:
            present, following = following, begun(window)
            yield present
        yield following
