"""vLLM in this process: a copy of the student that takes its tensors without a way over the disk. Of several ranks each has
one, whole, that writes its share."""

from __future__ import annotations

import copy
import os
import random
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from potstill.config.rollouts import SamplingConfig
from potstill.files import could_not_write
from potstill.models import LanguageModel
from potstill.models.libraries import reason
from potstill.rollouts.engine import Completion, GenerationRequest, asked_tokens
from potstill.rollouts.vllm_requests import completion, request
from potstill.rollouts.vllm_weights import named_weights
from potstill.rollouts.writing_ranks import ALONE, WritingRanks
from potstill.types import PotstillError

KV_CACHE_BYTES = 2**30  # on CPUs, where vLLM would otherwise take most of the memory
GPU_MEMORY = 0.3  # of it, for vLLM's weights and cache; the training has the rest


class VLLMProcess:
    """vLLM's own engine runs in this process, so that tensors are handed over as they are."""

    failures = 0  # requests that failed and were sent again
    tends = True

    def __init__(
        self,
        student: LanguageModel,
        options: Mapping[str, Any],
        max_length: int,
        folder: Path,
        team: WritingRanks = ALONE,
    ) -> None:
        self._student = student
        self._own_group = not dist.is_initialized()  # vLLM makes one; potstill's own stays
        keys = _keys(student, options, max_length, folder, team.size > 1)
        if team.first:
            Console(stderr=True, soft_wrap=True).print("starting vLLM in this process …", highlight=False)
        with warnings.catch_warnings():  # of the libraries under vLLM, to each other
            for category in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            team.together(lambda: _ready(student, folder, team.first))
            vllm = _import_vllm()
            with _apart(student.model.device):
                try:
                    self.llm = vllm.LLM(**keys)
                except Exception as error:  # of vLLM and of everything it stands on
                    raise PotstillError(
                        f"rollouts.engine: vLLM cannot run the student ({reason(error)}); its own messages are above with "
                        "VLLM_LOGGING_LEVEL=INFO"
                    ) from error
        self._params = vllm.SamplingParams
        self.dtype: torch.dtype | None = self.llm.llm_engine.model_config.dtype
        kind = student.model.config.model_type
        # What to look at if the weights did not arrive
        self.hint = f"This vLLM cannot take over a {kind} in place: use rollouts.engine.kind transformers."

    def write(
        self, asked: Sequence[GenerationRequest], sampling: SamplingConfig, stop_ids: Sequence[int]
    ) -> list[Completion]:
        if not asked:
            return []
        text = bool(sampling.stop)
        params = [
            self._params(**request(sampling, stop_ids, ask.seed, most), detokenize=text)
            for ask, most in zip(asked, asked_tokens(asked, sampling), strict=True)
        ]
        prompts = [{"prompt_token_ids": ask.ids.tolist()} for ask in asked]
        with _apart(self._student.model.device):
            outputs = [one.outputs[0] for one in self.llm.generate(prompts, params, use_tqdm=False)]
        return [
            completion(
                one.token_ids,
                [place[token].logprob for place, token in zip(one.logprobs, one.token_ids, strict=True)],
                one.finish_reason,
                sampling,
                stop_ids,
            )
            for one in outputs
        ]

    def load(self, version: int) -> None:
        weights = named_weights(self._student)
        with _apart(self._student.model.device):
            try:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            except Exception as error:  # the code of each architecture, which may raise anything
                raise PotstillError(
                    f"rollouts.engine: vLLM cannot take the student's weights of step {version} ({reason(error)})"
                ) from error
            finally:
                for _ in weights:  # also where they could not be taken: the other ranks would wait
                    pass
            if not self.llm.reset_prefix_cache():
                raise PotstillError("rollouts.engine: vLLM did not forget its prefix cache, which is of older weights")

    def load_again(self) -> None:
        """It ends with this process."""

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        with nullcontext() if self._own_group else _keeping_groups():
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
        if self._own_group:
            cleanup_dist_env_and_memory()


@contextmanager
def _keeping_groups() -> Iterator[None]:
    """vLLM destroys every group of the process when it ends, also those that it did not make."""
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def _keys(
    student: LanguageModel, given: Mapping[str, Any], max_length: int, folder: Path, many: bool
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": str(student.model.dtype).removeprefix("torch."),
        "max_model_len": max_length,
        "enable_prefix_caching": True,  # the answers to one prompt share its work
        "seed": 0,  # every request has its own
        "disable_log_stats": True,
    }
    if student.model.device.type == "cpu":
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": KV_CACHE_BYTES}
    else:
        options["gpu_memory_utilization"] = GPU_MEMORY
    ours: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",  # the weights come with the first update
        "generation_config": "vllm",  # nothing but the recipe says how to sample
        "logprobs_mode": "processed_logprobs",
    }
    if many:  # the only executor that leaves the groups of the process as they are
        ours |= {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 1}
    for key in ours:
        if key in given:
            raise PotstillError(f"rollouts.engine.options.{key} is potstill's to set: leave it out")
    return {**options, **given, **ours}


def _describe(student: LanguageModel, folder: Path) -> None:
    """Everything but the weights: what vLLM builds the model from."""
    config = copy.deepcopy(student.model.config)
    config.architectures = [type(student.model).__name__]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        student.save_words(folder)
    except OSError as error:
        raise could_not_write(folder, error) from error


def _ready(student: LanguageModel, folder: Path, first: bool) -> None:
    """Before the ranks begin to wait for each other in vLLM: it is there, and what it reads."""
    _import_vllm()
    if first:
        _describe(student, folder)


def _import_vllm() -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError as error:
        raise PotstillError(
            f"rollouts.engine.kind vllm: vLLM cannot be imported ({reason(error)}). On a Linux machine without a GPU, "
            "tools/setup_vllm makes an environment with it; elsewhere: pip install vllm"
        ) from error
    return vllm


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """vLLM seeds the process's random numbers, draws from them, and takes torch.set_num_threads away. On another thread the
    numbers are left alone: putting them back would undo the training's own draws."""
    threads = torch.set_num_threads
    try:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        python, array = random.getstate(), np.random.get_state()
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(array)
    finally:
        torch.set_num_threads = threads
