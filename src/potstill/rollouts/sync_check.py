"""Whether an engine with a copy of the student's weights has the ones that the student has now: both are asked how likely some
tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from potstill.config.rollouts import SamplingConfig
from potstill.models import LanguageModel, evaluating
from potstill.rollouts.engine import Completion, GenerationRequest
from potstill.rollouts.sampling import drawn_from
from potstill.types import PotstillError

EACH_OF_THE_FIRST = 3  # updates; after these, whenever their number has doubled
TEXTS, TOKENS = 4, 16
PROMPT = "The"
# Nats, on average over the tokens: what two implementations differ by in rounding, and weights of another step by far more.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
PLAIN = SamplingConfig()


class SyncCheck:
    """Compares after some of an engine's updates. `write` is the engine's, of texts that nothing but their length ends."""

    def __init__(
        self,
        student: LanguageModel,
        sampling: SamplingConfig,
        write: Callable[[Sequence[GenerationRequest], SamplingConfig], list[Completion]],
        dtype: torch.dtype,  # the engine's
        max_length: int,
        hint: str,  # what to look at when the weights did not arrive
    ):
        self.student, self.sampling, self.write, self.hint = student, sampling, write, hint
        self.dtype = max(dtype, student.model.dtype, key=lambda each: TOLERANCE[each])
        prompt = student.tokenizer(PROMPT)["input_ids"] or [0]
        self.prompt = np.array(prompt[: max(1, max_length // 2)], np.int32)
        self.tokens = min(TOKENS, max_length - len(self.prompt))
        self.updates = 0

    def after_update(self, version: int, before: int | None) -> None:
        """`before`: the step whose weights the engine had until now, where it had some of the student's."""
        self.updates += 1
        if self.updates > EACH_OF_THE_FIRST and self.updates & (self.updates - 1):
            return
        difference = float(self._differences(PLAIN).mean())
        tolerance = TOLERANCE[self.dtype]
        if not difference <= tolerance:  # also when it is no number
            older = "" if before is None else f", and may still write with those of step {before}"
            raise PotstillError(
                f"rollouts.engine: vLLM did not take the student's weights of step {version}{older}: the "
                "log-probabilities of "
                f"{TEXTS * self.tokens} tokens that it wrote differ from the student's by {difference:.2g} on average, and "
                f"rounding in {_name(self.dtype)} by less than {tolerance:g}. {self.hint}"
            )
        if self.updates == 1 and self.sampling.temperature > 0:
            # The median: a token at the edge of what top_p keeps may be on the other side of it here.
            difference = float(self._differences(self.sampling).median())
            if not difference <= tolerance:
                raise PotstillError(
                    "rollouts.engine: vLLM's log-probabilities are not those of the distribution that it draws from, after "
                    f"rollouts.sampling's temperature and truncation (they differ by {difference:.2g}): start it with "
                    "--logprobs-mode processed_logprobs"
                )

    def _differences(self, sampling: SamplingConfig) -> Tensor:
        """Absolute, of each token."""
        sampling = sampling.model_copy(update={"max_new_tokens": self.tokens, "stop": []})
        written = self.write([GenerationRequest(self.prompt, seed) for seed in range(TEXTS)], sampling)
        ids = torch.from_numpy(np.stack([np.concatenate([self.prompt, one.ids]) for one in written])).long()
        theirs = torch.from_numpy(np.stack([one.logprobs for one in written]))
        ours = chosen_logprobs(self.student, ids, len(self.prompt), sampling)
        return (ours.cpu() - theirs).abs().flatten()


@torch.no_grad()
def chosen_logprobs(student: LanguageModel, ids_BL: Tensor, begin: int, sampling: SamplingConfig) -> Tensor:
    """How likely the student draws each token from place `begin` on: [B, L − begin]."""
    ids_BL = ids_BL.to(student.model.device)
    with evaluating(student.model):
        logits = student.model(input_ids=ids_BL, use_cache=False).logits[:, begin - 1 : -1]
    logprobs = drawn_from(logits.flatten(0, 1), sampling).view(logits.shape)
    return logprobs.gather(-1, ids_BL[:, begin:, None]).squeeze(-1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
