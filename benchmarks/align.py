"""How fast two tokenizations are aligned, how that grows with the text, and beside TRL's aligner.

python benchmarks/align.py            writes benchmarks/results/align.json and prints a table

Needs real tokenizers and text: the folder named by POTSTILL_ASSETS, or ../shared/assets. TRL is measured where it is installed
(`pip install -e '.[bench]'`). Tokens are those of both sides; tables are ready, ids are arrays. Everything is one thread, and
seconds are its processor time, so that waiting for a busy core does not count; the best of several rounds, because what
else the machine does only ever adds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

for threads in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(threads, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np  # noqa: E402
import tokenizers  # noqa: E402

from potstill.report.alignment import Counts, count  # noqa: E402
from potstill.text import TokenTable, align, align_batch, vocab_map  # noqa: E402

ASSETS = Path(os.environ.get("POTSTILL_ASSETS", Path(__file__).resolve().parents[2] / "shared" / "assets"))
RESULT = Path(__file__).parent / "results" / "align.json"
NAMES = ("deepseek_v3", "gpt2", "mistral_7b_v0_1", "phi-4", "qwen3", "smollm2")
PAIRS = (  # the first four are byte-level on both sides
    ("smollm2", "qwen3"), ("smollm2", "gpt2"), ("qwen3", "deepseek_v3"), ("phi-4", "smollm2"), ("smollm2", "mistral_7b_v0_1"),
    ("mistral_7b_v0_1", "qwen3"),
)  # fmt: skip
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)  # tokens of the student's
DOCUMENT, BATCH = 8_000, 32  # characters of a document, documents of a batch


def best(call: Callable[[], Any], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)


class Real:
    """The real tokenizers with their tables, and text."""

    def __init__(self) -> None:
        self.toks = {name: self.load(name) for name in NAMES}
        self.tables = {name: TokenTable.from_tokenizer(tok, cache=None) for name, tok in self.toks.items()}
        self.prose = (ASSETS / "data" / "wikitext2_raw" / "wiki.test.raw").read_text(encoding="utf-8")
        folder = ASSETS / "data" / "udhr" / "txt"
        self.languages = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]

    @staticmethod
    def load(name: str) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizers" / name / "tokenizer.json"))

    def ids(self, name: str, texts: list[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, dtype=np.int32) for encoding in self.toks[name].encode_batch(texts)]


def pairs(real: Real, rounds: int) -> list[dict[str, Any]]:
    documents = [real.prose[at : at + DOCUMENT] for at in range(0, len(real.prose), DOCUMENT)]
    rows = []
    for corpus, texts in (("wikitext-2 test", documents), ("udhr, 20 languages", real.languages)):
        for a, b in PAIRS:
            ours, theirs = real.ids(a, texts), real.ids(b, texts)
            tables = real.tables[a], real.tables[b]
            batches = [(ours[at : at + BATCH], theirs[at : at + BATCH]) for at in range(0, len(texts), BATCH)]
            tokens = sum(map(len, ours)) + sum(map(len, theirs))
            seconds = best(
                lambda batches=batches, tables=tables: [align_batch(x, y, *tables) for x, y in batches], rounds
            )
            counts = Counts()
            for x, found in zip(ours, align_batch(ours, theirs, *tables), strict=True):
                counts += count(found, x, tables[0])
            rows.append({
                "corpus": corpus, "student": a, "teacher": b, "documents": len(texts), "tokens": tokens,
                "tokens_per_second": round(tokens / seconds), **{k: round(v, 5) for k, v in counts.shares().items()},
            })  # fmt: skip
            print(f"{corpus:<20} {a:>16} {b:<16} {tokens / seconds / 1e6:6.1f} million tokens/s", flush=True)
    return rows


def growth(real: Real, rounds: int) -> list[dict[str, Any]]:
    """One document of more and more tokens; with `odd`, a letter differs in every 2,000 bytes or so."""
    rows = []
    for a, b, odd in (("smollm2", "gpt2", False), ("smollm2", "gpt2", True), ("smollm2", "mistral_7b_v0_1", False)):
        text = real.prose * 5
        x, y = (real.ids(name, [text])[0] for name in (a, b))
        before = np.cumsum(real.tables[a].lengths[x])
        ends = np.cumsum(real.tables[b].lengths[y])
        if odd:
            y = y.copy()
            y[500::500] = real.toks[b].token_to_id("~")
        for length in LENGTHS:
            student = x[:length]
            teacher = y[: int(np.searchsorted(ends, before[length - 1], side="right"))]
            call = lambda s=student, t=teacher, a=a, b=b: align(s, t, real.tables[a], real.tables[b])  # noqa: E731
            seconds = best(call, rounds if length > 50_000 else 5 * rounds)
            total = len(student) + len(teacher)
            found = call()
            rows.append({
                "student": a, "teacher": b, "odd": odd, "student_tokens": length, "tokens": total,
                "nanoseconds_per_token": round(seconds / total * 1e9, 1),
                "tokens_exact": round(count(found, student, real.tables[a]).shares()["tokens_exact"], 5),
            })  # fmt: skip
            print(
                f"{length:>9,} tokens, {a} / {b}{', odd' if odd else ''}: {seconds / total * 1e9:.0f} ns a token",
                flush=True,
            )
    return rows


def beside_trl(real: Real, rounds: int) -> dict[str, Any] | str:
    """TRL's own functions, unchanged, on the same ids: byte offsets as its on-policy path makes them, then its walk."""
    if find_spec("trl") is None:
        return "TRL is not installed"
    import torch
    import trl
    from transformers import PreTrainedTokenizerFast
    from trl.experimental.gold.gold_trainer import GOLDTrainer, ULDLoss

    a, b = "smollm2", "qwen3"
    text = real.prose[: 200 * DOCUMENT]
    texts = [text[at : at + DOCUMENT] for at in range(0, len(text), DOCUMENT)][:64]
    ours, theirs = real.ids(a, texts), real.ids(b, texts)
    tokens = sum(map(len, ours)) + sum(map(len, theirs))
    sides = []
    for name, sequences in ((a, ours), (b, theirs)):
        tok = PreTrainedTokenizerFast(tokenizer_object=real.toks[name])
        trainer = SimpleNamespace(
            use_uld_loss=True, teacher_tokenizer=tok, uld_loss_fn=SimpleNamespace(use_extended_uld=True), _tokenizer=tok
        )
        sides.append((trainer, [torch.from_numpy(x.astype(np.int64))[None] for x in sequences]))

    def offsets() -> list[list[Any]]:
        made: list[list[Any]] = [[], []]
        for (trainer, sequences), into in zip(sides, made, strict=True):
            for ids in sequences:
                batch = {"input_ids": ids, "labels": ids}
                GOLDTrainer._maybe_add_completion_byte_offsets(trainer, batch)
                into.append(batch["byte_offsets"][0])
        return made

    def walk(made: list[list[Any]]) -> list[Any]:
        return [ULDLoss._align_by_byte_offsets(s.tolist(), t.tolist()) for s, t in zip(*made, strict=True)]

    tables = real.tables[a], real.tables[b]
    ready = offsets()
    same = all(
        [len(g) for g in groups[0]] == (found.student_end - found.student_start).tolist()
        and [len(g) for g in groups[1]] == (found.teacher_end - found.teacher_start).tolist()
        for groups, found in zip(walk(ready), align_batch(ours, theirs, *tables), strict=True)
    )
    timed: dict[str, list[float]] = {"potstill": [], "whole": [], "walk": []}
    for _ in range(rounds):  # in turns, so that a busy minute is everybody's
        timed["potstill"].append(best(lambda: align_batch(ours, theirs, *tables), 5))
        timed["whole"].append(best(lambda: walk(offsets()), 1))
        timed["walk"].append(best(lambda: walk(ready), 1))
    potstill, whole, only_walk = (min(seconds) for seconds in timed.values())
    return {
        "trl": trl.__version__, "student": a, "teacher": b, "documents": len(texts), "tokens": tokens, "same_chunks": same,
        "potstill_tokens_per_second": round(tokens / potstill), "trl_tokens_per_second": round(tokens / whole),
        "trl_walk_alone_tokens_per_second": round(tokens / only_walk), "ratio": round(whole / potstill, 1),
        "ratio_to_walk_alone": round(only_walk / potstill, 1),
    }  # fmt: skip


def tables(real: Real, rounds: int, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for name, tok in real.toks.items():
        built = best(lambda tok=tok: TokenTable.from_tokenizer(tok, cache=None), rounds)
        TokenTable.from_tokenizer(tok, cache=folder)
        read = best(lambda tok=tok: TokenTable.from_tokenizer(tok, cache=folder), rounds)
        rows.append(
            {"tokenizer": name, "ids": len(real.tables[name]), "seconds": round(built, 3), "from_cache": round(read, 3)}
        )
        print(f"{name}: {rows[-1]['ids']:,} ids in {built:.2f} s, from the cache in {read:.2f} s", flush=True)
    return rows


def one_map(student: str, teacher: str) -> None:
    """In a process of its own: the seconds of a vocabulary map and the memory of all that it takes, as JSON."""
    loaded = [TokenTable.from_tokenizer(Real.load(name), cache=None) for name in (student, teacher)]
    begin = time.perf_counter()
    found = vocab_map(*loaded, decay=0.5)
    seconds = time.perf_counter() - begin  # the limit is on what a user waits
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({
        "student": student, "teacher": teacher, "shape": found.shape, "pairs": len(found.student),
        "entries": len(found.indices), "seconds": round(seconds, 2), "peak_megabytes": round(peak / 2**20),
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--map", nargs=2, metavar=("STUDENT", "TEACHER"), help="one vocabulary map only, as JSON")
    options = parser.parse_args()
    if not (ASSETS / "tokenizers").is_dir():
        sys.exit(f"there are no real tokenizers at {ASSETS}: name their folder with POTSTILL_ASSETS")
    if options.map:
        one_map(*options.map)
        return
    real = Real()
    command = [sys.executable, __file__, "--map", "qwen3", "deepseek_v3"]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = {
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "versions": {"numpy": np.__version__, "tokenizers": tokenizers.__version__},
        "load_before": [round(value, 2) for value in os.getloadavg()],
        "pairs": pairs(real, options.rounds),
        "growth": growth(real, options.rounds),
        "beside_trl": beside_trl(real, max(options.rounds // 5, 1)),
        "tables": tables(real, max(options.rounds // 5, 1), options.result.parent / "unfinished-tables"),
        "vocabulary_map": json.loads(made),
    }
    for file in (options.result.parent / "unfinished-tables").glob("*"):
        file.unlink()
    (options.result.parent / "unfinished-tables").rmdir()
    options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"beside_trl": result["beside_trl"], "vocabulary_map": result["vocabulary_map"]}, indent=1))


if __name__ == "__main__":
    main()
