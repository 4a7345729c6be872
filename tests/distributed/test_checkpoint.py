"""Checkpoints of students that are spread over ranks: what is written, and read on any other layout."""

from __future__ import annotations

import builtins
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from safetensors import safe_open
from sharded_students import in_world, optimizers_of, parameters, sharded, step
from transformers import AutoModelForCausalLM

from potstill.config import Recipe
from potstill.files import damage
from potstill.parallel.markers import Markers
from potstill.parallel.mesh import ranks
from potstill.parallel.weights import here as here_of
from potstill.parallel.weights import make_copies_equal, weights_of
from potstill.training import resume as resume_run
from potstill.training import state
from potstill.training.checkpoint import Checkpoints
from potstill.training.run import Run
from potstill.training.state import load_state
from potstill.types import PotstillError

STEPS, MORE = 2, 2


@dataclass
class Feed:
    """Of a run without written text."""

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        assert ranks().first


def parts_of(family: str, optimizer: str = "adamw", seed: int = 0) -> Any:
    module = sharded(family, seed)
    module.student.save_words = lambda folder: None  # type: ignore[method-assign]
    return SimpleNamespace(
        student=module.student, module=module, optimizers=optimizers_of(module, optimizer), recipe=None, averages=()
    )


def checkpoints_in(folder: Path) -> Checkpoints:
    made = Checkpoints(folder / "checkpoints", 2, lambda said: None)
    if ranks().first:
        made.prepare()
        (folder / ".owner").write_text("word")
    made.markers = Markers(folder, made.last_step, "word")
    return made


def save(folder: Path, family: str, optimizer: str, sizes: dict[str, int], background: bool = False) -> None:
    """Two steps, a checkpoint, and two more, whose outcome is kept beside it."""
    with in_world(**sizes):
        parts = parts_of(family, optimizer)
        for number in range(STEPS):
            step(parts.module, parts.optimizers, number)
        made = checkpoints_in(folder)
        made.begin(Run(folder, step=STEPS, total_steps=9, data={"at": 3}), parts, Feed(), background)
        for number in range(STEPS, STEPS + MORE):  # while it is written
            step(parts.module, parts.optimizers, number)
        assert made.finish() == made.at(STEPS)
        found = parameters(parts.module)
        if ranks().first:
            torch.save(found, folder / "expected.pt")


def resume(folder: Path, family: str, optimizer: str, sizes: dict[str, int]) -> float:
    """How far the two steps after the checkpoint end from those of the ranks that wrote it."""
    expected = torch.load(folder / "expected.pt")
    with no_pickles(), in_world(**sizes):
        parts = parts_of(family, optimizer, seed=5)
        path, progress = checkpoints_in(folder).newest()
        assert (progress.step, progress.total_steps, progress.data) == (STEPS, 9, {"at": 3})
        load_state(path, parts.module, parts.optimizers)
        for number in range(STEPS, STEPS + MORE):
            step(parts.module, parts.optimizers, number)
        found = parameters(parts.module)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


class no_pickles:
    """`torch.load` raises, and so does an unpickler that is given a file of the disk."""

    def __enter__(self) -> None:
        self.usual = torch.load, pickle.Unpickler, pickle.load, builtins.open

        def refused(*args: Any, **more: Any) -> None:
            raise AssertionError("a pickle is read from a file")

        class InMemory(pickle.Unpickler):
            def __init__(self, file: Any, **more: Any) -> None:
                assert not hasattr(file, "name"), "a pickle is read from a file"
                super().__init__(file, **more)

        torch.load, pickle.load, pickle.Unpickler = refused, refused, InMemory

    def __exit__(self, *error: object) -> None:
        torch.load, pickle.Unpickler, pickle.load, _ = self.usual


def exported(folder: Path, family: str) -> None:
    """The model loads as one that was saved whole, and every file is safetensors or JSON."""
    path = folder / "checkpoints" / "step-00000002"
    assert damage(path) is None
    loaded = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float64)
    module = sharded(family, seed=5)
    load_state(path, module, optimizers_of(module))
    for (name, mine), (_, its) in zip(module.model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(mine, its), name
    for file in (each for each in path.rglob("*") if each.is_file()):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt"):
                pass
        else:
            json.loads(file.read_text())


LAYOUTS = [(1, {}), (4, {}), (4, {"tp": 4}), (2, {"tp": 2})]


def everywhere(folder: Path, family: str, optimizer: str, layouts: list[tuple[int, dict[str, int]]]) -> None:
    for count, sizes in layouts:
        far = max(on_ranks(count, resume, folder, family, optimizer, sizes))
        assert far < (1e-12 if optimizer == "adamw" else 1e-6), (count, sizes, far)


def test_saved_on_dp_2_tp_2_and_resumed_on_any_layout(tmp_path: Path) -> None:
    on_ranks(4, save, tmp_path, "llama-tied", "adamw", {"tp": 2}, True)
    path = tmp_path / "checkpoints" / "step-00000002"
    assert len(list((path / "state").iterdir())) == 4 and len(list((path / "model").glob("*.safetensors"))) == 3
    exported(tmp_path, "llama-tied")
    everywhere(tmp_path, "llama-tied", "adamw", LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "optimizer", "sizes", "layouts"),
    [
        ("phi3", "adamw", {"tp": 2}, [(1, {}), (2, {"tp": 2}), (2, {})]),  # gate and up are packed, and each is cut
        ("qwen3", "muon", {"dp_replicate": 2}, [(1, {}), (2, {"tp": 2})]),
        (
            "qwen3-moe",
            "adamw",
            {"tp": 2, "ep": 4},
            [(1, {}), (4, {"ep": 2})],
        ),  # which transformers saves in other pieces
    ],
)
def test_families_and_optimizers_that_are_stored_otherwise(
    tmp_path: Path, family: str, optimizer: str, sizes: dict[str, int], layouts: Any
) -> None:
    on_ranks(4, save, tmp_path, family, optimizer, sizes)
    if optimizer == "adamw":
        exported(tmp_path, family)
    everywhere(tmp_path, family, optimizer, layouts)


def troubles(folder: Path) -> None:
    """Of two ranks: what goes wrong on one goes wrong on both, in the same words, and loses nothing."""
    with in_world():
        here, parts = ranks(), parts_of("llama-tied")
        step(parts.module, parts.optimizers, 0)
        made, said = checkpoints_in(folder), []
        made.warn = said.append
        made.begin(Run(folder, step=1, total_steps=9), parts, Feed())
        assert made.finish() == made.at(1) and made.done() and made.finish() is None
        usual = state.save_file
        if here.rank == 1:  # the disk of the second
            state.save_file = full_disk
        made.begin(Run(folder, step=2, total_steps=9), parts, Feed(), background=True)
        with pytest.raises(PotstillError, match=r"could not write .*step-00000002: No space left on device; what was"):
            made.finish()
        state.save_file = usual
        made.markers.check_owner()
        dist.barrier()
        assert sorted(path.name for path in made.folder.iterdir()) == ["latest", "step-00000001"]
        dist.barrier()
        if here.first:
            (folder / ".owner").write_text("another")
        made.begin(Run(folder, step=3, total_steps=9), parts, Feed(), background=True)
        with pytest.raises(PotstillError, match=r"another process has taken over .*: nothing was saved"):
            made.finish()
        if here.first:
            (folder / ".owner").write_text("word")
        dist.barrier()
        made.begin(Run(folder, step=4, total_steps=9), parts, Feed())
        made.finish()
        if here.first:  # of which the second rank wrote it, and either may look at it
            path = next((made.at(4) / "state").glob("00001-*"))
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        dist.barrier()
        found, progress = made.newest()
        assert progress.step == 1 and found == made.at(1)
        assert (made.folder / "damaged-step-00000004").exists() and not made.at(4).exists()
        assert "state/00001-0.safetensors is not what was written" in said[-1 - here.first]


def full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_of_one_rank_is_that_of_all(tmp_path: Path) -> None:
    on_ranks(2, troubles, tmp_path)


def drifted(folder: Path) -> None:
    with in_world(tp=2):
        parts = parts_of("llama-tied")
        step(parts.module, parts.optimizers, 0)
        norm, head = parts.module.model.model.norm.weight, here_of(parts.module.model.lm_head.weight)
        before, slices = norm.detach().clone(), head.clone()
        if ranks().rank == 1:
            norm.data.mul_(1.0 + 1e-9)
        make_copies_equal(weights_of(parts.module).values())
        assert torch.equal(norm, before) and torch.equal(head, slices)


def test_copies_of_tp_ranks_that_drifted_apart_are_made_equal(tmp_path: Path) -> None:
    on_ranks(2, drifted, tmp_path)


def unshared(folder: Path) -> str:
    """The second rank has another folder under the name of the first one's."""
    with in_world():
        recipe = Recipe(student={"model": "s"}, data={"sources": [{"files": "f"}]}, train={"steps": 1}, run=str(folder))
        _, checkpoints = resume_run.open_run(recipe, print)
        assert checkpoints.markers.ours()
        if ranks().rank == 1:
            recipe = recipe.model_copy(update={"run": str(folder / "other")})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resume_run, "SHARED_SECONDS", 0.3)
            try:
                resume_run.open_run(recipe, print)
            except PotstillError as error:
                return str(error)
    return ""


def test_a_folder_that_hosts_do_not_share_is_told_by_all(tmp_path: Path) -> None:
    said = on_ranks(2, unshared, tmp_path)
    assert said[0] == said[1]
    assert "run: rank 1 on " in said[0] and "choose a folder on a file system that all hosts share" in said[0]
