"""Write docs/migrating.md from the tables of keys in src/potstill/migrate.

python tools/write_migrating_docs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from potstill.migrate.config import DROPPED, OTHER, TABLES

DOC = Path(__file__).resolve().parents[1] / "docs" / "migrating.md"
NAMES = {
    "trl": "TRL, what its trainers share",
    "trl-distillation": "TRL, DistillationConfig",
    "trl-gkd": "TRL, GKDConfig",
    "trl-gold": "TRL, GOLDConfig",
    "trl-server": "TRL, ServerDistillationConfig",
    "trl-async": "TRL, AsyncDistillationConfig",
    "trl-iw-opd": "TRL, IWOPDConfig",
    "trl-sdft": "TRL, SDFTConfig",
    "trl-minillm": "TRL, MiniLLMConfig",
    "hf": "Hugging Face TrainingArguments and TRL's SFTConfig",
    "nemo-rl": "NeMo-RL, distillation",
    "nemo-rl-x-token": "NeMo-RL, cross-tokenizer distillation",
    "nemo-rl-mopd": "NeMo-RL, multi-teacher on-policy distillation",
    "automodel": "NeMo Automodel, knowledge distillation",
    "maxtext": "MaxText, distillation",
    "distillkit": "DistillKit",
    "ms-swift": "ms-swift, GKD",
    "axolotl": "axolotl, knowledge distillation",
    "verl": "verl, distillation",
    "kdflow": "KDFlow",
    "slime": "slime, on-policy distillation",
    "tinker": "tinker cookbook, on-policy distillation",
}
OPENING = """\
# Coming from another system

<!-- Written by tools/write_migrating_docs.py from the tables in src/potstill/migrate: change those, not this page. -->

`potstill migrate FILE --from SYSTEM --out mine.yaml` turns a configuration (YAML or JSON) into a recipe. Each key of
the recipe has a comment that names the key it is from. Below it stands what has another place or means something else
here, what was dropped and why, and what is not known. Keys that a recipe needs and the file does not tell are marked
`fill in`: models and data sets that were given on a command line or in Python. Then `potstill doctor mine.yaml` says
whether it will do.

The recipe has been checked as `train` checks it; values that a recipe cannot take are left out and listed. Learning
rates, batch sizes and lengths are taken as they are. The defaults of the other system are not: a key that the file
leaves out gets potstill's own.

The tables name every key that `migrate` knows. The TRL systems, axolotl, ms-swift and DistillKit also take the keys
of `hf`, and the TRL systems those that they share.
"""


def migrating_docs() -> str:
    assert set(NAMES) == set(TABLES)
    return OPENING + "".join(f"\n## {NAMES[name]}\n\n" + "\n".join(_table(name)) + "\n" for name in TABLES)


def _table(name: str) -> Iterator[str]:
    yield ("These keys go for every `--from trl-…`." if name == "trl" else f"`--from {name}`") + "\n"
    if not TABLES[name]:
        yield "It has no keys beyond those that are shared."
        return
    yield "| theirs | here |"
    yield "|---|---|"
    for ours, theirs in TABLES[name].items():
        keys = ", ".join(f"`{key}`" for key in theirs.split())
        yield f"| {keys} | {_said(ours)} |"


def _said(ours: str) -> str:
    if ours.startswith(DROPPED):
        return f"dropped: {ours[2:]}"
    if ours.startswith(OTHER):
        return f"something else: {ours[2:]}".replace("|", "or").replace("<", "&lt;")
    key, _, conversion = ours.partition(" | ")
    return f"`{key}`" + (", converted" if conversion else "")


if __name__ == "__main__":
    DOC.write_text(migrating_docs(), encoding="utf-8")
