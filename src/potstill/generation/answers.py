"""Answers written, checked, and added to a file, from where it stopped."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from potstill.cache.reading import chat_kwargs, examples_of
from potstill.config import Recipe
from potstill.config.recipe import load_recipe
from potstill.data import Encoder
from potstill.files import write_text
from potstill.generation.checks import Check, Wanted, checks_of
from potstill.parallel.mesh import processes
from potstill.rollouts.engine import Engine, GenerationRequest
from potstill.rollouts.prompts import Answers, Prompt, Prompter
from potstill.rollouts.sampling import rollout_seed
from potstill.training.feed import open_engines
from potstill.training.run import Run
from potstill.training.setup import Parts, assemble
from potstill.types import PotstillError

Writer = Literal["teacher", "student"]
AT_ONCE = 64  # prompts whose answers are written, checked and saved together


@dataclass(frozen=True)
class Asked:
    """What is asked for besides the recipe."""

    out: Path
    by: Writer
    answers: int  # to each prompt
    limit: int | None  # of prompts
    reference: str | None  # the column with the right answer
    wanted: Wanted

    def settings(self, recipe: Recipe) -> dict[str, Any]:
        """What the file would be another for."""
        own = {key: value for key, value in asdict(self).items() if key not in ("out", "limit")}
        data, sampling = (
            part.model_dump(mode="json", by_alias=True) for part in (recipe.data, recipe.rollouts.sampling)
        )
        models = [recipe.student.model_dump(mode="json", by_alias=True)] if self.by == "student" else []
        models += [recipe.teachers[0].model_dump(mode="json")] if self.by == "teacher" else []
        plain: dict[str, Any] = json.loads(json.dumps({**own, "data": data, "sampling": sampling, "models": models}))
        return plain


def as_writing(recipe: Recipe, by: Writer) -> Recipe:
    """The recipe with nothing in it but what is needed to write."""
    shares = {"teacher": (0, 1), "student": (1, 0)}[by]
    return load_recipe(
        recipe,
        [
            f"rollouts.on_policy_fraction={shares[0]}",
            f"rollouts.teacher_fraction={shares[1]}",
            "rollouts.num_generations=1",
            "rollouts.generation_batch_size=null",
            "rollouts.steps_per_generation=1",
            "rollouts.max_staleness=0",
            "rollouts.reward=null",
            f"rollouts.sampling.max_new_tokens={recipe.rollouts.sampling.longest}",  # it may move over a run
            "loss={}",
            "eval=null",
        ],
    )


def generate(recipe: Recipe, asked: Asked, progress: Callable[[int, Counter[str]], None]) -> Counter[str]:
    """Write until there are no more prompts; gives what was counted. What an earlier call has written stays."""
    if processes() != 1:
        raise PotstillError(
            f"generate runs in one process, and this is one of {processes()}: start it without torchrun"
        )
    checks, recipe = checks_of(asked.wanted), as_writing(recipe, asked.by)
    if asked.reference is not None:
        columns = list(dict.fromkeys([*recipe.data.columns, asked.reference]))
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": columns})})
    done, counts = _begin(asked, asked.settings(recipe))
    parts = assemble(recipe)
    with ExitStack() as stack:
        for teacher in parts.teachers:
            stack.callback(teacher.close)
        engine = open_engines(parts, Run(Path(recipe.run)))[asked.by]
        stack.callback(engine.close)
        _write_all(parts, engine, asked, checks, done, counts, progress)
    return counts


def _write_all(
    parts: Parts,
    engine: Engine,
    asked: Asked,
    checks: dict[str, Check],
    done: int,
    counts: Counter[str],
    progress: Callable[[int, Counter[str]], None],
) -> None:
    writer: Any = parts.student if asked.by == "student" else parts.writer
    data, kwargs = parts.data, chat_kwargs(parts.data)
    longest, recipe = parts.recipe.rollouts.sampling.longest, parts.recipe
    prompter = Prompter(
        writer.tokenizer, most=data.max_length - longest, prompt_tokens=recipe.rollouts.prompt_tokens, kwargs=kwargs
    )
    encode = Encoder(writer.tokenizer, max_length=data.max_length, append_eos=True)
    texts = Answers(writer, encode, kwargs)
    found = (prompter(example) for example in examples_of(data, writer.tokenizer, answered=False))
    prompts = islice(enumerate(prompt for prompt in found if prompt is not None), done, asked.limit)
    seed = recipe.train.seed if recipe.rollouts.sampling.seed is None else recipe.rollouts.sampling.seed
    settings = asked.settings(recipe)
    while some := list(islice(prompts, AT_ONCE)):
        records = list(_written(some, engine, texts, asked, seed))
        kept = [record for record in records if _passes(record, checks, counts)]
        counts["prompts"] += len(some)
        counts["kept"] += len(kept)
        done += len(some)
        _save(asked.out, kept, done, counts, settings)
        progress(done, counts)
    if not done:
        raise PotstillError("data.sources gave no prompts: nothing was written")


def _written(
    prompts: Sequence[tuple[int, Prompt]], engine: Engine, texts: Answers, asked: Asked, seed: int
) -> Iterator[dict[str, Any]]:
    pairs = [(number, prompt, answer) for number, prompt in prompts for answer in range(asked.answers)]
    requests = [GenerationRequest(prompt.ids, rollout_seed(seed, number, answer)) for number, prompt, answer in pairs]
    for (_, prompt, answer), written in zip(pairs, engine.generate(requests), strict=True):
        example = texts.own(prompt, written, asked.by, None)
        completion = example.text[len(prompt.text) :]
        yield {
            "prompt": prompt.text,
            "completion": completion,
            **({} if prompt.messages is None else {"messages": list(example.messages or ())}),
            "reference": None if asked.reference is None else prompt.example.columns[asked.reference],
            "logprobs": [round(float(value), 5) for value in written.logprobs],
            "end": written.end,
            "answer": answer,
            "source": prompt.example.source,
        }


def _passes(record: dict[str, Any], checks: dict[str, Check], counts: Counter[str]) -> bool:
    counts["answers"] += 1
    failed = next((name for name, check in checks.items() if not check(record)), None)
    if failed is not None:
        counts[failed] += 1
    return failed is None


def _begin(asked: Asked, settings: dict[str, Any]) -> tuple[int, Counter[str]]:
    """How many prompts are done, and what was counted; what was written after that is taken off the file."""
    state = _state(asked.out)
    if not state.exists():
        if asked.out.exists():
            raise PotstillError(
                f"{asked.out} is there, and is not of `potstill generate`: choose another file with --out"
            )
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        return 0, Counter()
    try:
        found = json.loads(state.read_text(encoding="utf-8"))
        same, size = found["settings"] == settings, found["bytes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PotstillError(f"cannot read {state} ({error!r}): remove it and {asked.out} to begin anew") from None
    if not same:
        raise PotstillError(
            f"{asked.out} was begun with other data, models, sampling or checks: choose another file with --out, or remove it "
            f"and {state.name}"
        )
    if not asked.out.exists() or asked.out.stat().st_size < size:
        raise PotstillError(f"{asked.out} is shorter than it was: remove it and {state.name} to begin anew")
    os.truncate(asked.out, size)
    return found["prompts"], Counter(found["counts"])


def _save(out: Path, kept: list[dict[str, Any]], done: int, counts: Counter[str], settings: dict[str, Any]) -> None:
    with out.open("ab") as file:
        file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept).encode("utf-8", "replace"))
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    write_text(_state(out), json.dumps({"prompts": done, "bytes": size, "counts": counts, "settings": settings}))


def _state(out: Path) -> Path:
    return out.with_name(f"{out.name}.progress.json")
