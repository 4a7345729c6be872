"""KDLoss over 2 and 4 real processes, on a vocabulary that they do not divide: value and gradient are those of one process.

One group of processes goes through all cases, since starting it is most of the time. Each process writes down what went
wrong; gloo may abort at exit, so exit codes are not read.
"""

from __future__ import annotations

import itertools
import json
import math
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from potstill.losses import DIVERGENCES, KDLoss

B, S, V = 2, 5, 11


def logits(seed: int, dtype: torch.dtype = torch.float64, v: int = V) -> Tensor:
    """The same on every rank; some ids have no mass anywhere, and one rank's slice has none in one row."""
    z = 2 * torch.randn(B, S, v, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    z[..., 4] = -math.inf
    z[0, 0, : (v + 1) // 2] = -math.inf
    return z.to(dtype)


def some_labels(v: int = V) -> Tensor:
    labels = torch.randint(v, (B, S), generator=torch.Generator().manual_seed(9))
    labels[0, 3] = labels[1, :2] = -100
    return labels


def alone(
    student: Tensor, teacher: Tensor, labels: Tensor, divisor: int | None, **settings: object
) -> tuple[Tensor, Tensor]:
    """One process's value and gradient; the unit tests hold these against the naive twin."""
    student = student.clone().requires_grad_()
    loss = KDLoss(**settings)(student, teacher, labels, divisor)
    return loss.detach(), torch.autograd.grad(3 * loss, student)[0]


def same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def sharded(mesh: DeviceMesh, z: Tensor, *placements: object) -> DTensor:
    return distribute_tensor(z.clone(), mesh, placements).requires_grad_()


def check_dtensors(mesh: DeviceMesh, name: str, t: float, chunk: int, flat: bool) -> None:
    settings = dict(divergence=name, temperature=t, chunk_size=chunk, beta=0.3)
    z, y, labels = logits(1), logits(2), some_labels()
    if flat:
        z, y, labels = z.flatten(0, 1), y.flatten(0, 1), labels.flatten()
    divisor = 13 if chunk else None
    exact = alone(z, y, labels, divisor, **settings)
    student = sharded(mesh, z, Shard(-1) if flat else Shard(2))
    teachers = {"sharded": sharded(mesh, y, *student.placements), "plain and whole": y}
    if name == "forward_kl":
        teachers |= {"replicated": sharded(mesh, y, Replicate()), "sharded otherwise": sharded(mesh, y, Shard(0))}
    for how, teacher in teachers.items():
        loss = KDLoss(**settings)(student, teacher, labels, divisor)
        (gradient,) = torch.autograd.grad(3 * loss, student)
        assert isinstance(gradient, DTensor) and gradient.placements == student.placements, how
        same((loss.detach(), gradient.full_tensor()), exact)
        assert not isinstance(loss, DTensor) and teacher.grad is None


def check_plain_slices(mesh: DeviceMesh, name: str, t: float, chunk: int, cuts: list[int]) -> None:
    settings = dict(divergence=name, temperature=t, chunk_size=chunk, beta=0.3)
    z, y, labels = logits(1), logits(2), some_labels()
    exact = alone(z, y, labels, None, **settings)
    rank, group = mesh.get_local_rank(), mesh.get_group()
    student = z.split(cuts, -1)[rank].clone().requires_grad_()
    for teacher in (y.split(cuts, -1)[rank], y, sharded(mesh, y, Replicate())):
        loss = KDLoss(tp_group=group, **settings)(student, teacher, labels)
        (gradient,) = torch.autograd.grad(3 * loss, student)
        same((loss.detach(), gradient), (exact[0], exact[1].split(cuts, -1)[rank]))


def check_gradient_of_a_leaf(mesh: DeviceMesh) -> None:
    """Through a column-sharded head, as in training, and against PyTorch's own functions: the gradient of weights is not
    multiplied by the number of ranks."""
    torch.manual_seed(0)
    hidden, head, y = (torch.randn(*shape).double() for shape in ((B, S, 6), (V, 6), (B, S, V)))
    labels = some_labels()
    whole = head.clone().requires_grad_()
    logq, logp = (x[labels != -100].log_softmax(-1) for x in (hidden @ whole.t(), y))
    F.kl_div(logq, logp, reduction="batchmean", log_target=True).backward()
    weight = sharded(mesh, head, Shard(0))
    out = sharded(mesh, hidden, Replicate()) @ weight.t()
    assert out.placements == (Shard(2),), out.placements
    KDLoss()(out, y, labels).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), whole.grad, rtol=1e-10, atol=1e-13)


def check_other_placements(mesh: DeviceMesh) -> None:
    z, y, labels = logits(1), logits(2), some_labels()
    exact = alone(z, y, labels, None)
    for student_placement, teacher_placement in itertools.product(
        (None, Replicate(), Shard(0), Shard(1)), (None, Shard(2))
    ):
        student = z.clone().requires_grad_() if student_placement is None else sharded(mesh, z, student_placement)
        teacher = y if teacher_placement is None else sharded(mesh, y, teacher_placement)
        loss = KDLoss()(student, teacher, distribute_tensor(labels, mesh, [Replicate()]))
        (gradient,) = torch.autograd.grad(3 * loss, student)
        same((loss.detach(), gradient.full_tensor() if isinstance(gradient, DTensor) else gradient), exact)


def check_two_mesh_dimensions() -> None:
    """Rows over one dimension of the mesh and the vocabulary over the other, in either order."""
    z, y, labels = logits(1), logits(2), some_labels()
    exact = alone(z, y, labels, 13)
    for order in (("dp", "tp"), ("tp", "dp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=order)
        for rows in (Replicate(), Shard(0)):
            placements = [rows if name == "dp" else Shard(2) for name in order]
            student = sharded(mesh, z, *placements)
            spread = distribute_tensor(labels, mesh, [rows if name == "dp" else Replicate() for name in order])
            for teacher in (sharded(mesh, y, *placements), sharded(mesh, y, Replicate(), Replicate())):
                loss = KDLoss()(student, teacher, spread, 13)
                (gradient,) = torch.autograd.grad(3 * loss, student)
                if isinstance(rows, Shard):  # each rank has the loss of its own rows
                    loss = loss.detach().clone()
                    dist.all_reduce(loss, group=mesh.get_group("dp"))
                same((loss.detach(), gradient.full_tensor()), exact)
        twice = sharded(mesh, z, Shard(2), Shard(2))
        with pytest.raises(ValueError, match="one mesh dimension"):
            KDLoss()(twice, y, labels)


def check_few_ids(mesh: DeviceMesh) -> None:
    """3 ids over 4 ranks: one of them holds none."""
    student = torch.tensor([[2, 0.5, -1], [0.1, 0.2, 0.3]], dtype=torch.float64)
    teacher = torch.tensor([[1.5, 0, -0.5], [0.2, -0.1, 0]], dtype=torch.float64)
    labels = torch.tensor([0, 1])
    for name in DIVERGENCES:
        z = sharded(mesh, student, Shard(1))
        loss = KDLoss(divergence=name, temperature=2.0)(z, teacher, labels)
        (gradient,) = torch.autograd.grad(3 * loss, z)
        same(
            (loss.detach(), gradient.full_tensor()),
            alone(student, teacher, labels, None, divergence=name, temperature=2.0),
        )


def check_all_masked(mesh: DeviceMesh) -> None:
    student = sharded(mesh, logits(1), Shard(2))
    loss = KDLoss()(student, logits(2), torch.full((B, S), -100))
    (gradient,) = torch.autograd.grad(loss, student)
    assert loss.item() == 0.0 and gradient.full_tensor().abs().max() == 0.0


def check_bfloat16(mesh: DeviceMesh) -> None:
    z, y, labels = logits(1, torch.bfloat16), logits(2, torch.bfloat16), some_labels()
    value, exact = alone(z, y, labels, None)
    student = sharded(mesh, z, Shard(2))
    loss = KDLoss()(student, y, labels)
    (gradient,) = torch.autograd.grad(3 * loss, student)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(loss.detach(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.full_tensor(), exact, rtol=2**-7, atol=1e-4)


def check_refusals(mesh: DeviceMesh) -> None:
    """On every rank, so that none waits for another."""
    labels, rank, group = some_labels(), mesh.get_local_rank(), mesh.get_group()
    with pytest.raises(ValueError, match="ids"):
        KDLoss()(sharded(mesh, logits(1), Shard(2)), logits(2, v=V + 5), labels)
    with pytest.raises(ValueError, match="labels has positions"):
        KDLoss()(sharded(mesh, logits(1), Shard(2)), logits(2), labels[:, :2])
    for widths in ([5, 6, 5, 5], [6, 5, 5, 5]):  # rank 0, then another, has the right ones
        with pytest.raises(ValueError, match="ids"):
            KDLoss(tp_group=group)(logits(1, v=[5, 5, 5, 5][rank]), logits(2, v=widths[rank]), labels)
    with pytest.raises(ValueError, match="ids"):
        KDLoss(tp_group=group)(logits(1, v=5), logits(2, v=5 * mesh.size() + 1), labels)


def check_few_collectives(mesh: DeviceMesh) -> None:
    """What travels for a row is a few numbers; nothing of vocabulary width does."""
    student = sharded(mesh, logits(1), Shard(2))
    counted: list[int] = []
    reduce = dist.all_reduce

    def counting(tensor: Tensor, *arguments: object, **options: object) -> object:
        counted.append(tensor.numel())
        return reduce(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        KDLoss(divergence="jsd")(student, logits(2), some_labels()).backward()
    finally:
        dist.all_reduce = reduce
    supervised = int((some_labels() != -100).sum())
    assert len(counted) <= 5 and sum(counted) <= 6 * supervised, counted


def cases(size: int) -> Iterator[tuple[str, Callable[[DeviceMesh], None]]]:
    for name, t, (chunk, flat) in itertools.product(DIVERGENCES, (1.0, 2.5), ((0, False), (3, True))):
        yield f"dtensors {name} {t} {chunk}", lambda m, a=(name, t, chunk, flat): check_dtensors(m, *a)
    uneven = {2: [[4, 7], [10, 1]], 4: [[1, 5, 2, 3], [3, 3, 3, 2]]}[size]
    for (name, t), (chunk, cuts) in itertools.product(
        zip(DIVERGENCES, itertools.cycle((1.0, 2.5)), strict=False), zip((0, 3), uneven, strict=True)
    ):
        yield f"slices {name} {t} {cuts}", lambda m, a=(name, t, chunk, cuts): check_plain_slices(m, *a)
    for check in (
        check_gradient_of_a_leaf,
        check_other_placements,
        check_few_ids,
        check_all_masked,
        check_bfloat16,
        check_refusals,
        check_few_collectives,
    ):
        yield check.__name__, check
    if size == 4:
        yield "two mesh dimensions", lambda _: check_two_mesh_dimensions()


def run_rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    wrong: dict[str, str] = {}
    done = 0
    for name, check in cases(size):
        try:
            check(mesh)
        except Exception:
            wrong[name] = traceback.format_exc()
            break  # the others may be in a collective of this case still
        done += 1
    (folder / f"{rank}.json").write_text(json.dumps({"wrong": wrong, "done": done}), encoding="utf-8")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_one_process(size: int, tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    processes = [context.Process(target=run_rank, args=(rank, size, tmp_path), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    assert not any(report["wrong"] for report in reports), "\n".join(
        str(*r["wrong"].values()) for r in reports if r["wrong"]
    )
    assert {report["done"] for report in reports} == {len(list(cases(size)))}
