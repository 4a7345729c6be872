"""The feed of a recipe: texts of the data set, of the student, of a teacher, or any mixture of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from potstill.cache.reading import chat_kwargs
from potstill.config import Recipe
from potstill.data import Encoder, Feed
from potstill.data.dealing import Share
from potstill.models import LanguageModel
from potstill.parallel.agree import Rounds
from potstill.parallel.mesh import ranks
from potstill.rollouts.buffer import Buffer, Layout, load_saved, settings_of
from potstill.rollouts.engine import Engine, EngineSetup, open_engine
from potstill.rollouts.prompt_batches import Kind, PromptBatches
from potstill.rollouts.prompts import Answers, Prompter, stop_ids
from potstill.rollouts.remote_writer import RemoteWriter
from potstill.rollouts.writing_ranks import WritingRanks
from potstill.teachers.live import LiveModel
from potstill.training.run import Run
from potstill.training.setup import Parts
from potstill.types import PotstillError

TILE = 128  # positions: of compiled layers off the CPU, rows are as wide as a multiple of it
PREPARING = 4  # micro-batches of written text that teachers make ready at once


def open_feed(parts: Parts, run: Run, interrupted: Callable[[], bool] = lambda: False) -> Feed:
    """From where the run stands. `interrupted`: whether to stop waiting (StoppedWaiting), for a server that is away, say."""
    writes, workers = parts.recipe.rollouts.writes, parts.recipe.data.workers
    if run.data is not None and ("prompts" in run.data) != writes:
        then, now = ("is not written", "is") if writes else ("is written", "is not")
        raise PotstillError(
            f"rollouts: the text of the run in {run.folder} {then}, and the recipe's {now}: its place in the data means "
            "nothing; choose another folder with run="
        )
    there: Any = {"interrupted": interrupted, "device": parts.device, "multiple": _multiple(parts)}
    if not writes:
        data = ranks().data
        steps = parts.step_batches(run.data, None if data is None else Rounds(data))
        return Feed(steps, parts.teachers, run.counts, workers=workers, **there)
    return Feed(_open_rollouts(parts, run), parts.teachers, workers=max(PREPARING, workers), **there)


def _multiple(parts: Parts) -> int:
    """Few widths, in whole tiles, are what compilers and kernels know best; but not more than a model can read."""
    if not parts.recipe.train.compile or parts.device.type == "cpu":
        return 1
    longest = -(-parts.data.max_length // TILE) * TILE
    live = [teacher.source.language_model for teacher in parts.teachers if isinstance(teacher.source, LiveModel)]
    most = (model.short_positions or model.positions for model in (parts.student, *live))
    return TILE if all(longest <= (positions or longest) for positions in most) else 1


def _open_rollouts(parts: Parts, run: Run) -> Buffer:
    recipe, state, writer = parts.recipe, run.data, parts.writer
    sampling = recipe.rollouts.sampling
    pad, here = parts.student.tokenizer.pad_token_id, ranks()
    train = recipe.train
    share = Share(train.micro(here.dp.size), here.dp.index, here.dp.size, train.tokens_per_micro_batch)
    layout = Layout(train.batch_size, share, 0 if pad is None else int(pad), recipe.data.packing)
    _check_state(recipe, layout, state)
    engines = open_engines(parts, run)
    return Buffer(
        open_prompt_batches(parts, None if state is None else state["prompts"]),
        engines,
        Answers(
            parts.student,
            _encoder(parts),
            chat_kwargs(parts.data),
            None if writer is None or parts.writer_shares_tokens else writer.tokenizer,
            recipe.loss.token_weights,
        ),
        recipe.rollouts,
        layout,
        seed=recipe.train.seed if sampling.seed is None else sampling.seed,
        version=run.step,
        counts=run.counts,
        saved=[] if run.checkpoint is None else load_saved(run.checkpoint),
        taken=0 if state is None else state["taken"],
        last=run.total_steps,
        team=WritingRanks(here.texts),
        device=parts.device,
    )


def _check_state(recipe: Recipe, layout: Layout, state: dict[str, Any] | None) -> None:
    """A generation that was begun is trained on as it was begun."""
    if state is None or not state["taken"]:
        return
    then, now = state["settings"], settings_of(recipe.rollouts, layout)
    changed = [f"{key} {then.get(key)} → {value}" for key, value in now.items() if then.get(key) != value]
    if changed:
        raise PotstillError(
            f"the checkpoint stands within a generation that was written with other settings ({'; '.join(changed)}): go on "
            "from a checkpoint at the end of one, or choose another folder with run="
        )


def open_prompt_batches(parts: Parts, state: dict[str, Any] | None) -> PromptBatches:
    recipe, data, tokenizer = parts.recipe, parts.data, parts.student.tokenizer
    rollouts = recipe.rollouts
    tokenizers: dict[Kind, Any] = {"student": tokenizer}
    if parts.writer is not None:
        tokenizers["teacher"] = parts.writer.tokenizer
    most, kwargs = data.max_length - rollouts.sampling.longest, chat_kwargs(data)
    prompters = {
        kind: Prompter(each, most=most, prompt_tokens=rollouts.prompt_tokens, kwargs=kwargs)
        for kind, each in tokenizers.items()
    }
    return PromptBatches(
        data,
        rollouts,
        _encoder(parts),
        prompters,
        tokenizer,
        groups=recipe.train.batch_size * rollouts.steps_per_generation // rollouts.num_generations,
        seed=recipe.train.seed,
        epochs=recipe.train.epochs,
        state=state,
        changed_data_ok=recipe.checkpoint.resume == "force",
    )


def open_engines(parts: Parts, run: Run) -> dict[Kind, Engine]:
    recipe = parts.recipe
    rollouts, chats = recipe.rollouts, any(source.messages for source in recipe.data.sources)
    autocast: Any = parts.autocast if parts.bf16 else nullcontext
    here = ranks()
    team = WritingRanks(here.texts)

    def opened(kind: str, model: LanguageModel, student: bool) -> Engine:
        ends, most = stop_ids(model, chats), parts.data.max_length
        return open_engine(
            kind, EngineSetup(model, rollouts, ends, most, run.folder, run.step, autocast, student, team)
        )

    engines: dict[Kind, Engine] = {}
    if rollouts.on_policy_fraction:
        engines["student"] = opened(rollouts.engine.kind, parts.student, True)
    if rollouts.teacher_fraction:
        if parts.writer is None:
            raise PotstillError(
                "rollouts.teacher_fraction: the first teacher is a cache, which cannot write: give it as model"
            )
        if isinstance(parts.writer, LanguageModel):
            engines["teacher"] = opened("transformers", parts.writer, False)
        else:
            # One of the ranks that have the same rows asks the teacher's server.
            asking = WritingRanks(here.texts, writes=here.leader)
            engines["teacher"] = RemoteWriter(parts.writer, rollouts.sampling, stop_ids(parts.writer, chats), asking)
    return engines


def count_steps(parts: Parts, progress: Callable[[int], None]) -> int:
    """How many optimizer steps the epochs of a recipe with written text have."""
    recipe, total = parts.recipe, 0
    for prompts in open_prompt_batches(parts, None):
        rows = sum(len(g.examples) if g.kind == "data" else recipe.rollouts.num_generations for g in prompts.groups)
        total += -(-rows // recipe.train.batch_size)
        progress(total)
    return total


def _encoder(parts: Parts) -> Encoder:
    data, weights = parts.data, parts.recipe.loss.token_weights
    return Encoder(
        parts.student.tokenizer, max_length=data.max_length, append_eos=data.append_eos, token_weights=weights
    )
