"""Expert parallelism: every rank holds some of the experts whole, and tokens travel to theirs and back."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_expert_parallelism, replace_layer_number_by_wildcard

from potstill.types import PotstillError


def split_experts(model: PreTrainedModel, experts: DeviceMesh, tp: DeviceMesh) -> None:
    """Spread the experts over the axis `ep`, in place. Before tensor parallelism, which then leaves them alone."""
    check_experts(model, experts["ep"].size(), tp.size())
    apply_expert_parallelism(model, experts["ep"], tp, dict(model.ep_plan))


def check_experts(model: PreTrainedModel, ep: int, tp: int) -> None:
    """One sentence on what does not fit, and what would."""
    config = model.config.get_text_config()
    if not model.ep_plan:
        raise PotstillError(
            f"parallel.ep {ep}: transformers has no plan to spread experts of {config.model_type} models: set parallel.ep to 1"
        )
    (count,) = {parameter.shape[0] for module in expert_modules(model) for parameter in module.parameters()}
    fitting = [n for n in range(1, count + 1) if count % n == 0 and n % tp == 0]
    if ep not in fitting:
        which = f"one of {', '.join(map(str, fitting))}" if fitting else f"1, and parallel.tp {tp} too"
        raise PotstillError(
            f"parallel.ep {ep} does not divide the {count} experts of the {config.model_type} model into whole tp groups "
            f"(parallel.tp {tp}): set it to {which}"
        )


def expert_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """What `fully_shard` takes over `efsdp`, before the layers that they are in."""
    for name, module in model.named_modules():
        if model.ep_plan.get(replace_layer_number_by_wildcard(name)) == "ep_dispatch_experts":
            yield module
