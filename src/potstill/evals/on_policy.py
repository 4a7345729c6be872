"""How far the student is from its teacher on what it writes itself: the mistakes that text of a data set never shows it."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from potstill.cache.reading import chat_kwargs, examples_of
from potstill.config import EvalConfig, RolloutsConfig, SamplingConfig
from potstill.data import Encoder
from potstill.losses import fused_linear_kd
from potstill.models import LanguageModel, evaluating
from potstill.rollouts.buffer import Layout, about, laid_out
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.prompts import Answers, Prompter, stop_ids
from potstill.rollouts.sampling import rollout_seed
from potstill.rollouts.transformers import TransformersEngine
from potstill.teachers.live import LiveModel
from potstill.teachers.teacher import Teacher
from potstill.types import PotstillError


class OnPolicyEval:
    """The student on its answers to the beginnings of held-out text, drawn at temperature 1 with fixed seeds."""

    def __init__(
        self, student: LanguageModel, teacher: Teacher[LiveModel], config: EvalConfig, rollouts: RolloutsConfig
    ) -> None:
        self._student, self._teacher, self._batch_size = student, teacher, config.batch_size
        data, new = config.data, rollouts.sampling.max_new_tokens
        if data.max_length <= new:
            raise PotstillError(
                f"eval.on_policy_samples: rollouts.sampling.max_new_tokens {new} leaves no room for a prompt in "
                f"eval.data.max_length {data.max_length}"
            )
        kwargs = chat_kwargs(data)
        prompter = Prompter(
            student.tokenizer, most=data.max_length - new, prompt_tokens=rollouts.prompt_tokens, kwargs=kwargs
        )
        found = (prompter(example) for example in examples_of(data, student.tokenizer, "eval.data"))
        self._prompts = list(islice((prompt for prompt in found if prompt is not None), config.on_policy_samples))
        encode = Encoder(student.tokenizer, max_length=data.max_length, append_eos=True)
        self._answers = Answers(student, encode, kwargs)
        stops = stop_ids(student, any(source.messages for source in data.sources))
        self._engine = TransformersEngine(student, SamplingConfig(max_new_tokens=new), stop_ids=stops)
        self.notes = self._engine.notes

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        requests = [GenerationRequest(prompt.ids, rollout_seed(0, i, 0)) for i, prompt in enumerate(self._prompts)]
        written = self._engine.generate(requests)
        examples = [self._answers.own(p, text, "student", None) for p, text in zip(self._prompts, written, strict=True)]
        model = self._student.model
        sums, rows = dict.fromkeys(("reverse_kl", "forward_kl"), 0.0), 0
        with evaluating(model):
            for host_batch in laid_out(examples, Layout(len(examples), self._batch_size, 0, packing=False)):
                batch = host_batch.to(model.device)
                own = self._student.at_rows(self._student.hidden(batch, batch.rows.student))
                target = self._teacher.targets(batch)
                for name in sums:
                    out = fused_linear_kd(own.hidden, target=target, divergence=name, **vars(own.head))
                    sums[name] += float(out.kd.double().sum())
                rows += len(batch.rows)
        means = {f"on_policy_{name}": total / rows for name, total in sums.items()}
        return means | {f"on_policy_{name.removeprefix('rollout_')}": value for name, value in about(written).items()}
