"""vLLM in this process: a copy of the student that takes its tensors without a way over the disk. docs/vllm.md."""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from potstill.config.rollouts import RolloutsConfig, SamplingConfig
from potstill.models import LanguageModel
from potstill.models.libraries import reason
from potstill.rollouts.engine import Completion, Engine, GenerationRequest
from potstill.rollouts.sync_check import SyncCheck
from potstill.rollouts.vllm_requests import check_lengths, check_sampling, request, written
from potstill.rollouts.vllm_server import Server
from potstill.rollouts.vllm_weights import describe, named_weights
from potstill.types import PotstillError

KV_CACHE_BYTES = 2**30  # on CPUs, where vLLM would otherwise take most of the memory
GPU_MEMORY = 0.3  # of it, for vLLM's weights and cache; the training has the rest


def open_vllm(
    student: LanguageModel,
    rollouts: RolloutsConfig,
    *,
    stop_ids: Sequence[int],  # the ids that end a text, and no others do
    max_length: int,  # longest prompt and text together: data.max_length
    folder: Path,  # in the run's folder, for what vLLM reads
    version: int = 0,  # optimizer steps that the student has taken
) -> Engine:
    """The engine that the recipe asks for, with the student's present weights, compared."""
    check_sampling(rollouts.sampling)
    if rollouts.engine.server is None:
        return Colocated(student, rollouts, stop_ids, max_length, folder, version)
    if rollouts.engine.folder is not None:
        folder = Path(rollouts.engine.folder)
    return Server(student, rollouts, stop_ids, max_length, folder, version)


class Colocated:
    """An `Engine`; vLLM's own engine runs in this process, so that tensors are handed over as they are."""

    def __init__(
        self,
        student: LanguageModel,
        rollouts: RolloutsConfig,
        stop_ids: Sequence[int],
        max_length: int,
        folder: Path,
        version: int,
    ):
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise PotstillError(
                "rollouts.engine: vLLM in the training's process goes with one process: with several, start a server "
                "and give "
                "rollouts.engine.server"
            )
        self.student, self.sampling, self.stop_ids, self.max_length = student, rollouts.sampling, stop_ids, max_length
        self.version: int = version
        self._own_group = not dist.is_initialized()  # vLLM makes one; potstill's own stays
        options = self._options(rollouts.engine.options, folder)
        Console(stderr=True, soft_wrap=True).print("starting vLLM in this process …", highlight=False)
        with _quiet():
            vllm = _import_vllm()
        self._params = vllm.SamplingParams
        describe(student, folder)
        with _apart(self.student.model.device), _quiet():
            try:
                self._llm = vllm.LLM(**options)
            except Exception as error:  # of vLLM and of everything it stands on
                raise PotstillError(
                    f"rollouts.engine: vLLM cannot run the student ({reason(error)}); its own messages are above with "
                    "VLLM_LOGGING_LEVEL=INFO"
                ) from error
        self._check = SyncCheck(
            student,
            rollouts.sampling,
            lambda asked, sampling: self._write(asked, sampling, ()),
            self._llm.llm_engine.model_config.dtype,
            max_length,
            f"This vLLM cannot take over a {student.model.config.model_type} in place: use rollouts.engine.kind "
            "transformers.",
        )
        try:
            self._take(version, None)
        except BaseException:
            self.close()
            raise

    def _options(self, given: dict[str, Any], folder: Path) -> dict[str, Any]:
        kind = self.student.model.device.type
        options: dict[str, Any] = {
            "dtype": str(self.student.model.dtype).removeprefix("torch."),
            "max_model_len": self.max_length,
            "enable_prefix_caching": True,  # the answers to one prompt share its work
            "seed": 0,  # every request has its own
            "disable_log_stats": True,
        }
        if kind == "cpu":
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": KV_CACHE_BYTES}
        else:
            options["gpu_memory_utilization"] = GPU_MEMORY
        ours = {
            "model": str(folder),
            "load_format": "dummy",  # the weights come with the first update
            "generation_config": "vllm",  # nothing but the recipe says how to sample
            "logprobs_mode": "processed_logprobs",
        }
        for key in ours:
            if key in given:
                raise PotstillError(f"rollouts.engine.options.{key} is potstill's to set: leave it out")
        return options | given | ours

    def generate(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        check_lengths(asked, self.sampling, self.max_length)
        return self._write(asked, self.sampling, self.stop_ids)

    def _write(
        self, asked: Sequence[GenerationRequest], sampling: SamplingConfig, stop_ids: Sequence[int]
    ) -> list[Completion]:
        if not asked:
            return []
        params = [
            self._params(**request(sampling, stop_ids, ask.seed), detokenize=bool(sampling.stop)) for ask in asked
        ]
        prompts = [{"prompt_token_ids": ask.ids.tolist()} for ask in asked]
        with _apart(self.student.model.device):
            answers = self._llm.generate(prompts, params, use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        return [
            written(
                one.token_ids,
                [place[token].logprob for place, token in zip(one.logprobs, one.token_ids, strict=True)],
                one.finish_reason,
                sampling,
                stop_ids,
            )
            for one in outputs
        ]

    def update(self, version: int) -> None:
        self._take(version, self.version)

    def _take(self, version: int, before: int | None) -> None:
        weights = named_weights(self.student)
        with _apart(self.student.model.device):
            try:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            except Exception as error:  # the code of each architecture, which may raise anything
                raise PotstillError(
                    f"rollouts.engine: vLLM cannot take the student's weights of step {version} ({reason(error)})"
                ) from error
            if not self._llm.reset_prefix_cache():
                raise PotstillError("rollouts.engine: vLLM did not forget its prefix cache, which is of older weights")
        self.version = version
        self._check.after_update(version, before)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        if self._own_group:
            cleanup_dist_env_and_memory()


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
def _quiet() -> Iterator[None]:
    """Without what the libraries under vLLM warn each other of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


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
