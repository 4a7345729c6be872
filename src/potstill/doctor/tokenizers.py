"""Tokenizers, the tokens that end a text, and chat templates: what nobody notices until the student does not stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from potstill.cache.reading import chat_kwargs
from potstill.data import Encoder
from potstill.doctor.findings import Finding, Patient, error, ok, warning
from potstill.models import difference, load_tokenizer
from potstill.models.tokenizer import optional_file
from potstill.text import TokenTable
from potstill.text.chat import THINK, THOUGHT, ChatRenderer
from potstill.types import Example, PotstillError

QUESTION = {"role": "user", "content": "What is two and two?"}
ANSWER = {"role": "assistant", "content": "Four."}
CONVERSATION = [QUESTION, ANSWER]


def student_tokenizer(patient: Patient) -> Iterator[Finding]:
    """A model with the tokenizer of another reads noise, and nothing in its shapes tells."""
    student, tokenizer = patient.recipe.student, patient.tokenizer
    name = student.model or student.from_
    if name is None or student.tokenizer in (None, name):
        yield ok(f"{len(tokenizer):,} ids, the student's own")
        return
    own = load_tokenizer(name, "student.model", student.revision, student.trust_remote_code)
    reason = _first_other(own, tokenizer)
    if reason is None:
        yield ok(f"student.tokenizer {student.tokenizer} is that of {name}")
    else:
        size = (
            f"both have {len(own):,} ids" if len(own) == len(tokenizer) else f"{len(own):,} and {len(tokenizer):,} ids"
        )
        yield error(
            f"{name} was trained with another tokenizer than student.tokenizer {student.tokenizer} ({size}): {reason}",
            "leave student.tokenizer out, or train a fresh model (student.config) with it",
        )


def _first_other(own: Any, given: Any) -> str | None:
    width = min(len(own), len(given))
    pairs = zip(own.convert_ids_to_tokens(range(width)), given.convert_ids_to_tokens(range(width)), strict=True)
    found = next((f"id {i} is {a!r} there and {b!r} here" for i, (a, b) in enumerate(pairs) if a != b), None)
    return found or difference(given, own)


def teacher_tokenizers(patient: Patient) -> Iterator[Finding]:
    for where, tokenizer in patient.teachers:
        reason, size = difference(patient.tokenizer, tokenizer), len(tokenizer)
        if reason is None:
            yield ok(f"{where} has the student's tokenizer")
        elif size == len(patient.tokenizer):
            yield warning(
                f"{where} has as many ids as the student ({size:,}), and {reason}: it is learnt from across tokenizers",
                "if the two were meant to have one vocabulary, take the teacher's tokenizer for the student",
            )
        else:
            yield ok(f"{where} has another tokenizer ({size:,} ids): texts are aligned by bytes")


def ends(patient: Patient) -> Iterator[Finding]:
    """That answers end with a token that generation stops at, and that this token is learnt."""
    tokenizer, data = patient.tokenizer, patient.recipe.data
    pad = "; pad is eos, and ends are learnt all the same" if tokenizer.pad_token_id in _eos(tokenizer) else ""
    if any(source.kind == "completion" for source in data.sources) and patient.recipe.rollouts.data_share:
        encode = Encoder(tokenizer, max_length=64, append_eos=data.append_eos)
        (found,) = encode([Example("", "Two and two? Four.", spans=((12, 18),))])
        last = None if found.example is None else _last_learnt(found.example)
        if last not in _eos(tokenizer):
            masked = ", and pad is eos" if pad else ""
            yield warning(
                f"answers do not end with eos ({tokenizer.eos_token}){masked}: the student never learns to stop",
                "set data.append_eos to true, and give the tokenizer an eos_token",
            )
        else:
            yield ok(f"answers end with {tokenizer.eos_token}, which is learnt{pad}")
    if patient.chats:
        yield _end_of_turn(patient, pad)


def _end_of_turn(patient: Patient, pad: str) -> Finding:
    tokenizer = patient.tokenizer
    renderer = ChatRenderer(tokenizer, chat_kwargs(patient.recipe.data))
    rendered = renderer.render(CONVERSATION, None, "a conversation of the doctor's")[0]
    encode = Encoder(tokenizer, max_length=4096, append_eos=False)
    (found,) = encode([Example("", rendered.text, spans=rendered.spans, messages=CONVERSATION)])
    last = None if found.example is None else _last_learnt(found.example)
    student = patient.recipe.student
    stops = _eos(tokenizer) | _generation_eos(student.model or student.from_, student.revision)
    stops |= set(TokenTable.from_tokenizer(tokenizer).special.get("end_of_turn", ()))
    token = None if last is None else tokenizer.convert_ids_to_tokens(last)
    if last not in stops:
        return warning(
            f"the chat template ends an answer with {token!r}, and never with eos ({tokenizer.eos_token}): the student never "
            "learns to stop",
            "take a tokenizer whose template writes its eos or end-of-turn token after an answer (student.tokenizer)",
        )
    return ok(f"answers end with {token}, which is learnt, and at which the saved student stops{pad}")


def _last_learnt(example: Example) -> int:
    return int(example.ids[np.flatnonzero(example.supervised)[-1]])


def _eos(tokenizer: Any) -> set[int]:
    return set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}


def _generation_eos(name: str | None, revision: str | None) -> set[int]:
    """What a model's generation_config.json says."""
    file = None if name is None else optional_file(name, "generation_config.json", revision)
    if file is None:
        return set()
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return set()
    return {found} if isinstance(found, int) else set(found or ())


def teacher_ends(patient: Patient) -> Iterator[Finding]:
    """A base model and an instruct model of one family have one vocabulary, and end an answer differently."""
    if not patient.chats:
        return
    for (where, tokenizer), config in zip(patient.teachers, _own_models(patient), strict=True):
        if difference(patient.tokenizer, tokenizer) is not None:
            continue
        theirs = _eos(tokenizer) | _generation_eos(config.model, config.revision)
        ours = _eos(patient.tokenizer)
        if theirs and ours and not theirs & ours:
            a, b = (patient.tokenizer.convert_ids_to_tokens(sorted(ids)) for ids in (ours, theirs))
            yield warning(
                f"the student's eos is {', '.join(a)} and that of {where} {', '.join(b)}: one is perhaps a base model",
                "take the teacher's tokenizer for the student (student.tokenizer), or models of one kind",
            )
        else:
            yield ok(f"{where} ends its texts as the student does")


def _own_models(patient: Patient) -> list[Any]:
    configs = [config for config in patient.recipe.teachers if config.student is None and config.source is None]
    return [config for config in configs if not (patient.quick and config.server is not None)]


def chat_templates(patient: Patient) -> Iterator[Finding]:
    """Of teachers that read the student's tokens, and so the student's template."""
    if not patient.chats:
        return
    kwargs = chat_kwargs(patient.recipe.data)
    ours = ChatRenderer(patient.tokenizer, kwargs).render(CONVERSATION, None, "the student")[0].text
    for where, tokenizer in patient.teachers:
        if difference(patient.tokenizer, tokenizer) is not None:
            continue
        if not tokenizer.chat_template:
            yield warning(
                f"{where} has no chat template: it reads the student's, which it was perhaps not trained on",
                "take a teacher that was trained on chats, or data as prompt and completion",
            )
            continue
        try:
            theirs = ChatRenderer(tokenizer, kwargs).render(CONVERSATION, None, where)[0].text
        except PotstillError as refused:
            theirs = str(refused)
        if ours == theirs:
            yield ok(f"{where} has the student's chat template")
        else:
            yield warning(
                f"{where} has another chat template than the student, whose it reads: {_apart(ours, theirs)}",
                "take the teacher's tokenizer, with its template, for the student (student.tokenizer)",
            )


def _apart(ours: str, theirs: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"{ours[same : same + 30]!r} here is {theirs[same : same + 30]!r} there"


def thinking(patient: Patient) -> Iterator[Finding]:
    """Whether all of them answer with a thought, or none: the generation prompt tells."""
    if not patient.chats or not patient.teachers:
        return
    kwargs = chat_kwargs(patient.recipe.data)
    ours = _mode(patient.tokenizer, kwargs, "the student")
    for (where, tokenizer), config in zip(patient.teachers, _own_models(patient), strict=True):
        own = kwargs if config.chat_template_kwargs is None else config.chat_template_kwargs
        theirs = _mode(tokenizer, own, where) if tokenizer.chat_template else ours
        if theirs != ours:
            yield warning(
                f"the template of {where} {theirs} before an answer, and the student's {ours}",
                "set chat_template_kwargs of data.sources[], or of the teacher (enable_thinking: false, or as the template "
                "calls it), or take models that think alike",
            )
        else:
            yield ok(f"{where} {ours} before an answer, as the student does")


def _mode(tokenizer: Any, kwargs: dict[str, Any], where: str) -> str:
    prompt = ChatRenderer(tokenizer, kwargs).prompt([QUESTION], None, where)
    opened, closed = prompt.count(THINK), prompt.count(THOUGHT)
    return (
        "opens a thought" if opened > closed else "leaves its thought empty" if opened else "says nothing of thinking"
    )
