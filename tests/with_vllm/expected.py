"""The naive twins of what vLLM writes: a token at a time with the student itself, and transformers' own truncation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from potstill.config.rollouts import SamplingConfig
from potstill.models import LanguageModel
from potstill.rollouts.engine import Completion, GenerationRequest


def prompt(student: LanguageModel, text: str) -> npt.NDArray[np.int32]:
    return np.array(student.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def asks(student: LanguageModel, texts: Sequence[str], seeds: Sequence[int] = (0,)) -> list[GenerationRequest]:
    return [GenerationRequest(prompt(student, text), seed) for text in texts for seed in seeds]


@torch.no_grad()
def logits_after(student: LanguageModel, prompt_ids: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> Tensor:
    """What the student says before each of `ids`: [C, V]."""
    whole = torch.from_numpy(np.concatenate([prompt_ids, ids])).long()[None]
    return student.model(input_ids=whole).logits[0, len(prompt_ids) - 1 : -1].float()


def likeliest(student: LanguageModel, prompt_ids: npt.NDArray[np.int32], count: int) -> list[int]:
    ids: list[int] = []
    for _ in range(count):
        extended = np.array([*ids, 0], np.int32)  # the last is not looked at
        ids.append(int(logits_after(student, prompt_ids, extended)[-1].argmax()))
    return ids


def drawn_logprobs(
    student: LanguageModel, ask: GenerationRequest, text: Completion, sampling: SamplingConfig
) -> Tensor:
    logits = logits_after(student, ask.ids, text.ids) / sampling.temperature
    if sampling.min_p:
        logits = MinPLogitsWarper(sampling.min_p)(None, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits.log_softmax(-1).gather(1, torch.from_numpy(text.ids).long()[:, None])[:, 0]
