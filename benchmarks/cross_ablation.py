"""TRL's hybrid loss for other tokenizers, part by part, beside `prefix_marginal`: one loop for all, by autograd on logits.

python benchmarks/cross_ablation.py --work DIR            runs what results/cross_ablation.json lacks

The teacher is asked once for 200 batches of 8 short chats; every loss then trains the same student (900 byte-level ids) on
them. Names are those of LOSSES; a name with `@200` is a run of 200 steps, the others are of 100, all with a cosine after 20
steps of warm-up.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from cross_quality import prepare
from torch import Tensor
from transformers import AutoModelForCausalLM

from potstill.config import CrossTokenizerConfig, DataConfig, StudentConfig
from potstill.data import StepBatches
from potstill.losses.dense import target_logits
from potstill.models import load_student
from potstill.teachers.cross_tokenizer import cross_tokenizer_view
from potstill.teachers.live import LiveModel
from potstill.teachers.reading import TeacherReader
from potstill.teachers.teacher import Teacher
from potstill.teachers.tokenizer_pair import aligned_chunks

RESULT = Path(__file__).parent / "results" / "cross_ablation.json"
BATCHES, WARMUP, LR, CE_WEIGHT, FADE = 200, 20, 3e-3, 0.3, 40
EPS = 1e-8  # TRL's


def chats(source: Path, out: Path, count: int, seed: int) -> None:
    texts, r, rows = pq.read_table(source).column("text").to_pylist(), random.Random(seed), []
    while len(rows) < count:
        text = r.choice(texts)
        if len(text) < 300:
            continue
        begin = text.find(" ", r.randrange(0, len(text) - 240))
        chat = text[begin + 1 : begin + 220]
        cut = chat.find(" ", 30)
        if cut > 0:
            roles = {"user": chat[:cut], "assistant": chat[cut:].rstrip()}
            rows.append({"messages": [{"role": role, "content": content} for role, content in roles.items()]})
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def asked(work: Path) -> dict[str, Any]:
    """The batches with all that the losses need of the teacher, the held-out rows, and the ids that both have."""
    prepare(work / "quality")
    shipped = Path(__file__).parents[1] / "src" / "potstill" / "shipped" / "corpus"
    cpu = torch.device("cpu")
    student, model = (
        load_student(StudentConfig(model=str(work / "quality" / name)), cpu, 0) for name in ("student-900-0", "teacher")
    )
    model.model.eval()
    view, width = cross_tokenizer_view(student, model.tokenizer, model.vocabulary, CrossTokenizerConfig(), 1.0)
    reader = TeacherReader(model.tokenizer, model.positions, {})
    teacher = Teacher(LiveModel(model, width, reader), view, "teacher")
    pair = view.pair  # type: ignore[attr-defined]
    found: dict[str, Any] = {"train": [], "held": []}
    for part, split, count, rows in (("train", "train", 8 * BATCHES, 8), ("held", "heldout", 256, 16)):
        chats(
            shipped / f"{split}.parquet", work / f"{part}.jsonl", 8000 if part == "train" else 300, 1 + (part == "held")
        )
        sources = [{"files": str(work / f"{part}.jsonl"), "messages": "messages"}]
        data = DataConfig.model_validate({"sources": sources, "max_length": 256, "packing": False})
        steps = StepBatches(data, student.tokenizer, batch_size=rows, micro_batch_size=rows, seed=0, epochs=1)
        batches = [batch for step in steps for batch in step.batches][: count // rows]
        for batch in batches:
            own = {"ids": batch.input_ids, "rows": batch.rows.student, "labels": batch.rows.labels}
            if part == "held":
                found["held"].append(own | {"bytes": sum(e.supervised_bytes for e in batch.examples)})
                continue
            ready = teacher.prepare(batch)
            with torch.no_grad():
                target = teacher.targets(batch, ready)
                logp, theirs = (target_logits(x, slice(None)).log_softmax(-1).half() for x in (target, target.source))  # type: ignore[attr-defined]
            chunks = aligned_chunks(pair, batch, ready.reading.examples)  # type: ignore[union-attr]
            sizes = {"m": chunks.student[1] - chunks.student[0], "n": chunks.teacher[1] - chunks.teacher[0]}
            places = {"first": chunks.first, "document": chunks.document, "token": ready.plan.token, **sizes}  # type: ignore[union-attr]
            arrays = {name: torch.from_numpy(np.asarray(array)) for name, array in places.items()}
            found["train"].append({**own, **arrays, "logp": logp, "theirs": theirs})
    relation = pair.relation(cpu)
    return found | {"student": relation.student, "teacher": relation.teacher, "sizes": relation.sizes}


def hybrid(
    z: Tensor, d: dict[str, Any], all_of: dict[str, Any], *, some: str = "all", l1: bool = True, factors: bool = True
) -> Tensor:
    """TRL's, with `uld_token_merge_strategy: observed`: what is read off *after* a chunk's first token."""
    q, p, first, m, n = z.softmax(-1), d["theirs"].float().exp(), d["first"], d["m"], d["n"]
    begin, document = n.cumsum(0) - n, d["document"]
    chosen = torch.ones(len(first), dtype=torch.bool)
    chosen[:-1] = document[1:] == document[:-1]  # not the end of a text
    chosen[-1] = False
    one = (m == 1) & (n == 1)
    chosen &= {"all": torch.ones_like(one), "one": one, "several": ~one}[some]
    g = chosen.nonzero().squeeze(-1)
    ours, theirs = q[first[g] + 1], p[begin[g] + 1]
    if factors:
        for side, probabilities, start, size, token in ((0, q, first, m, d["labels"]), (1, p, begin, n, d["token"])):
            again = [
                torch.stack(
                    [z.new_ones(()), *(probabilities[i + 1, token[i]].clamp_min(EPS) for i in range(a + 1, a + k))]
                )
                for a, k in zip(start[g].tolist(), size[g].tolist(), strict=True)
            ]
            scale = torch.stack([x.prod() for x in again])[:, None]
            ours, theirs = (ours * scale, theirs) if side == 0 else (ours, theirs * scale)
    documents = int(document.max()) + 1
    weight = 1.0 / torch.bincount(document[g], minlength=documents)[document[g]] / documents
    share = len(all_of["teacher"]) / all_of["sizes"][1]
    logp, logq = theirs[:, all_of["teacher"]].clamp_min(EPS).log(), ours[:, all_of["student"]].clamp_min(EPS).log()
    total = share * ((logp.exp() * (logp - logq)).sum(-1) * weight).sum()
    if l1:
        alone = [
            torch.ones(size, dtype=torch.bool).index_fill(0, all_of[x], False)
            for x, size in zip(("student", "teacher"), all_of["sizes"], strict=True)
        ]
        a, b = (x[:, keep].sort(-1, descending=True).values for x, keep in zip((ours, theirs), alone, strict=True))
        width = max(a.shape[1], b.shape[1])
        gap = F.pad(a, (0, width - a.shape[1])) - F.pad(b, (0, width - b.shape[1]))
        total = total + (1 - share) * (gap.abs().sum(-1) * weight).sum()
    return total


def marginal(z: Tensor, d: dict[str, Any]) -> Tensor:
    logp = d["logp"].float()
    return (logp.exp() * (logp - z.log_softmax(-1))).sum(-1).mean()


def again(z: Tensor, d: dict[str, Any], inner: bool = False) -> Tensor:
    """−log Q(the token just read), summed over all rows, or those after a chunk's further tokens, over the number of rows."""
    rows, labels = torch.arange(len(z) - 1), d["labels"]
    if not inner:
        return F.cross_entropy(z, d["ids"].flatten()[d["rows"]])
    rows = rows[~torch.isin(rows, d["first"])]
    return F.cross_entropy(z[rows + 1], labels[rows], reduction="sum") / len(z)


Loss = Callable[[Tensor, dict[str, Any], dict[str, Any], int], Tensor]


def mixed(kd: Loss) -> Loss:
    return lambda z, d, a, s: kd(z, d, a, s) + CE_WEIGHT * F.cross_entropy(z, d["labels"])


def fading(step: int) -> float:
    return 0.1 * max(0.0, 1 - step / FADE)


LOSSES: dict[str, Loss] = {
    "text": lambda z, d, a, s: F.cross_entropy(z, d["labels"]),
    "prefix_marginal": mixed(lambda z, d, a, s: marginal(z, d)),
    "hybrid": mixed(lambda z, d, a, s: hybrid(z, d, a)),
    "hybrid, without sorted L1": mixed(lambda z, d, a, s: hybrid(z, d, a, l1=False)),
    "hybrid, chunks of one token each": mixed(lambda z, d, a, s: hybrid(z, d, a, some="one")),
    "hybrid, the other chunks": mixed(lambda z, d, a, s: hybrid(z, d, a, some="several")),
    "hybrid, without the factors": mixed(lambda z, d, a, s: hybrid(z, d, a, factors=False)),
    "prefix_marginal + 0.3 factors": mixed(lambda z, d, a, s: marginal(z, d) + 0.3 * again(z, d, inner=True)),
    "prefix_marginal + 0.1 repeat": mixed(lambda z, d, a, s: marginal(z, d) + 0.1 * again(z, d)),
    "text, fading repeat @200": lambda z, d, a, s: F.cross_entropy(z, d["labels"]) + fading(s) * again(z, d),
    "prefix_marginal, fading repeat @200": mixed(lambda z, d, a, s: marginal(z, d) + fading(s) * again(z, d)),
    "prefix_marginal @200": mixed(lambda z, d, a, s: marginal(z, d)),
    "hybrid @200": mixed(lambda z, d, a, s: hybrid(z, d, a)),
}


def trained(name: str, all_of: dict[str, Any], work: Path) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(work / "quality" / "student-900-0").train()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    steps, found, begin = 200 if name.endswith("@200") else 100, {}, time.process_time()
    for step, d in enumerate(all_of["train"][:steps]):
        late = max(0, step - WARMUP) / (steps - WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * late))
        z = model(input_ids=d["ids"]).logits.flatten(0, 1)[d["rows"]]
        LOSSES[name](z, d, all_of, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            found[str(step + 1)] = round(bits_per_byte(model, all_of["held"]), 4)
    return found | {"seconds": round(time.process_time() - begin, 1)}


@torch.no_grad()
def bits_per_byte(model: Any, held: list[dict[str, Any]]) -> float:
    nats = sum(
        F.cross_entropy(model(input_ids=d["ids"]).logits.flatten(0, 1)[d["rows"]], d["labels"], reduction="sum").item()
        for d in held
    )
    return nats / math.log(2) / sum(d["bytes"] for d in held)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-cross-ablation"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    missing = [name for name in LOSSES if name not in results]
    everything = asked(options.work) if missing else {}
    for name in missing:
        results[name] = trained(name, everything, options.work)
        print(name, results[name], flush=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
