"""Try every family of models for everything it can be used for, and write docs/models.md.

python tools/write_models_docs.py              all families, two at a time; goes on where it was stopped
python tools/write_models_docs.py qwen3 opt    these alone, to the terminal

Each family is a tiny random model of its architecture, in a process of its own. No weights are fetched.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import model_modes
import torch
from model_families import FAMILIES, Family

from potstill.config import StudentConfig
from potstill.files import write_text
from potstill.models import load_student
from potstill.types import PotstillError

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "models.md"
RESULT = ROOT / "benchmarks" / "results" / "models.json"
SECONDS = 300  # for one family; on a busy machine most take ten


def main() -> None:
    options = _options()
    chosen = [family for family in FAMILIES if not options.families or family.model_type in options.families]
    if options.families:
        for found in tried(chosen, options.jobs):
            print(json.dumps(found, indent=1, ensure_ascii=False), flush=True)
        return
    results = _unfinished() or {"machine": _machine(), "finished": None, "families": {}}
    left = [family for family in chosen if family.model_type not in results["families"]]
    for found in tried(left, options.jobs):
        results["families"][found["model_type"]] = found
        write_text(RESULT, _json(results))
        print(f"{len(results['families'])}/{len(FAMILIES)} {_line(found)}", flush=True)
    results["families"] = {f.model_type: results["families"][f.model_type] for f in FAMILIES}
    results["finished"] = datetime.now(UTC).date().isoformat()
    write_text(RESULT, _json(results))
    write_text(DOC, page(results))


def tried(families: Sequence[Family], jobs: int) -> Any:
    torch.set_num_threads(1)
    load_student(
        StudentConfig(config=model_modes.LEARNER, tokenizer=model_modes.TOKENIZER), model_modes.CPU, 0
    )  # imports
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(try_family, families)


def try_family(family: Family) -> dict[str, Any]:
    """In a process of its own, which is ended when it takes too long."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_all_modes, args=(family, there))
    begin = time.monotonic()
    process.start()
    there.close()
    modes: dict[str, Any] = {}
    made = ""
    # Its end is waited for too: a process started meanwhile has the other end of the pipe open as well.
    while ready := wait([here, process.sentinel], max(0.0, begin + SECONDS - time.monotonic())):
        if not here.poll():
            if process.sentinel in ready:
                break
            continue
        try:
            mode, found = here.recv()
        except EOFError:
            break
        if mode is None:
            made = found
        else:
            modes[mode] = found
    process.kill()
    process.join()
    for mode in model_modes.MODES:
        modes.setdefault(mode, {"works": False, "says": made if made.startswith("cannot") else "the process ended"})
    return {
        "model_type": family.model_type,
        "name": family.name,
        "parameters": made,
        "modes": modes,
        "seconds": round(time.monotonic() - begin, 1),
    }


def _all_modes(family: Family, results: Connection) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            results.send((None, model_modes.make(family, folder)))
        except Exception as error:
            results.send((None, f"cannot be made: {sentence(error)}"))
            return
        for mode in model_modes.MODES:
            results.send((mode, try_mode(mode, folder)))


def try_mode(mode: str, folder: Path) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        works, says = True, model_modes.MODES[mode](folder)
    except Exception as error:
        works, says = False, sentence(error)
        if not isinstance(error, PotstillError | model_modes.Off):
            traceback.print_exc()
    return {"works": works, "says": says, "seconds": round(time.monotonic() - begin, 1)}


def sentence(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0]
    return said if isinstance(error, PotstillError | model_modes.Off) else f"{type(error).__name__}: {said}"


def _unfinished() -> dict[str, Any] | None:
    """What an interrupted run of the same versions has found."""
    if not RESULT.exists():
        return None
    known: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    same = known["finished"] is None and known["machine"] == _machine()
    return known if same else None


def _machine() -> dict[str, Any]:
    versions = {name: version(name).split("+")[0] for name in ("torch", "transformers", "tokenizers")}
    return {"cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def _json(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=1, ensure_ascii=False) + "\n"


def _line(found: dict[str, Any]) -> str:
    words = [f"{mode} {'yes' if how['works'] else 'NO: ' + how['says']}" for mode, how in found["modes"].items()]
    return f"{found['model_type']} ({found['seconds']} s): {'; '.join(words)}"


OPENING = """\
# Models

<!-- Written by tools/write_models_docs.py from benchmarks/results/models.json: change these, not this file. -->

Students and teachers are causal language models of transformers. What potstill has to know about one it finds out when the
model is loaded, by trying it on a short text, and a model that does something it does not know is refused:

- **Between the last hidden state and the logits** there may be a bias, a soft cap and a scale, before or behind the head. What
  enters the head and what is done to what leaves it are compared, in float32 whatever the model's dtype.
- **Packing** (`data.packing`): another first document in a row may not change the second one at all. Models that carry a state
  from token to token (Mamba and its hybrids, linear attention, convolutions) cannot be packed: set `data.packing: false`.
- **Writing**: what is written token by token, with rows that end early and several texts of one prompt, must be what the model
  says of each text alone. Where the fastest way is not right, a slower one is taken and said.

Some models need a word of their own:

- **Models that also see** (Qwen-VL, Qwen3.5, Gemma 3, Llama 4, Mistral Small 3, InternVL, Llava …) are loaded whole. Their
  language model learns and teaches, on text; their other parts are saved as they are, with the files of their processor.
  `AutoModelForImageTextToText` loads what a run saves. In a fresh model (`student.config`) a `vision_config` asks for the
  whole; without one you get the language model alone, where transformers has it.
- **Mixtures of experts**: a student also learns by the loss that balances them, where transformers has one
  ([students.md](students.md#mixtures-of-experts)).
- **Rotary factors that change with the length** (Phi-3's longrope): rows longer than `original_max_position_embeddings` are
  read apart from the shorter ones of their batch, as each would be alone. With `data.max_length` beyond that length, packing
  and writing are refused.
- **Added tokens without an embedding** (Gemma 3 1B has one, for images): the model is loaded and says so; a text that holds
  such a token is refused, and so is a chat template that writes one.
- **Tokenizers** are read from `tokenizer.json`, also beside a `tekken.json`; mistral-common is not needed.

The table is made by `python tools/write_models_docs.py`, from a tiny random model of each architecture, in float32 on a CPU.
It shows that the code of an architecture works with potstill, not that a certain checkpoint was tried.

| column | what is tried |
|---|---|
| student | loss and gradients of padded documents are those of each one alone, by the model's own logits (to 0.1 %) |
| teacher | the same of the divergence to it and of its student's gradients |
| packing | loss and gradients of documents in one row are those of documents in rows of their own |
| writing | texts of several prompts, two of each, some ending early, have the log-probabilities of a pass over each alone |
| bf16 | loaded in bfloat16 as student and as teacher, a loss within 5 % of the one in float32, an optimizer step |
| resume | a run that is ended after two of three steps and started again ends with the same bits as one that was not |
"""


def page(results: dict[str, Any]) -> str:
    families, modes = list(results["families"].values()), list(model_modes.MODES)
    said: list[str] = []

    def cell(how: dict[str, Any]) -> str:
        reason = re.sub(r" \([^()]* attention\)", "", how["says"])  # the same for many families
        if reason and reason not in said:
            said.append(reason)
        return ("yes" if how["works"] else "no") + (f" [{said.index(reason) + 1}]" if reason else "")

    lines = ["| family | `model_type` | " + " | ".join(modes) + " |", "|---|---|" + "---|" * len(modes)]
    for found in families:
        cells = [cell(found["modes"][mode]) for mode in modes]
        lines.append(f"| {found['name']} | `{found['model_type']}` | " + " | ".join(cells) + " |")
    works = {mode: sum(found["modes"][mode]["works"] for found in families) for mode in modes}
    shares = [f"**{works[mode]} of {len(families)}, {100 * works[mode] / len(families):.0f} %**" for mode in modes]
    lines.append("| **all** | | " + " | ".join(shares) + " |")
    versions = ", ".join(f"{name} {number}" for name, number in results["machine"]["versions"].items())
    notes = "\n".join(f"{number}. {_escaped(text)}" for number, text in enumerate(said, 1))
    tried_on = f"Tried on {results['finished']} with Python {results['machine']['python']}, {versions}.\n"
    return "\n".join([OPENING.rstrip(), "", tried_on, *lines, "", notes, ""])


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", choices=[*(f.model_type for f in FAMILIES), []], metavar="FAMILY")
    parser.add_argument("--jobs", type=int, default=2, help="families at once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
