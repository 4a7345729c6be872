"""Data of every kind, and a step of a student that a teacher has answered: for the tests of teachers on disk and of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import write_jsonl

from potstill.cache.build import build
from potstill.config import CrossTokenizerConfig, DataConfig, LossConfig, StoreConfig
from potstill.data import StepBatches
from potstill.models import LanguageModel
from potstill.objective.student_loss import LossSettings, StudentLoss
from potstill.teachers.combine import compute_targets
from potstill.teachers.cross_tokenizer import cross_tokenizer_view
from potstill.teachers.live import LiveModel
from potstill.teachers.reading import TeacherReader
from potstill.teachers.teacher import Teacher

KD = LossSettings("forward_kl", 0.5, 0.1, 1.0, 1.0, 0.0)
WORDS = ["union", "people", "congress", "peace", "treasury", "nation", "year", "duty", "law", "commerce"]


def sentence(i: int, words: int) -> str:
    return " ".join(WORDS[(i * k * k + k + i) % 10] for k in range(words))


def write_files(folder: Path) -> Path:
    """Texts, of which one is longer than a piece; prompts with completions; chats."""
    texts = [{"text": f"{sentence(i, 4 + i * 5 % 14)} in {1790 + i}."} for i in range(14)]
    write_jsonl(folder / "text.jsonl", [*texts, {"text": sentence(3, 90)}])
    pairs = [{"q": f"Who keeps the {WORDS[i]}?", "a": f" {sentence(i, 5)}."} for i in range(5)]
    write_jsonl(folder / "pairs.jsonl", pairs)
    chats = [
        [
            {"role": "user", "content": f"What of the {WORDS[i]}?"},
            {"role": "assistant", "content": sentence(i, 4)},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": sentence(i + 3, 5)},
        ]
        for i in range(5)
    ]
    write_jsonl(folder / "chats.jsonl", [{"chat": chat} for chat in chats])
    return folder


def data_of(files: Path, *kinds: str, **changes: Any) -> DataConfig:
    sources = {
        "text": {"files": str(files / "text.jsonl")},
        "pairs": {"files": str(files / "pairs.jsonl"), "prompt": "q", "completion": "a"},
        "chats": {"files": str(files / "chats.jsonl"), "messages": "chat"},
    }
    chosen = [sources[kind] for kind in kinds or sources]
    return DataConfig.model_validate({"sources": chosen, "max_length": 96, "piece_bytes": 300, **changes})


def batches_of(data: DataConfig, student: LanguageModel, seed: int = 0, rows: int = 4):
    windows = StepBatches(data, student.tokenizer, batch_size=rows, micro_batch_size=rows, seed=seed, epochs=1)
    return [batch for window in windows for batch in window.batches]


def step(student: LanguageModel, batches, targets, knobs: LossSettings = KD):
    """Loss, and gradients of every parameter, of one optimizer step over the batches."""
    module = StudentLoss(student)
    module.zero_grad()
    tokens = sum(batch.supervised_tokens for batch in batches)
    total = 0.0
    for batch, target in zip(batches, targets, strict=True):
        loss, _ = module(batch, target if isinstance(target, list) else [(1.0, target)], tokens, knobs)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in module.named_parameters()}


def relative(ours, theirs) -> float:
    """The largest distance of a parameter's gradient, as a share of its length."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


def answers(teacher, batches):
    """The teacher's targets of each batch, with their weights."""
    return [compute_targets([teacher], [teacher.prepare(batch)], batch, LossConfig()) for batch in batches]


def cross_teacher(student, teacher, config: CrossTokenizerConfig, temperature: float = 1.0) -> Teacher[LiveModel]:
    """A model as a teacher with another tokenizer, whatever its own is."""
    view, width = cross_tokenizer_view(student, teacher.tokenizer, teacher.vocabulary, config, temperature)
    return Teacher(LiveModel(teacher, width, TeacherReader(teacher.tokenizer, teacher.positions, {})), view, "teacher")


def targets_of(teacher, batches):
    """The same without weights, of a teacher that is heard at every row."""
    return [target for ((_, target),) in answers(teacher, batches)]


def builder(teacher, data, tmp_path_factory):
    """Caches of all the data, each built once."""
    made: dict[str, Path] = {}

    def get(**store: Any) -> Path:
        name = "-".join(str(value) for value in store.values())
        if name not in made:
            made[name] = tmp_path_factory.mktemp("caches") / name
            build(teacher, StoreConfig(**store), data, made[name], name="tiny", batch_tokens=256)
        return made[name]

    return get
