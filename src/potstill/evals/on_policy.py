"""How far the student is from its teacher on what it writes itself: the mistakes that text of a data set never shows it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from potstill.cache.reading import chat_kwargs, examples_of
from potstill.config import EvalConfig, RolloutsConfig, SamplingConfig
from potstill.data import Encoder
from potstill.data.dealing import Share
from potstill.evals.drafting import accepted_drafts, said_drafts
from potstill.losses import fused_linear_kd
from potstill.models import LanguageModel, evaluating
from potstill.parallel.mesh import ranks, sum_over_ranks
from potstill.rollouts.buffer import Layout, about, laid_out
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.prompts import Answers, Prompt, Prompter, stop_ids
from potstill.rollouts.sampling import rollout_seed
from potstill.rollouts.transformers import TransformersEngine
from potstill.rollouts.writing_ranks import WritingRanks
from potstill.teachers.live import LiveModel
from potstill.teachers.teacher import Teacher
from potstill.transfer import exact
from potstill.types import Example, PotstillError


class OnPolicyEval:
    """The student on its answers to the beginnings of held-out text, drawn at temperature 1 with fixed seeds. With several
    ranks each has a whole copy of the student while it lasts: it writes some of the texts, and compares some."""

    def __init__(
        self, student: LanguageModel, teacher: Teacher[LiveModel], config: EvalConfig, rollouts: RolloutsConfig
    ) -> None:
        self._student, self._teacher, self._batch_size = student, teacher, config.batch_size
        self._draft_tokens = config.draft_tokens
        data, new = config.data, rollouts.sampling.longest
        if data.max_length <= new:
            raise PotstillError(
                f"eval.on_policy_samples: rollouts.sampling.max_new_tokens {new} leaves no room for a prompt in "
                f"eval.data.max_length {data.max_length}"
            )
        here, kwargs = ranks(), chat_kwargs(data)
        team = WritingRanks(here.control)
        prompter = Prompter(
            student.tokenizer, most=data.max_length - new, prompt_tokens=rollouts.prompt_tokens, kwargs=kwargs
        )
        found = (prompter(example) for example in examples_of(data, student.tokenizer, "eval.data"))
        self._prompts: list[Prompt] = []
        team.together(
            lambda: self._prompts.extend(islice((p for p in found if p is not None), config.on_policy_samples))
        )
        encode = Encoder(student.tokenizer, max_length=data.max_length, append_eos=True)
        self._answers = Answers(student, encode, kwargs)
        stops = stop_ids(student, any(source.messages for source in data.sources))
        sampling = SamplingConfig(max_new_tokens=new)
        self._engine = TransformersEngine(student, sampling, stop_ids=stops, copies=here.many, team=team)
        self._engine.release()
        self.notes = self._engine.notes

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        requests = [GenerationRequest(prompt.ids, rollout_seed(0, i, 0)) for i, prompt in enumerate(self._prompts)]
        self._engine.update(0)
        try:
            written = self._engine.generate(requests)
            examples = [
                self._answers.own(prompt, text, "student", None)
                for prompt, text in zip(self._prompts, written, strict=True)
            ]
            means = self._compared(self._engine.writer, examples)
        finally:
            self._engine.release()
        return means | {f"on_policy_{name.removeprefix('rollout_')}": value for name, value in about(written).items()}

    def _compared(self, writer: LanguageModel, examples: Sequence[Example]) -> dict[str, float]:
        here = ranks().dp
        layout = Layout(len(examples), Share(self._batch_size, here.index, here.size), 0, packing=False)
        names = ("reverse_kl", "forward_kl")
        sums = torch.zeros(len(names) + 1, dtype=torch.float64)  # … and rows
        drafts = torch.zeros(3, dtype=torch.float64)  # accepted tokens, tried ones, drafts
        with evaluating(writer.model):
            for host_batch in laid_out(examples, layout):
                batch = host_batch.to(writer.device)
                # Also where there is nothing to ask: a teacher that is spread over ranks is run by all of them at once.
                target, _ = self._teacher.answer(batch, self._teacher.prepare(batch))
                if not len(batch.rows):
                    continue
                assert target is not None
                own = writer.at_rows(writer.hidden(batch, batch.rows.student))
                for i, name in enumerate(names):
                    out = fused_linear_kd(own.hidden, target=target, divergence=name, **vars(own.head))
                    sums[i] += float(exact(out.kd).sum())
                sums[-1] += len(batch.rows)
                if self._draft_tokens:
                    drafts += accepted_drafts(own, target, batch, self._draft_tokens)
        # Ranks that share the parts of a sequence have each counted the same: in means that does not show.
        *totals, rows = sum_over_ranks(sums).tolist()
        means = {f"on_policy_{name}": total / rows for name, total in zip(names, totals, strict=True)}
        return means | (said_drafts(sum_over_ranks(drafts)) if self._draft_tokens else {})
