"""Text written by students that are spread over ranks, beside the same student in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import tiny
from tiny_families import make_model
from tiny_runs import TinyRuns
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from potstill.config import DataConfig, EvalConfig, ParallelConfig, RolloutsConfig, SamplingConfig, SourceConfig
from potstill.data import Encoder
from potstill.data.dealing import Share
from potstill.evals.on_policy import OnPolicyEval
from potstill.models import LanguageModel
from potstill.objective.student_loss import StudentLoss
from potstill.parallel.agree import exchanged
from potstill.parallel.mesh import Ranks, ranks, world
from potstill.parallel.tensor import split_tensors
from potstill.rollouts.buffer import Buffer, Layout, load_saved
from potstill.rollouts.engine import EngineSetup, GenerationRequest, open_engine
from potstill.rollouts.prompt_batches import PromptBatches
from potstill.rollouts.prompts import Answers, Prompter
from potstill.rollouts.transformers import TransformersEngine
from potstill.rollouts.writing_ranks import WritingRanks
from potstill.teachers.live import live_teacher
from potstill.training.feed import open_feed
from potstill.training.metrics import Stopwatch
from potstill.training.run import Run
from potstill.training.setup import assemble
from potstill.training.step import optimizer_step
from potstill.types import PotstillError

CPU = torch.device("cpu")
NEW = 7
PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (3, 9, 1, 12, 6)]
SAMPLING = {"max_new_tokens": NEW, "temperature": 0.9, "top_p": 0.95}
Texts = list[tuple[list[int], list[float], str]]


def asked(seed: int = 0) -> list[GenerationRequest]:
    """Two texts of each prompt."""
    return [GenerationRequest(prompt, 100 * seed + i) for i, prompt in enumerate(PROMPTS * 2)]


def spread(student: LanguageModel, here: Ranks) -> StudentLoss:
    """A student's matrices and parameters over the ranks of a run."""
    root = StudentLoss(student)
    if here.tp.size > 1:
        assert here.mesh is not None
        split_tensors(student.model, here.mesh["tp"])
        student.group = here.tp.group
    if here.sums.size > 1:
        for layer in student.model.model.layers:
            fully_shard(layer, mesh=here.fsdp)
        fully_shard(root, mesh=here.fsdp)
    return root


def change(student: LanguageModel, seed: int) -> None:
    """Other weights, the same on every rank: as a step of training would leave them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in student.model.parameters():
            delta = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if isinstance(parameter, DTensor):
                delta = distribute_tensor(delta, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter += delta


def texts_of(written: Any) -> Texts:
    return [(text.ids.tolist(), text.logprobs.tolist(), text.end) for text in written]


def generations(family: str, keys: dict[str, int], copies: bool = True) -> list[Texts]:
    """Texts of three versions of the weights; of those before the last the engine is not told."""
    with world(ParallelConfig(**keys), CPU) as here:
        student = make_model(family)
        root = spread(student, here)
        stops = range(10, 30)
        engine = TransformersEngine(
            student,
            SamplingConfig(**SAMPLING),
            stop_ids=stops,
            copies=copies or here.many,
            team=WritingRanks(here.texts),
        )
        found = [texts_of(engine.generate(asked()))]
        change(student, 1)
        found.append(texts_of(engine.generate(asked(1))) if copies else [])
        change(student, 2)
        engine.update(2)
        assert engine.version == 2
        found.append(texts_of(engine.generate(asked(2))))
        engine.close()
        del root
    return found


def failing(keys: dict[str, int], known: bool) -> tuple[str, str]:
    """What each rank raises when one of them fails while it writes, and that they go on after that."""
    with world(ParallelConfig(**keys), CPU) as here:
        team = WritingRanks(here.texts)

        def write(some: Any) -> Any:
            if ranks().rank == 1:
                raise PotstillError("the disk is full") if known else ZeroDivisionError("by nothing")
            return [None] * len(some)

        try:
            team.written(write, asked(), NEW)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        assert len(team.written(lambda some: [None] * len(some), asked(), NEW)) == len(PROMPTS) * 2
        return said, str(len(team.told(None)))


def exact_tiny(seed: int = 0) -> LanguageModel:
    """With a tokenizer, and opinions."""
    model = tiny(seed, initializer_range=0.2)
    model.model.double()
    return model


def own_rows(step: Any) -> list[Any]:
    """What this rank trains on, pass by pass."""
    rows = [
        [
            (e.ids.tolist(), e.writer, e.version, None if e.behaviour is None else e.behaviour.tolist())
            for e in b.examples
        ]
        for b in step.batches
    ]
    return [
        step.counts | {"padding_tokens": 0},
        step.state | {"counts": None},
        step.facts.get("rollout_staleness"),
        rows,
    ]


def buffered(folder: str, keys: dict[str, int], mix: dict[str, Any], begin: int, steps: int) -> list[list[Any]]:
    """Steps of a run whose student and teacher write, from a checkpoint at `begin` to one at its end. The student changes in
    each."""
    path, saved = Path(folder), Path(folder) / f"step-{begin}"
    rollouts = RolloutsConfig(**{"sampling": SamplingConfig(max_new_tokens=5), **mix})
    source = SourceConfig(files=str(path / "prompts.jsonl"), prompt="q", completion="a")
    data = DataConfig(sources=[source], max_length=48, shuffle_buffer=8)
    with world(ParallelConfig(**keys), CPU) as here:
        student, teacher, team = exact_tiny(), exact_tiny(1), WritingRanks(here.texts)
        root = spread(student, here)
        for step in range(begin):
            change(student, step)
        encode = Encoder(student.tokenizer, max_length=48, append_eos=True)
        prompter = Prompter(student.tokenizer, most=40, prompt_tokens=8, kwargs={})
        state, counts = (None, None) if begin == 0 else json.loads((saved / "state.json").read_text())
        setups = {"student": EngineSetup(student, rollouts, (), 48, path, begin, team=team)}
        setups["teacher"] = EngineSetup(teacher, rollouts, (), 48, path, begin, student=False, team=team)
        size = 6
        buffer = Buffer(
            PromptBatches(
                data, rollouts, encode, {"student": prompter, "teacher": prompter}, student.tokenizer, seed=0, epochs=None,
                groups=size * rollouts.steps_per_generation // rollouts.num_generations,
                state=None if state is None else state["prompts"],
            ),
            {kind: open_engine("transformers", setup) for kind, setup in setups.items()},
            Answers(student, encode, {}),
            rollouts,
            Layout(size, Share(2, here.dp.index, here.dp.size), 0, packing=True),
            seed=0, version=begin, counts=counts, saved=load_saved(saved), taken=0 if state is None else state["taken"],
            team=team,
        )  # fmt: skip
        found = []
        for step in range(begin, begin + steps):
            taken = next(buffer)
            found.append(own_rows(taken))
            change(student, step)
            buffer.advance(step + 1)
        end = path / f"step-{begin + steps}"
        if here.first:
            end.mkdir()
            (end / "state.json").write_text(json.dumps((taken.state, taken.counts)))
        buffer.save(end, taken.state)
        buffer.close()
        del root
    return found


def evaluated(folder: str, keys: dict[str, int]) -> dict[str, Any]:
    """On own text: of a student that changed since the evaluation was made, twice."""
    path = Path(folder) / "held-out.jsonl"
    data = DataConfig(sources=[SourceConfig(files=str(path))], max_length=64)
    config = EvalConfig(data=data, on_policy_samples=5, batch_size=2)
    rollouts = RolloutsConfig(prompt_tokens=4, sampling=SamplingConfig(max_new_tokens=9))
    with world(ParallelConfig(**keys), CPU) as here:
        student, teacher = exact_tiny(), exact_tiny(1)
        root = spread(student, here)
        on_policy = OnPolicyEval(student, live_teacher(teacher, len(teacher.tokenizer), "t"), config, rollouts)
        change(student, 1)
        found = on_policy()
        assert found == on_policy() and (on_policy._engine._copy is None)
        del root
    return found


def by_vllm(folder: str, servers: list[str], keys: dict[str, int]) -> list[Texts]:
    """Texts of two versions of the weights that servers write, or, without any, the engine in the process."""
    engine = {"kind": "vllm", "server": servers, "folder": folder} if servers else {}
    rollouts = RolloutsConfig(on_policy_fraction=1.0, engine=engine, sampling=SamplingConfig(**SAMPLING))
    with world(ParallelConfig(**keys), CPU) as here:
        student = exact_tiny()
        root = spread(student, here)
        setup = EngineSetup(student, rollouts, range(10, 800), 48, Path(folder), 5, team=WritingRanks(here.texts))
        writer = open_engine(rollouts.engine.kind, setup)
        found = [texts_of(writer.generate(asked()))]
        change(student, 1)
        writer.update(6)
        assert writer.version == 6
        found.append(texts_of(writer.generate(asked(1))))
        writer.close()
        del root
    return found


def refused_vllm(keys: dict[str, int]) -> str:
    rollouts = RolloutsConfig(on_policy_fraction=1.0, engine={"kind": "vllm"})
    with world(ParallelConfig(**keys), CPU) as here:
        try:
            open_engine("vllm", EngineSetup(exact_tiny(), rollouts, (), 48, Path(), team=WritingRanks(here.texts)))
        except PotstillError as error:
            return str(error)
    return ""


def stepped(folder: str, keys: dict[str, int], steps: int) -> list[list[float]]:
    """The parts of a run whose student and teacher write ahead, put together as a run does: of each step its loss, gradient
    norm, tokens and how far its own text is from what it says of it now; then its evaluation."""
    path = Path(folder)
    runs = TinyRuns(path, path / "teacher", path / "held-out.jsonl")
    student = runs.recipe("x").student.model_dump(by_alias=True)
    student["config"]["attention_dropout"] = 0.0
    rollouts = {"on_policy_fraction": 0.6, "teacher_fraction": 0.2, "num_generations": 2, "prompt_tokens": 4}
    rollouts |= {"max_staleness": 1, "sampling": {"max_new_tokens": 8}}
    train = {"steps": steps, "batch_size": 6, "micro_batch_size": 2, "optimizer": {"lr": 1e-2}}
    sections = {"student": student, "rollouts": rollouts, "train": train}
    recipe = runs.recipe("run", **sections, eval=runs.evaluation(on_policy_samples=3))
    found = []
    with world(ParallelConfig(**keys), CPU, 6) as here:
        parts, run = assemble(recipe), Run(folder=path / "run", total_steps=steps)
        with open_feed(parts, run) as feed:
            for step in range(1, steps + 1):
                following = next(feed)
                own = sum(batch.supervised_tokens for batch in following.step.batches)
                tokens = exchanged(tokens=own * here.leader)["tokens"]
                metrics = optimizer_step(parts, following, tokens, run, Stopwatch())
                run.step = step
                feed.advance(step)
                found.append([metrics["loss"], metrics["grad_norm"], tokens, metrics.get("sampling_logprob_gap", 0.0)])
        scores = parts.evaluate()
        names = ("bits_per_byte", "kl", "on_policy_reverse_kl", "on_policy_forward_kl", "on_policy_length")
        found.append([scores[name] for name in names])
    return found
