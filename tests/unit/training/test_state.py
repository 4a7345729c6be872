"""The tensors of a checkpoint: what is written, what is read back, what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from planted import Planted
from safetensors import safe_open
from tiny_families import make_model
from torch import nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

from potstill.config import OptimizerConfig
from potstill.objective.student_loss import StudentLoss
from potstill.parallel.weights import weights_of
from potstill.training import state
from potstill.training.optimizer import make_optimizers
from potstill.training.state import load_state, seed_step, take_snapshot, write_index
from potstill.types import PotstillError


class Experts(nn.Module):
    """Of which a batch goes through some only; the last is never used. `twin` has the first one's weights."""

    config, _weight_conversions, _keys_to_ignore_on_save = None, (), None  # as transformers' models have them

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, 2)
        self.twin = nn.Linear(width, width)
        self.twin.weight = self.experts[0].weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        self.seen += 1
        return self.head(self.experts[expert](x).tanh()).square().mean()


class Holder(nn.Module):
    """As StudentLoss is one: the model is its attribute `model`."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.model = Experts(width)


def made(name: str, seed: int, width: int = 6) -> tuple[Holder, list[Optimizer]]:
    torch.manual_seed(seed)
    module = Holder(width)
    return module, make_optimizers(module.model, module.model.head, OptimizerConfig(name=name, lr=0.1, muon_lr=0.1))


def step(module: Holder, optimizers: list[Optimizer], expert: int) -> None:
    module.model(torch.randn(5, 6), expert).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: Path, module: nn.Module, optimizers: list[Optimizer]) -> Path:
    for name in ("model", "state"):
        (folder / name).mkdir(parents=True)
    written = take_snapshot(module.model, module, optimizers).write(folder)
    write_index(folder, written.weights)
    assert sorted(written.files) == sorted(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors"))
    return folder


def names(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_parameter_may_have_its_first_gradient_after_the_checkpoint(tmp_path: Path, optimizer: str) -> None:
    """The second expert is first used after it, the third never: neither has optimizer state when it is saved."""
    module, optimizers = made(optimizer, 0)
    for _ in range(3):
        step(module, optimizers, 0)
    checkpoint = saved(tmp_path / "c", module, optimizers)
    torch.manual_seed(5)
    for _ in range(2):
        step(module, optimizers, 1)
    again, its_optimizers = made(optimizer, 1)
    load_state(checkpoint, again, its_optimizers)
    torch.manual_seed(5)
    for _ in range(2):
        step(again, its_optimizers, 1)
    for (name, mine), (_, expected) in zip(again.state_dict().items(), module.state_dict().items(), strict=True):
        assert torch.equal(mine, expected), name
    assert again.model.seen == 5
    untouched = again.model.experts[2].weight
    assert not any(untouched in o.state for o in its_optimizers)


def test_weights_are_stored_once(tmp_path: Path) -> None:
    """What model/ holds bit for bit is not in state/; what it holds in other pieces, or not at all, is. A shared weight has one
    name."""
    student = make_model("mixtral", tie_word_embeddings=True)
    student.model._keys_to_ignore_on_save = {"model.norm.weight"}
    module = StudentLoss(student)
    checkpoint = saved(tmp_path / "c", module, [])
    experts = {f"model.model.layers.{i}.mlp.experts.{part}_proj" for i in (0, 1) for part in ("gate_up", "down")}
    assert experts | {"model.model.norm.weight"} <= names(checkpoint / "state")
    every = set(weights_of(module)) - names(checkpoint / "state")
    assert {name.removeprefix("model.") for name in every} < names(checkpoint / "model")
    again = StudentLoss(make_model("mixtral", seed=1, tie_word_embeddings=True))
    load_state(checkpoint, again, [])
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight


def test_a_large_model_has_several_files_which_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FILE_BYTES", 30_000)
    module = StudentLoss(make_model("llama"))
    optimizers = make_optimizers(module.model, module.model.lm_head, OptimizerConfig())
    checkpoint = saved(tmp_path / "c", module, optimizers)
    files = sorted(path.name for path in (checkpoint / "model").glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    module.model.config.save_pretrained(checkpoint / "model")
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint / "model", dtype=torch.float64).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in module.model.state_dict().items())
    again = StudentLoss(make_model("llama", seed=1))
    load_state(checkpoint, again, [])
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))


def test_a_copy_does_not_show_later_steps(tmp_path: Path) -> None:
    module, optimizers = made("adamw", 0)
    step(module, optimizers, 0)
    before = {name: tensor.clone() for name, tensor in weights_of(module).items()}
    mean = optimizers[0].state[module.model.head.weight]["exp_avg"].clone()
    snapshot = take_snapshot(module.model, module, optimizers, copy=True)
    step(module, optimizers, 0)
    for name in ("model", "state"):
        (tmp_path / "c" / name).mkdir(parents=True)
    snapshot.write(tmp_path / "c")
    again, its_optimizers = made("adamw", 1)
    load_state(tmp_path / "c", again, its_optimizers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(again).items())
    assert not torch.equal(again.model.head.weight, module.model.head.weight)
    assert torch.equal(its_optimizers[0].state[again.model.head.weight]["exp_avg"], mean)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    module, optimizers = made("adamw", 0)
    step(module, optimizers, 0)
    checkpoint = saved(tmp_path / "c", module, optimizers)

    def refused(name: str, width: int, words: str) -> None:
        other, its_optimizers = made(name, 1, width)
        before = {key: value.clone() for key, value in other.state_dict().items()}
        with pytest.raises(
            PotstillError, match=f"does not fit this recipe's student and optimizer \\({words}\\): choose"
        ):
            load_state(checkpoint, other, its_optimizers)
        assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())

    refused("adamw", 7, r"model\.experts\.0\.weight is \[6, 6\] there and \[7, 7\] here")
    refused("muon", 6, r"adamw\.model\.experts\.0\.weight\.exp_avg has no place here")
    more, its_optimizers = made("adamw", 1)
    more.model.extra = nn.Linear(2, 2)
    with pytest.raises(PotstillError, match=r"\(model\.extra\.weight is not in it\)"):
        load_state(checkpoint, more, its_optimizers)


def test_an_old_checkpoint_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    folder, mark = tmp_path / "step-00000002", tmp_path / "ran"
    (folder / "state").mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (folder / "state" / name).write_bytes(pickle.dumps(Planted(mark)))
    module, optimizers = made("adamw", 0)
    with pytest.raises(
        PotstillError, match=r"step-00000002 is of an earlier version of potstill, whose state/ could run"
    ):
        load_state(folder, module, optimizers)
    assert not mark.exists()
    pickle.loads((folder / "state" / ".metadata").read_bytes())
    assert mark.exists()  # it would have


def test_the_draws_of_a_step_depend_on_seed_step_and_rank_alone() -> None:
    def drawn(*key: int) -> float:
        torch.rand(3)
        seed_step(*key)
        return float(torch.rand(()))

    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 11, 1), (0, 1, 11), (-1, 0, 0)]
    assert [drawn(*key) for key in keys] == [drawn(*key) for key in keys]
    assert len({drawn(*key) for key in keys}) == len(keys)
