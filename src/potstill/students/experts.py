"""A student that is a mixture of experts: the loss that balances them, and how much each of them has to do.

The loss is that of Switch Transformers as transformers has it: E · Σ_e f_e · P_e, with f_e the number of times that a token
goes to expert e and P_e the mean probability of e, over the tokens of a micro-batch in all layers. E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from potstill.models import LanguageModel, backbone
from potstill.parallel.context import Context
from potstill.types import Batch, PotstillError

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # what configs call it
KEY = "student.router_aux_loss_coef"


@dataclass
class Routers:
    """The routers of a model, and what they said while it was listened to."""

    coefficient: float
    top_k: int
    listening: bool = False
    logits: list[Tensor] = field(default_factory=list)  # [tokens, E] by layer
    chosen: list[Tensor | None] = field(default_factory=list)  # [tokens, k]: where the router says it

    @classmethod
    def of(cls, student: LanguageModel, coefficient: float | None) -> Routers | None:
        """Those of a student; None: it has none. `coefficient`: the recipe's, None for the model's own."""
        model = student.model
        found, config = list(_routers(model)), model.config.get_text_config().to_dict()
        own = next((config[key] for key in COEFFICIENTS if config.get(key)), None)
        balanced = _has_loss(model) and student.short_positions is None  # else short and long texts are read apart
        if coefficient and not (found and balanced):
            what = "are no experts in" if not found else "is no loss that balances experts in transformers for"
            raise PotstillError(f"{KEY}: there {what} {model.config.model_type} models: leave it out")
        top_k = config.get("num_experts_per_tok")
        if not found or top_k is None or student.short_positions is not None:
            return None
        weight = own if coefficient is None else coefficient
        made = cls(float(weight or 0.0) if balanced else 0.0, int(top_k))
        for module, index in found:
            module.register_forward_hook(lambda _, __, output, index=index: made._heard(output, index))
        return made

    def _heard(self, output: Any, index: int) -> None:
        if not self.listening:  # an evaluation, writing, or a pass that is made again for its activations
            return
        parts = output if isinstance(output, tuple) else (output,)
        logits = parts[index if isinstance(output, tuple) else 0]
        whole = [part for part in parts if isinstance(part, Tensor) and not part.is_floating_point()]
        self.logits.append(logits.reshape(-1, logits.shape[-1]))
        self.chosen.append(whole[0].reshape(-1, whole[0].shape[-1]) if whole else None)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """What the routers say in the block is kept."""
        self.logits, self.chosen, self.listening = [], [], True
        try:
            yield
        finally:
            self.listening = False

    def terms(self, batch: Batch, divisor: float, context: Context | None) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch times its share of the step's supervised tokens (`divisor`), of which a rank that read a
        part of every sequence has its part; and how many tokens went to each expert of each layer, [layers, E]."""
        group = None
        if context is not None:
            batch, group = context.padded(batch), context.group
            read = batch.document[:, context.own(batch.document.shape[1], batch.document.device)]
        else:
            read = batch.document
        logits, chosen = self.logits, self.chosen
        self.logits, self.chosen = [], []
        loads = expert_loads(logits, chosen, self.top_k, read.flatten() > 0)
        if not self.coefficient:
            return loads.new_zeros(()), loads
        share = self.coefficient * batch.supervised_tokens / divisor
        return share * balancing_loss(logits, self.top_k, read.flatten() > 0, group), loads


def balancing_loss(
    logits: Sequence[Tensor], top_k: int, read: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Over the tokens that are no padding. `group`: ranks that have the other tokens, each of which gets its part of the loss:
    how often an expert is chosen has no gradient, and in the probabilities the loss is linear."""
    exact = torch.promote_types(logits[0].dtype, torch.float32)
    probabilities = [each.to(exact).softmax(-1) for each in logits]
    sums = torch.stack([(each * read[:, None]).sum(0) for each in probabilities]).sum(0)
    counts = torch.stack([_counts(each.topk(top_k).indices, each.shape[-1], read) for each in probabilities]).sum(0)
    known = torch.cat([counts.to(exact), read.sum().to(exact).view(1) * len(logits)])
    if group is not None:
        dist.all_reduce(known, group=group)
    tokens = known[-1].clamp(min=1)
    return sums.shape[0] * (known[:-1] * sums).sum() / tokens**2


@torch.no_grad()
def expert_loads(logits: Sequence[Tensor], chosen: Sequence[Tensor | None], top_k: int, read: Tensor) -> Tensor:
    """How many tokens each expert of each layer got, [layers, E]."""
    found = [each.topk(top_k).indices if ids is None else ids for each, ids in zip(logits, chosen, strict=True)]
    return torch.stack([_counts(ids, each.shape[-1], read) for each, ids in zip(logits, found, strict=True)])


def _counts(ids: Tensor, experts: int, read: Tensor) -> Tensor:
    weights = read.to(torch.float32)[:, None].expand(-1, ids.shape[-1])
    return torch.zeros(experts, device=ids.device).index_add_(0, ids.flatten(), weights.flatten())


def said_load(counts: Sequence[float], shape: torch.Size) -> dict[str, Any]:
    """For the log, of the tokens of a step that went to each expert of each layer ([layers, E]): 1 is an equal share."""
    loads = torch.tensor(counts).view(shape)
    shares = loads * loads.shape[-1] / loads.sum(-1, keepdim=True).clamp(min=1)
    return {
        "expert_load": [round(share, 4) for share in shares.mean(0).tolist()],
        "expert_load_max": float(shares.max()),
        "experts_idle": int((loads == 0).sum()),
    }


def _routers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    """The modules that transformers takes router logits from, and where they are in what these give."""
    part = backbone(model)
    kept = (type(part)._can_record_outputs or {}).get("router_logits", ())
    for spec in kept if isinstance(kept, list | tuple) else [kept]:
        for name, module in part.named_modules():
            place = f".{spec.layer_name.strip('.')}." if spec.layer_name else "."
            if isinstance(module, spec.target_class) and place in f".{name}.":
                yield module, spec.index


def _has_loss(model: PreTrainedModel) -> bool:
    """Whether transformers balances the experts of such models by a loss; DeepSeek's and those like it are balanced by a bias
    that it does not move."""
    return "load_balancing_loss_func" in vars(sys.modules[type(model).__module__])
