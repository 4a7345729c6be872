"""vLLM as the engine: a copy of the student, in this process or behind a server, that takes its weights and is checked to have
them. docs/vllm.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from potstill.config.rollouts import RolloutsConfig, SamplingConfig
from potstill.models import LanguageModel, evaluating
from potstill.models.whole_copy import take_weights, whole_copy
from potstill.rollouts.engine import Completion, Engine, EngineSetup, GenerationRequest, asked_tokens
from potstill.rollouts.sampling import drawn_from
from potstill.rollouts.vllm_process import VLLMProcess
from potstill.rollouts.vllm_requests import check_sampling
from potstill.rollouts.vllm_server import PATIENCE, VLLMServer
from potstill.rollouts.writing_ranks import ALONE, WritingRanks
from potstill.types import PotstillError

RESTARTS = 5  # of a server, that one generation may see
EACH_OF_THE_FIRST = 3  # updates that are checked; after these, whenever their number has doubled
TEXTS, TOKENS, PROMPT = 4, 16, "The"  # of the check
# Nats, on average over the tokens: what two implementations differ by in rounding, and weights of another step by far more.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def open_engine(setup: EngineSetup) -> Engine:
    return open_vllm(
        setup.model,
        setup.rollouts,
        stop_ids=setup.stop_ids,
        max_length=setup.max_length,
        folder=setup.folder / "vllm",
        version=setup.version,
        team=setup.team,
    )


def open_vllm(
    student: LanguageModel,
    rollouts: RolloutsConfig,
    *,
    stop_ids: Sequence[int],  # the ids that end a text, and no others do
    max_length: int,  # longest prompt and text together: data.max_length
    folder: Path,  # in the run's folder, for what vLLM reads
    version: int = 0,  # optimizer steps that the student has taken
    retry_timeout: float = PATIENCE,
    team: WritingRanks = ALONE,
) -> Engine:
    """The engine that the recipe asks for, with the student's present weights, compared."""
    check_sampling(rollouts.sampling)
    copy: VLLMProcess | VLLMServer
    if not rollouts.engine.servers:
        copy = VLLMProcess(student, rollouts.engine.options, max_length, folder, team)
    else:
        folder = Path(rollouts.engine.folder or folder)
        copy = VLLMServer(student, rollouts, max_length, folder, retry_timeout, team)
    return VLLMEngine(copy, student, rollouts.sampling, stop_ids, max_length, version, team=team)


@dataclass
class VLLMEngine:
    """An `Engine`. After some of its updates both models are asked how likely some tokens are."""

    copy: VLLMProcess | VLLMServer
    student: LanguageModel
    sampling: SamplingConfig
    stop_ids: Sequence[int]
    max_length: int
    version: int
    notes: Sequence[str] = ()
    team: WritingRanks = ALONE

    def __post_init__(self) -> None:
        self._updates = 0
        try:
            self._take(self.version, None)
        except BaseException:
            self.close()
            raise

    def generate(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        longest, most = max((len(a.ids) for a in asked), default=0), max(asked_tokens(asked, self.sampling), default=1)
        if longest + most > self.max_length:
            raise PotstillError(
                f"a prompt of {longest} tokens and rollouts.sampling.max_new_tokens {most} are more than data.max_length "
                f"{self.max_length}"
            )
        for _ in range(RESTARTS):
            before = self.copy.failures
            texts = self.team.written(self._write, asked, most)
            if not any(self.team.told(self.copy.failures > before)):
                return texts
            # It may have ended and begun again, with the weights it begins with: what it wrote, for this rank or for another,
            # is not the student's.
            self.copy.load_again()
        raise PotstillError("rollouts.engine: the connection to vLLM breaks again and again while it writes")

    def _write(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        return self.copy.write(asked, self.sampling, self.stop_ids)

    def update(self, version: int) -> None:
        self._take(version, self.version)

    def _take(self, version: int, before: int | None) -> None:
        """`before`: the step whose weights vLLM had until now, if they were the student's."""
        self.copy.load(version)
        self.version = version
        self._updates += 1
        if self._updates > EACH_OF_THE_FIRST and self._updates & (self._updates - 1):
            return
        judges = [self.student]
        if self.team.size > 1:  # a student that is spread over ranks can be run by all of them only
            judges.clear()
            self.team.together(lambda: judges.append(whole_copy(self.student)) if self.copy.tends else None)
            take_weights(judges[0] if judges else None, self.student)
        self.team.together(lambda: self._compare(judges[0], version, before) if judges else None)

    def _compare(self, judge: LanguageModel, version: int, before: int | None) -> None:
        dtypes = {judge.model.dtype, self.copy.dtype} & set(TOLERANCE) or {torch.bfloat16}
        dtype = max(dtypes, key=lambda each: TOLERANCE[each])
        differences = self._differences(judge, SamplingConfig())
        if not float(differences.mean()) <= TOLERANCE[dtype]:  # also when it is NaN
            older = "" if before is None else f", and may still write with those of step {before}"
            raise PotstillError(
                f"rollouts.engine: vLLM did not take the student's weights of step {version}{older}: the log-probabilities "
                f"of {differences.numel()} tokens that it wrote differ from the student's by {float(differences.mean()):.2g} "
                f"on average, and rounding in {str(dtype).removeprefix('torch.')} by less than {TOLERANCE[dtype]:g}. "
                f"{self.copy.hint}"
            )
        if self._updates == 1 and self.sampling.temperature > 0:
            # The median: a token at the edge of what top_p keeps may be on the other side of it here.
            median = float(self._differences(judge, self.sampling).median())
            if not median <= TOLERANCE[dtype]:
                raise PotstillError(
                    "rollouts.engine: vLLM's log-probabilities are not those of the distribution that it draws from, after "
                    f"rollouts.sampling's temperature and truncation (they differ by {median:.2g}): start it with "
                    "--logprobs-mode processed_logprobs"
                )

    @torch.no_grad()
    def _differences(self, judge: LanguageModel, sampling: SamplingConfig) -> Tensor:
        """Between the two models' log-probabilities of tokens that vLLM draws, absolute, one per token."""
        prompt = np.array((judge.tokenizer(PROMPT)["input_ids"] or [0])[: max(1, self.max_length // 2)], np.int32)
        tokens = min(TOKENS, self.max_length - len(prompt))
        sampling = sampling.model_copy(update={"max_new_tokens": tokens, "stop": []})
        texts = self.copy.write([GenerationRequest(prompt, seed) for seed in range(TEXTS)], sampling, ())
        ids_BL = torch.from_numpy(np.stack([np.concatenate([prompt, text.ids]) for text in texts])).long()
        ids_BL = ids_BL.to(judge.device)
        with evaluating(judge.model):
            logits = judge.model(input_ids=ids_BL, use_cache=False).logits[:, len(prompt) - 1 : -1]
        logprobs = drawn_from(logits.flatten(0, 1), sampling).view(logits.shape)
        ours = logprobs.gather(-1, ids_BL[:, len(prompt) :, None]).squeeze(-1)
        return (ours.cpu() - torch.from_numpy(np.stack([text.logprobs for text in texts]))).abs().flatten()

    def close(self) -> None:
        self.copy.close()
