"""A teacher behind an OpenAI-compatible server that writes: sequence-level distillation without its model in the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from potstill.config import SamplingConfig
from potstill.config.compatibility import Combination, check
from potstill.rollouts.engine import Completion, GenerationRequest, asked_tokens
from potstill.rollouts.vllm_requests import check_sampling, completion, read_text, request
from potstill.rollouts.writing_ranks import ALONE, WritingRanks
from potstill.serving.openai import OpenAIServer
from potstill.teachers.remote import RemoteOrigin


class RemoteWriter:
    """An `Engine` whose weights are the teacher's own and never change."""

    version = 0
    notes: Sequence[str] = ()

    def __init__(
        self, origin: RemoteOrigin, sampling: SamplingConfig, stop_ids: Sequence[int], team: WritingRanks = ALONE
    ) -> None:
        check(Combination(server=origin.server.api, writes=True), "teachers[0]")
        assert isinstance(origin.server, OpenAIServer)
        check_sampling(sampling)
        self._server, self._sampling, self._stop_ids = origin.server, sampling, stop_ids
        self._team = team

    def generate(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        return self._team.written(self._write, asked, max(asked_tokens(asked, self._sampling), default=1))

    def _write(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        return self._server.connection.each(self._one, asked)

    def _one(self, ask: GenerationRequest) -> Completion:
        # Its model may have eos ids that its tokenizer does not name.
        (most,) = asked_tokens([ask], self._sampling)
        keys = request(self._sampling, self._stop_ids, ask.seed, most) | {"return_token_ids": True, "ignore_eos": False}
        choice = self._server.completion(ask.ids.tolist(), keys)
        try:
            ids, logprobs = read_text(choice, most)
        except ValueError as error:
            raise self._server.connection.error(str(error)) from error
        text = completion(ids, logprobs, choice.get("finish_reason"), self._sampling, self._stop_ids)
        own_eos = text.end == "stop" and choice.get("stop_reason") is None  # else: which stop id or text it was
        return replace(text, end="eos") if own_eos else text

    def update(self, version: int) -> None:
        """A teacher does not learn."""

    def close(self) -> None:
        """The connection is the teacher's."""
