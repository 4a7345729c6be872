"""What a student learns from a teacher with another tokenizer, beside TRL's GOLD trainer: bits per byte at equal steps, and the
processor seconds that they took.

python benchmarks/cross_quality.py --work DIR --trl PYTHON --tokenizers DIR    runs what results/cross_quality.json lacks
python benchmarks/cross_quality.py --only-docs                                 writes the tables of docs/cross-tokenizer.md

Several may run at once; one that was stopped leaves DIR/NAME.lock of the run it was at, to be deleted.
PYTHON has TRL 1.16 (and the versions of requirements.lock). Short chats are cut from the shipped corpus; the teacher is the
shipped one, with 2,048 byte-level ids. The pair "real" has the tokenizers of SmolLM2 and GPT-2, from --tokenizers, and a
teacher hardly larger than the students, which is trained on the text first. Both sides have the same student, batch, AdamW,
learning rate (20 steps of warm-up, then constant, so that one run stands for all its lengths), weight of the cross-entropy and
the same scorer: this file's, on held-out answers. A seed is that of the student's weights and of the order of the chats. A
process for each run, one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULT = Path(__file__).parent / "results" / "cross_quality.json"
PAGE = Path(__file__).parents[1] / "docs" / "cross-tokenizer.md"
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
WARMUP, CE_WEIGHT = 20, 0.3
BATCH = {"real": 4}  # chats a step, by pair; the others: 8
TEACHER = {"real": "teacher-real"}  # the others: teacher
TEACHER_STEPS = 400  # of the real pair's teacher
CHATS, CHARACTERS, PROMPT = 8000, 160, 24
FADE = 100  # steps over which repeat_weight goes to 0, as by default for a student.config

# How each is trained: by whom, and what differs.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("potstill", {"loss.ce_weight": 1.0, "loss.kd_weight": 0.0}),
    "text, repeat 0.1": ("potstill", {"loss.ce_weight": 1.0, "loss.kd_weight": 0.0, "loss.repeat_weight": 0.1}),
    "potstill": ("potstill", {}),
    "potstill, repeat 0.1": ("potstill", {"loss.repeat_weight": 0.1}),
    "potstill, repeat": ("potstill", {"loss.repeat_weight": 0.3}),
    "hybrid": ("trl", {"use_uld_loss": True, "uld_use_hybrid_loss": True, "uld_crossentropy_weight": CE_WEIGHT}),
    "uld": ("trl", {"use_uld_loss": True, "uld_use_hybrid_loss": False, "uld_crossentropy_weight": CE_WEIGHT}),
    "gkd": ("trl", {}),
    "potstill gkd": ("potstill", {"loss.ce_weight": 0.0}),
}
LABELS = {
    "text": "the text alone (potstill)",
    "text, repeat 0.1": "the text alone, `repeat_weight` from 0.1",
    "potstill": "potstill, `repeat_weight: 0`",
    "potstill, repeat 0.1": "potstill, `repeat_weight` from 0.1",
    "potstill, repeat": "**potstill**, as by default for a fresh student",
    "hybrid": "TRL, hybrid",
    "uld": "TRL, ULD",
    "gkd": "TRL, GKD (forward KL)",
    "potstill gkd": "potstill (forward KL)",
}
# Pair, learning rate, steps at which it is scored, seeds, ways: in the order in which they are run.
CASES: list[tuple[str, float, tuple[int, ...], tuple[int, ...], tuple[str, ...]]] = [
    ("900", 3e-3, (200,), (0, 1, 2), ("text", "potstill", "hybrid", "potstill, repeat", "uld")),
    ("900", 1e-2, (200,), (0, 1, 2), ("hybrid", "potstill, repeat")),
    ("900", 1e-2, (200,), (0,), ("potstill",)),
    ("900", 1e-2, (200,), (0, 1), ("potstill, repeat 0.1",)),
    ("real", 3e-3, (200,), (0, 1, 2), ("hybrid", "potstill, repeat", "potstill", "uld")),
    ("same", 3e-3, (200,), (0, 1, 2), ("gkd", "potstill gkd")),
    ("900, taught", 1e-3, (200,), (0, 1, 2), ("text", "potstill", "hybrid")),
    ("900", 3e-3, (200,), (0, 1, 2), ("text, repeat 0.1", "potstill, repeat 0.1")),
    ("900", 3e-3, (200, 400, 1000), (0, 1, 2), ("potstill, repeat", "hybrid")),
]
PAIRS = {
    "900": "a fresh student with 900 byte-level ids, digits split",
    "900, taught": "the same student after 1,000 steps on text",
    "same": "a fresh student with the teacher's own ids",
    "real": "a fresh student with GPT-2's ids, a teacher with SmolLM2's",
}
TAUGHT_BY = ("900", "3e-03", "text")  # whose last checkpoint is the student of "900, taught"


def chats(source: Path, out: Path, count: int, seed: int) -> None:
    import pyarrow.parquet as pq

    texts = [text for text in pq.read_table(source).column("text").to_pylist() if len(text) > 2 * CHARACTERS]
    r, rows = random.Random(seed), []
    while len(rows) < count:
        text = r.choice(texts)
        begin = text.find(" ", r.randrange(len(text) - CHARACTERS - 40)) + 1
        cut = text.find(" ", begin + PROMPT)
        if begin and 0 < cut < begin + CHARACTERS // 2:
            roles = {"user": text[begin:cut], "assistant": text[cut : begin + CHARACTERS].rstrip()}
            rows.append({"messages": [{"role": role, "content": content} for role, content in roles.items()]})
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def byte_level(ids: int, texts: list[str]) -> Any:
    """A byte-level tokenizer with so many ids, which splits digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=ids,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save_student(folder: Path, tok: Any, seed: int, hidden_size: int = 96) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tok.chat_template = TEMPLATE
    tok.pad_token = tok.pad_token or tok.eos_token
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tok), hidden_size=hidden_size, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tok.save_pretrained(folder)


def prepare(work: Path) -> None:
    """Chats, the teacher and the students of all seeds, as folders that both sides read."""
    if (work / "prepared").exists():
        return
    import pyarrow.parquet as pq
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work.mkdir(parents=True, exist_ok=True)
    shipped = Path(__file__).parents[1] / "src" / "potstill" / "shipped"
    chats(shipped / "corpus" / "train.parquet", work / "train.jsonl", CHATS, 1)
    chats(shipped / "corpus" / "heldout.parquet", work / "held.jsonl", 300, 2)
    texts = pq.read_table(shipped / "corpus" / "train.parquet").column("text").to_pylist()[:400]
    own = AutoTokenizer.from_pretrained(shipped / "teacher")
    for name, tok in (("same", own), ("900", byte_level(900, texts))):
        for seed in range(3):
            save_student(work / f"student-{name}-{seed}", tok, seed)
    AutoModelForCausalLM.from_pretrained(shipped / "teacher").save_pretrained(work / "teacher")
    own.save_pretrained(work / "teacher")
    (work / "prepared").touch()


def prepare_real(work: Path, tokenizers: Path) -> None:
    """Students with GPT-2's ids, and a teacher with SmolLM2's, which reads other chats of the same corpus."""
    if (work / "prepared-real").exists():
        return
    from transformers import AutoTokenizer

    teacher = AutoTokenizer.from_pretrained(tokenizers / "smollm2")
    student = AutoTokenizer.from_pretrained(tokenizers / "gpt2")
    save_student(work / "untaught-real", teacher, 0, hidden_size=96)
    for seed in range(3):
        save_student(work / f"student-real-{seed}", student, seed, hidden_size=64)
    shipped = Path(__file__).parents[1] / "src" / "potstill" / "shipped"
    chats(shipped / "corpus" / "train.parquet", work / "teacher.jsonl", CHATS, 3)
    job = {
        "work": str(work), "run": str(work / "run-teacher-real"), "student": str(work / "untaught-real"), "pair": "real",
        "options": WAYS["text, repeat 0.1"][1], "steps": [TEACHER_STEPS], "lr": 3e-3, "seed": 0, "by": "potstill",
        "data": "teacher.jsonl", "batch": 8,
    }  # fmt: skip
    trained = launched(job, sys.executable)
    print(f"the real pair's teacher: {trained:.0f} s", flush=True)
    model = work / "run-teacher-real" / "checkpoints" / f"step-{TEACHER_STEPS:08d}" / "model"
    (work / "teacher-real").symlink_to(model)
    (work / "prepared-real").write_text(f"{bits_per_byte(model, work / 'held.jsonl'):.4f}\n")


def by_potstill(job: dict[str, Any]) -> float:
    import potstill

    work, loss = Path(job["work"]), {"divergence": "forward_kl", "ce_weight": CE_WEIGHT, "repeat_weight": 0.0}
    loss |= {key.removeprefix("loss."): value for key, value in job["options"].items()}
    last = job["steps"][-1]
    if loss["repeat_weight"]:
        loss["repeat_weight"] = {"start": loss["repeat_weight"], "end": 0.0, "over": FADE / last}
    begin = time.process_time()
    potstill.train(
        {
            "run": job["run"],
            "student": {"model": job["student"]},
            "teachers": [{"model": str(work / TEACHER.get(job["pair"], "teacher"))}]
            if loss.get("kd_weight", 1)
            else [],
            "data": {
                "sources": [{"files": str(work / job.get("data", "train.jsonl")), "messages": "messages"}],
                "max_length": 256,
                "packing": False,
            },
            "loss": loss,
            "train": {
                "steps": last,
                "batch_size": job.get("batch", BATCH.get(job["pair"], 8)),
                "seed": job["seed"],
                "optimizer": {"lr": job["lr"]},
                "lr_schedule": {"shape": "constant", "warmup_steps": WARMUP},
            },
            "checkpoint": {"every": 200, "keep": 10},
            "log": {"tensorboard": False, "every": 200, "stat_rows": 0},
        }
    )
    return time.process_time() - begin


def by_trl(job: dict[str, Any]) -> float:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            if state.global_step in job["steps"]:
                folder = f"{job['run']}/checkpoints/step-{state.global_step:08d}/model"
                model.save_pretrained(folder)
                tok.save_pretrained(folder)

    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    teacher = f"{job['work']}/{TEACHER.get(job['pair'], 'teacher')}"
    options = dict(job["options"])
    if options.get("use_uld_loss"):
        options["teacher_tokenizer_name_or_path"] = teacher
    config = GOLDConfig(
        output_dir=job["run"], max_steps=job["steps"][-1], per_device_train_batch_size=BATCH.get(job["pair"], 8),
        gradient_accumulation_steps=1, max_length=256, lmbda=0.0, beta=0.0, temperature=1.0, learning_rate=job["lr"],
        lr_scheduler_type="constant_with_warmup", warmup_steps=WARMUP, weight_decay=0.1, adam_beta2=0.95, seed=job["seed"],
        logging_steps=200, save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        **options,
    )  # fmt: skip
    tok = AutoTokenizer.from_pretrained(job["student"])
    models = (AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in (job["student"], teacher))
    data = load_dataset("json", data_files=f"{job['work']}/train.jsonl", split="train")
    student, frozen = models
    trainer = GOLDTrainer(
        model=student, teacher_model=frozen, args=config, train_dataset=data, processing_class=tok, callbacks=[Keep()]
    )
    begin = time.process_time()
    trainer.train()
    return time.process_time() - begin


def bits_per_byte(model: Path, held: Path) -> float:
    """Of the answers, without the end of text: the same bytes for every tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net, tok = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    bits = count = 0.0
    for line in held.read_text(encoding="utf-8").splitlines():
        prompt, answer = (message["content"] for message in json.loads(line)["messages"])
        encoded = tok(prompt + answer, return_offsets_mapping=True, add_special_tokens=False)
        ids = torch.tensor([encoded["input_ids"]])
        labels = ids.clone()
        # The answer begins with a space, which no token joins with what is before it.
        labels[0, [i for i, (begin, _) in enumerate(encoded["offset_mapping"]) if begin < len(prompt)]] = -100
        with torch.no_grad():
            bits += net(ids, labels=labels).loss.item() * int((labels != -100).sum()) / math.log(2)
        count += len(answer.encode())
    return bits / count


def main(options: argparse.Namespace) -> None:
    work = options.work.resolve()
    prepare(work)
    jobs = [
        (pair, lr, steps[: options.lengths], seed, way)
        for pair, lr, steps, seeds, ways in CASES
        for seed in seeds
        for way in ways
    ]
    for pair, lr, steps, seed, way in jobs:
        if pair == "real":
            if options.tokenizers is None:
                continue
            prepare_real(work, options.tokenizers)
        name = f"{pair}-{lr:.0e}-{way}-{seed}"
        there = results().get(pair, {}).get(f"{lr:.0e}", {}).get(way, {}).get(str(seed), {})
        if seed >= options.seeds or str(steps[-1]) in there:
            continue
        try:
            (work / f"{name}.lock").touch(exist_ok=False)
        except FileExistsError:
            continue
        student = work / f"student-{pair}-{seed}"
        if pair == "900, taught":
            folder = work / "-".join((*TAUGHT_BY, "0")) / "checkpoints"
            student = max(folder.glob("step-*"), default=folder) / "model"
        by, settings = WAYS[way]
        job = {
            "work": str(work), "run": str(work / name), "student": str(student),
            "options": settings, "steps": steps, "lr": lr, "seed": seed, "by": by, "pair": pair,
        }  # fmt: skip
        print(f"{pair}, {lr:.0e}, seed {seed}: {way}", flush=True)
        found = run(job, options.trl, work)
        everything = results()  # again: another process may have written
        everything.setdefault(pair, {}).setdefault(f"{lr:.0e}", {}).setdefault(way, {})[str(seed)] = found
        RESULT.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    return found


def launched(job: dict[str, Any], python: str) -> float:
    """The processor seconds of a job in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, __file__, "--job", json.dumps(job)], check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout.splitlines()[-1])


def run(job: dict[str, Any], trl: str, work: Path) -> dict[str, float]:
    found = {"seconds": launched(job, trl if job["by"] == "trl" else sys.executable)}
    for step in job["steps"]:
        model = Path(job["run"]) / "checkpoints" / f"step-{step:08d}" / "model"
        found[str(step)] = round(bits_per_byte(model, work / "held.jsonl"), 4)
    print(found, flush=True)
    return found


def write_docs() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")


def with_tables(text: str) -> str:
    """The page with the tables of the results between their marks."""
    found = results()
    begin, end = "<!-- cross_quality.json -->", "<!-- end -->"
    before, rest = text.split(begin)
    tables = [table(pair, lr, ways) for pair in found for lr, ways in found[pair].items() if any(ways.values())]
    return f"{before}{begin}\n" + "\n\n".join(tables) + f"\n{end}{rest.split(end, 1)[1]}"


def table(pair: str, lr: str, ways: dict[str, dict[str, dict[str, float]]]) -> str:
    steps = sorted({int(step) for runs in ways.values() for found in runs.values() for step in found if step.isdigit()})
    head = [
        f"{PAIRS[pair]}, learning rate {float(lr):g}",
        *(f"{step:,} steps" for step in steps),
        "processor seconds a step",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for way, runs in ((way, ways[way]) for way in LABELS if ways.get(way)):
        cells = [spread([found[str(step)] for found in runs.values() if str(step) in found]) for step in steps]
        # A run that was stopped has been scored, but has no time.
        whole = [found for found in runs.values() if "seconds" in found]
        a_step = [found["seconds"] / max(int(step) for step in found if step.isdigit()) for found in whole]
        label = "**potstill**" if (pair, way) == ("900, taught", "potstill") else LABELS[way]
        lines.append(f"| {label} | {' | '.join(cells)} | {f'{mean(a_step):.3f}' if a_step else '–'} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    return (
        f"{values[0]:.3f} (1 seed)" if len(values) == 1 else f"{mean(values):.3f} ± {stdev(values):.3f} ({len(values)})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-cross-quality"))
    parser.add_argument("--trl", default="python", help="a Python that has TRL")
    parser.add_argument("--tokenizers", type=Path, help="a folder with smollm2/ and gpt2/, for the real pair")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lengths", type=int, help="only the first so many of the lengths")
    parser.add_argument("--only-docs", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        job = json.loads(chosen.job)
        print(by_trl(job) if job["by"] == "trl" else by_potstill(job))
    elif chosen.only_docs:
        write_docs()
    else:
        main(chosen)
