"""On-policy steps beside TRL's GOLD trainer, buffered and one call a micro-batch, and `potstill serve` under load.

python benchmarks/on_policy.py --work DIR [--vllm PYTHON] [--cases NAME …]    writes benchmarks/results/on_policy.json

Both sides train the same student on the same prompts with reverse KL to the same live teacher: 32 prompt tokens, 64 new tokens,
micro-batches of 4, accumulation 8, 2 generations a prompt, temperature 1, transformers generation, float32. The weights are
random, so that no text ends early on either side. Each run is a process of its own, in turns; a run's step is the mean over
its steps after the first two, and the best of the rounds counts. TRL comes with the extra `bench`; `--vllm` names the Python of
an environment that tools/setup_vllm.sh made.

Pairs: `quickstart` (the shipped tokenizer, 2,048 ids; teacher 256 × 5, student 96 × 2) and `49k` (SmolLM2's 49,152 ids, from
the folder named by POTSTILL_ASSETS; teacher 512 × 8, student 256 × 4; TRL reads byte-level tokenizers only).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ASSETS = Path(os.environ.get("POTSTILL_ASSETS", Path(__file__).resolve().parents[2] / "shared" / "assets"))
RESULT = Path(__file__).parent / "results" / "on_policy.json"
ROOT = Path(__file__).resolve().parents[1]
PROMPT, NEW, MICRO, ACCUMULATION, GENERATIONS = 32, 64, 4, 8, 2
WARM = 2
PAIRS: dict[str, dict[str, Any]] = {
    "quickstart": {"tokenizer": "shipped:tokenizers/bytes-2k", "teacher": (256, 5, 4), "student": (96, 2, 4)},
    "49k": {"tokenizer": "smollm2", "teacher": (512, 8, 8), "student": (256, 4, 4)},
}
NAMES = {
    "potstill": "potstill, transformers",
    "trl": "TRL 1.16 GOLD, transformers",
    "potstill, one call a micro-batch": "potstill, one call a micro-batch",
    "potstill, vllm": "potstill, vLLM in the process",
}
PAGE = ROOT / "docs" / "on-policy.md"
BEGIN, END = "<!-- table: speed -->", "<!-- end of speed -->"


def shape(width: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 256,
    }


def prepare(pair: str, work: Path) -> None:
    """Models, and a file of prompts of equal length in both pairs' tokens."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from potstill.shipped import locate

    if (work / pair / "prompts.jsonl").exists():
        return
    known = PAIRS[pair]
    name = known["tokenizer"]
    tokenizer = AutoTokenizer.from_pretrained(
        locate(name) if name.startswith("shipped:") else ASSETS / "tokenizers" / name
    )
    for who, seed in (("teacher", 0), ("student", 1)):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **shape(*known[who]),
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(work / pair / who)
        tokenizer.save_pretrained(work / pair / who)
    import pyarrow.parquet

    texts = pyarrow.parquet.read_table(locate("shipped:corpus/train.parquet")).column("text").to_pylist()
    lines = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        for start in range(0, len(ids) - PROMPT, PROMPT):
            prompt = tokenizer.decode(ids[start : start + PROMPT - 1])
            lines.append(json.dumps({"prompt": prompt, "completion": " and so on"}))
        if len(lines) > 4000:
            break
    (work / pair / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_potstill(pair: str, side: str, work: Path, steps: int) -> tuple[list[float], list[float]]:
    """When each step was over, and how long its texts took to write."""
    import potstill
    from potstill.training.run import Callback

    times: list[float] = []
    writing: list[float] = []

    class Clock(Callback):
        def stepped(self, run: Any, metrics: Any) -> None:
            times.append(time.perf_counter())
            writing.append(metrics["rollout_seconds"])

    shutil.rmtree(work / "run", ignore_errors=True)
    engine: dict[str, Any] = {"kind": "vllm"} if side.endswith("vllm") else {}
    if side.endswith("a micro-batch"):
        engine = {"batch_size": MICRO}
    recipe = {
        "run": str(work / "run"),
        "student": {"model": str(work / pair / "student")},
        "teachers": [{"model": str(work / pair / "teacher")}],
        "data": {
            "sources": [{"files": str(work / pair / "prompts.jsonl"), "prompt": "prompt", "completion": "completion"}],
            "max_length": PROMPT + NEW + 16,
        },
        "rollouts": {
            "on_policy_fraction": 1.0,
            "num_generations": GENERATIONS,
            "engine": engine,
            "sampling": {"max_new_tokens": NEW},
        },
        "loss": {"divergence": "reverse_kl"},
        "train": {
            "steps": steps,
            "batch_size": MICRO * ACCUMULATION,
            "micro_batch_size": MICRO,
            "optimizer": {"lr": 1e-5},
            "lr_schedule": {"shape": "constant"},
        },
        "log": {"tensorboard": False, "every": 1000},
    }
    potstill.train(recipe, [Clock()])
    return times, writing


def run_trl(pair: str, work: Path, steps: int) -> list[float]:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(work / pair / "student")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = load_dataset("json", data_files=str(work / pair / "prompts.jsonl"), split="train")
    chats = data.map(
        lambda record: {
            "messages": [
                {"role": "user", "content": record["prompt"]},
                {"role": "assistant", "content": record["completion"]},
            ]
        },
        remove_columns=data.column_names,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{% generation %}{% endgeneration %}"
        "{{ eos_token }}{% endif %}{% endfor %}"
    )
    arguments = GOLDConfig(
        output_dir=str(work / "trl"),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=GENERATIONS,
        max_steps=steps,
        lmbda=1.0,
        beta=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_completion_length=NEW,
        max_length=PROMPT + NEW + 16,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = GOLDTrainer(
        model=AutoModelForCausalLM.from_pretrained(work / pair / "student"),
        teacher_model=AutoModelForCausalLM.from_pretrained(work / pair / "teacher"),
        args=arguments,
        train_dataset=chats,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return times


def run_serve(work: Path, clients: int, seconds: float) -> dict[str, float]:
    """Tokens a second of a teacher asked directly, and through `potstill serve` by several clients at once, in turns. Documents
    of 128 tokens, the top 64 and the rest of each; the model has one thread on both sides, the clients another core."""
    import numpy as np
    import torch

    from potstill.config import TeacherConfig
    from potstill.data import collate
    from potstill.models import load_teacher
    from potstill.signals.kinds import TopK
    from potstill.teachers.remote import open_server
    from potstill.types import Example

    folder = work / "49k" / "teacher"
    teacher = load_teacher(TeacherConfig(model=str(folder)), torch.device("cpu"), "teachers[0]")
    form = TopK(len(teacher.tokenizer), k=64)
    random = np.random.default_rng(0)

    def documents(count: int) -> list[Example]:
        made = []
        for _ in range(count):
            ids = random.integers(5, form.vocabulary, 128).astype(np.int32)
            supervised = np.ones(128, dtype=np.bool_)
            supervised[0] = False
            made.append(Example("0" * 32, "", ids, supervised, 1))
        return made

    some = documents(32)

    @torch.no_grad()
    def bare() -> float:
        begin, tokens = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            batch = collate([[e] for e in some], 0)
            hidden = teacher.hidden(batch, batch.rows.teacher)
            form.compute(teacher.at_rows(hidden, form.vocabulary), batch.rows.labels)
            tokens += batch.supervised_tokens
        return tokens / (time.perf_counter() - begin)

    line = [sys.executable, "-m", "potstill", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))

    origins = [open_server(TeacherConfig(server=address), f"client {i}") for i in range(clients)]

    def served() -> float:
        done = [0] * clients
        end = time.perf_counter() + seconds

        def client(which: int) -> None:
            mine = documents(8)
            while time.perf_counter() < end:
                origins[which].server.score(form, mine)
                done[which] += sum(e.supervised_tokens for e in mine)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / (time.perf_counter() - begin)

    try:
        served()
        pairs = [(bare(), served()) for _ in range(3)]
    finally:
        for origin in origins:
            origin.close()
        process.terminate()
        process.wait()
    return {"bare": max(b for b, _ in pairs), "served": max(s for _, s in pairs)}


def case(name: str, pair: str, work: Path, steps: int) -> None:
    """In a process of its own: prints a line of JSON."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if name == "serve":
        print(json.dumps(run_serve(work, 8, 10.0)))
        return
    times, writing = (run_trl(pair, work, steps), []) if name == "trl" else run_potstill(pair, name, work, steps)
    found = {"seconds_per_step": (times[-1] - times[WARM - 1]) / (len(times) - WARM)}
    if writing:
        found["seconds_writing"] = sum(writing[WARM:]) / (len(writing) - WARM)
    print(json.dumps(found))


def measured(name: str, pair: str, work: Path, steps: int, python: str) -> dict[str, float]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    line = [python, __file__, "--work", str(work), "--case", name, "--pair", pair, "--steps", str(steps)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{name}, {pair}:\n{done.stdout}\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--case")
    parser.add_argument("--pair", default="quickstart")
    parser.add_argument("--pairs", nargs="*", default=list(PAIRS))
    parser.add_argument("--cases", nargs="*", default=["potstill", "trl", "potstill, one call a micro-batch", "serve"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="Python of the environment with vLLM")
    options = parser.parse_args()
    if options.case:
        return case(options.case, options.pair, options.work, options.steps)
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"steps": {}, "serve": {}}
    result["settings"] = {
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "micro_batch_size": MICRO,
        "accumulation": ACCUMULATION,
        "num_generations": GENERATIONS,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "2")),
        "rounds": options.rounds,
    }
    for pair in options.pairs:
        prepare(pair, options.work)
        sides = [name for name in options.cases if name != "serve"] + (["potstill, vllm"] if options.vllm else [])
        best: dict[str, dict[str, float]] = {}
        for number in range(options.rounds):
            for side in sides:
                python = options.vllm if side.endswith("vllm") else sys.executable
                found = measured(side, pair, options.work, options.steps, python)
                known = best.setdefault(side, found)
                best[side] = {key: min(value, known[key]) for key, value in found.items()}
                print(f"round {number + 1}, {pair}, {side}: {found}", flush=True)
        result["steps"].setdefault(pair, {}).update(best)
    if "serve" in options.cases:
        prepare("49k", options.work)
        result["serve"] = measured("serve", "49k", options.work, options.steps, sys.executable)
        print(f"serve: {result['serve']}")
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    write_docs(result)


def table(result: dict[str, Any]) -> str:
    lines = ["| pair | | seconds a step | of them writing | against potstill's |", "|---|---|---|---|---|"]
    for pair, best in result["steps"].items():
        ours = best["potstill"]["seconds_per_step"]
        for side, found in best.items():
            writing = f"{found['seconds_writing']:.2f}" if "seconds_writing" in found else "–"
            ratio = found["seconds_per_step"] / ours
            lines.append(f"| {pair} | {NAMES[side]} | {found['seconds_per_step']:.2f} | {writing} | {ratio:.2f} × |")
    if found := result["serve"]:
        share = found["served"] / found["bare"]
        lines += [
            "",
            f"`potstill serve`, 8 clients at once: {found['served']:,.0f} tokens a second; the model asked directly: ",
        ]
        lines[-1] += f"{found['bare']:,.0f} ({share:.0%})."
    return "\n".join(lines)


def write_docs(result: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(result)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
