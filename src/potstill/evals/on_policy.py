"""How far the student is from its teacher on what it writes itself: the mistakes that text of a data set never shows it."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from potstill.cache.reading import chat_kwargs, pieces_of
from potstill.config import DataConfig, SamplingConfig
from potstill.data import Encoder
from potstill.losses import fused_linear_kd
from potstill.models import LanguageModel, evaluating
from potstill.rollouts.buffer import Layout, about, laid_out
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.prompts import Answers, Prompt, Prompter, stop_ids
from potstill.rollouts.sampling import rollout_seed
from potstill.rollouts.transformers import TransformersEngine
from potstill.teachers.live import LiveModel
from potstill.teachers.teacher import Teacher
from potstill.types import PotstillError


class OnPolicyEval:
    """The student on `texts` answers to the beginnings of held-out text, drawn at temperature 1 with fixed seeds."""

    def __init__(
        self,
        student: LanguageModel,
        teacher: Teacher[LiveModel],
        data: DataConfig,
        *,
        texts: int,
        prompt_tokens: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> None:
        self._student, self._teacher, self._batch_size = student, teacher, batch_size
        chats = any(source.messages for source in data.sources)
        self._stop = stop_ids(student, chats)
        self._sampling = SamplingConfig(max_new_tokens=max_new_tokens)
        most = data.max_length - max_new_tokens
        if most < 1:
            raise PotstillError(
                f"eval.on_policy_samples: rollouts.sampling.max_new_tokens {max_new_tokens} leaves no room for a prompt in "
                f"eval.data.max_length {data.max_length}"
            )
        prompter = Prompter(student.tokenizer, most=most, prompt_tokens=prompt_tokens, kwargs=chat_kwargs(data))
        found = (prompter(piece) for piece in pieces_of(data, student.tokenizer, "eval.data"))
        self._prompts: list[Prompt] = list(islice((prompt for prompt in found if prompt is not None), texts))
        encode = Encoder(student.tokenizer, max_length=data.max_length, append_eos=True)
        self._answers = Answers(student, encode, chat_kwargs(data))
        self._engine: TransformersEngine | None = None  # made, and tried, when it is first needed

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        if self._engine is None:
            self._engine = TransformersEngine(self._student, self._sampling, stop_ids=self._stop)
        asked = [GenerationRequest(prompt.ids, rollout_seed(0, i, 0)) for i, prompt in enumerate(self._prompts)]
        written = self._engine.generate(asked)
        examples = [self._answers.own(p, text, "student", None) for p, text in zip(self._prompts, written, strict=True)]
        model = self._student.model
        sums, rows = torch.zeros(2, dtype=torch.float64), 0
        with evaluating(model):
            for host_batch in laid_out(examples, Layout(len(examples), self._batch_size, 0, packing=False)):
                batch = host_batch.to(model.device)
                head = self._student.at_rows(self._student.hidden(batch, batch.rows.student))
                target = self._teacher.targets(batch)
                assert head.hidden is not None and head.weight is not None
                for place, divergence in enumerate(("reverse_kl", "forward_kl")):
                    options: dict[str, Any] = {
                        "softcap": head.softcap,
                        "logit_scale": head.logit_scale,
                        "bias": head.bias,
                    }
                    out = fused_linear_kd(head.hidden, head.weight, target, divergence=divergence, **options)
                    sums[place] += out.kd.double().sum().cpu()
                rows += len(batch.rows)
        found = {f"on_policy_{name.removeprefix('rollout_')}": value for name, value in about(written).items()}
        return {"on_policy_reverse_kl": float(sums[0] / rows), "on_policy_forward_kl": float(sums[1] / rows), **found}
