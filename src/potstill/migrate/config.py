"""Another system's configuration as a recipe, with a word about every key of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from potstill.config import Recipe
from potstill.errors import PotstillError
from potstill.migrate import other_keys, trl_keys
from potstill.migrate.values import CONVERSIONS
from potstill.recipe_text.plain_yaml import read_yaml

TABLES = {**trl_keys.TABLES, **other_keys.TABLES}
SYSTEMS = tuple(name for name in TABLES if name != "trl")
DROPPED, OTHER = "− ", "≠ "


@dataclass(frozen=True)
class Migrated:
    """Dotted keys of a recipe with their values, which of theirs each is from, and what became of the others."""

    keys: dict[str, Any]
    origins: dict[str, str]
    dropped: dict[str, str] = field(default_factory=dict)  # theirs → why
    other: dict[str, str] = field(default_factory=dict)  # theirs → what takes its place
    unknown: tuple[str, ...] = ()  # theirs that no table has
    problems: tuple[str, ...] = ()  # of the recipe as a whole


def tables_of(system: str) -> list[Mapping[str, str]]:
    """A system's own first, then those whose arguments it takes over."""
    if system not in SYSTEMS:
        raise PotstillError(f"--from {system}: there is no such system here; there are {', '.join(SYSTEMS)}")
    above = (
        ["trl", "hf"]
        if system.startswith("trl-")
        else ["hf"]
        if system in ("axolotl", "ms-swift", "distillkit")
        else []
    )
    return [TABLES[name] for name in (system, *above)]


@cache
def rules(system: str) -> dict[str, str]:
    """Theirs → ours."""
    found: dict[str, str] = {}
    for table in tables_of(system):
        for ours, names in table.items():
            for theirs in names.split():
                found.setdefault(theirs, ours)
    return found


def rule_for(system: str, theirs: str) -> tuple[str, list[str]] | None:
    """What a key is here, and what stands at its places of lists and mappings."""
    known = rules(system)
    if theirs in known:
        return known[theirs], []
    for pattern, ours in known.items():
        if "[]" in pattern or "<name>" in pattern:
            wanted = re.escape(pattern).replace(r"\[\]", r"\.(\d+)").replace("<name>", r"([^.]+)")
            if match := re.fullmatch(wanted, theirs):
                return ours, list(match.groups())
    return None


def read_file(path: Path) -> dict[str, Any]:
    """YAML or JSON; of command-line flags, one `--name: value` a line."""
    try:
        found = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PotstillError(f"cannot read {path}: {error.strerror or error}") from None
    except (PotstillError, UnicodeDecodeError) as error:
        raise PotstillError(f"{path} is neither YAML nor JSON: {error}") from None
    if not isinstance(found, dict):
        raise PotstillError(f"{path} holds no keys: expected a mapping such as learning_rate: 1.0e-5")
    return found


def migrate(theirs: Mapping[str, Any], system: str) -> Migrated:
    found = Migrated({}, {})
    unknown: list[str] = []
    names: list[str] = []  # of mappings, in the order in which they are met: they are places of a list here
    for key, value in _flat(theirs, rules(system)):
        rule = rule_for(system, key)
        if rule is None:
            unknown.append(key)
        elif rule[0].startswith(DROPPED):
            found.dropped[key] = rule[0][2:]
        elif rule[0].startswith(OTHER):
            found.other[key] = rule[0][2:]
        elif value is not None:
            _take(found, key, value, rule[0], [_place(at, names) for at in rule[1]])
    _settle(found)
    _fill(found)
    return Migrated(found.keys, found.origins, found.dropped, found.other, tuple(unknown), tuple(_fit(found)))


def _flat(value: Any, known: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by their dotted keys; a mapping that is a key of its own is left whole."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if _records(value) else None
    if inner is None or prefix in known or not value:
        yield prefix, value
        return
    for key, sub in inner:
        yield from _flat(sub, known, f"{prefix}.{key}" if prefix else str(key))


def _records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _place(at: str, names: list[str]) -> int:
    if at.isdecimal():
        return int(at)
    if at not in names:
        names.append(at)
    return names.index(at)


def _take(found: Migrated, theirs: str, value: Any, rule: str, places: list[int]) -> None:
    ours, _, conversion = (part.strip() for part in rule.partition("|"))
    for place in places:
        ours = ours.replace("[]", f"[{place}]", 1)
    made = CONVERSIONS[conversion](ours, value) if conversion else {ours: value}
    if not made:
        found.other[theirs] = f"{ours}: {value!r} has no counterpart, or is what is done anyway"
    for key, each in made.items():
        found.keys[key], found.origins[key] = each, theirs


def _leave_out(found: Migrated, key: str, why: str) -> None:
    if key in found.keys:
        del found.keys[key]
        found.other[found.origins.pop(key)] = f"{key}: {why}"


def _settle(found: Migrated) -> None:
    """Keys that only go together, or not together."""
    keys, origins = found.keys, found.origins
    passes = keys.pop("train.batch_size ×", None)
    if passes is not None:
        origin = origins.pop("train.batch_size ×")
        if "train.batch_size" not in keys:
            keys["train.batch_size"] = passes * keys.get("train.micro_batch_size", 1)
            origins["train.batch_size"] = f"{origin} × rows of a forward pass; × processes"
    if "train.steps" in keys:
        _leave_out(found, "train.epochs", "train.steps is given")
    if "train.tokens_per_micro_batch" in keys:
        _leave_out(found, "train.micro_batch_size", "train.tokens_per_micro_batch is given")
    if keys.get("train.lr_schedule.warmup_steps"):
        _leave_out(found, "train.lr_schedule.warmup_ratio", "warmup_steps is given")
    prompts, answers = keys.get("rollouts.generation_batch_size"), keys.get("rollouts.num_generations", 1)
    if prompts is not None:
        if "train.batch_size" not in keys:
            keys["train.batch_size"] = prompts * answers
            origins["train.batch_size"] = f"{origins['rollouts.generation_batch_size']} × num_generations"
        _leave_out(found, "rollouts.generation_batch_size", "train.batch_size ÷ rollouts.num_generations, always")
    if not any(key.startswith("eval.data") for key in keys):
        for key in [key for key in keys if key.startswith("eval.")]:
            _leave_out(found, key, "goes with eval.data, held-out text, which is to be named first")
    _settle_writing(found)
    for place in {match[1] for key in keys if (match := re.match(r"teachers\[(\d+)\]", key))}:
        _settle_teacher(found, f"teachers[{place}]")


def _settle_writing(found: Migrated) -> None:
    keys, engine = found.keys, "rollouts.engine"
    if f"{engine}.server" in keys:
        for key in [key for key in keys if key.startswith(f"{engine}.options")]:
            _leave_out(found, key, "a server was started with its own")
    if any(key.startswith((f"{engine}.server", f"{engine}.options")) for key in keys):
        keys[f"{engine}.kind"] = "vllm"
        found.origins.setdefault(f"{engine}.kind", "its server or options")
    new, longest = keys.get("rollouts.sampling.max_new_tokens", 256), keys.get("data.max_length", 1024)
    if any(keys.get(f"rollouts.{who}_fraction") for who in ("on_policy", "teacher")) and new >= longest:
        keys["data.max_length"], found.origins["data.max_length"] = 2 * new, "fill in: prompt and answer together"


def _settle_teacher(found: Migrated, where: str) -> None:
    keys = found.keys
    if f"{where}.decay" in keys and f"{where}.model" not in keys:
        keys[f"{where}.student"], found.origins[f"{where}.student"] = "ema", found.origins[f"{where}.decay"]
    else:
        _leave_out(found, f"{where}.decay", "goes with student: ema")
    if f"{where}.server" in keys:
        _leave_out(found, f"{where}.model", "the teacher is behind a server")
        for name in ("revision", "dtype", "quantize", "attn_implementation", "tp", "placement"):
            _leave_out(found, f"{where}.{name}", "goes with model: a server was started with its own")
    else:
        for key in [key for key in keys if key.startswith(f"{where}.remote")]:
            _leave_out(found, key, "goes with server: a teacher in the process is exact")


def _fill(found: Migrated) -> None:
    """What a recipe cannot do without, and the configuration did not tell."""
    keys = found.keys
    origin = r"\.(model|server|cache|student|source)$"
    places = sorted({match[0] for key in keys if (match := re.match(r"teachers\[\d+\]", key))}) or ["teachers[0]"]
    needed: dict[str, Any] = {
        f"{at}.model": "TEACHER" for at in places if not any(re.match(re.escape(at) + origin, key) for key in keys)
    }
    needed |= {} if "student.model" in keys else {"student.model": "STUDENT"}
    read = any(re.match(r"data\.sources\[0\]\.(files|dataset)$", key) for key in keys)
    needed |= {} if read else {"data.sources[0].files": "DATA.jsonl"}
    needed |= {} if {"train.steps", "train.epochs"} & set(keys) else {"train.steps": 1000}
    for key, value in needed.items():
        keys[key], found.origins[key] = value, "fill in"


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """`teachers[0].model` and the like as sections and lists."""
    root: dict[str, Any] = {}
    for key, value in sorted(keys.items(), key=lambda item: [int(n) for n in re.findall(r"\[(\d+)\]", item[0])]):
        node: Any = root
        parts = key.replace("[", ".").replace("]", "").split(".")
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            at: Any = int(part) if part.isdecimal() else part
            empty: Any = [] if following is not None and following.isdecimal() else {}
            new = value if following is None else empty
            if isinstance(node, list):
                node.extend({} for _ in range(len(node), at + 1))
                node[at] = node[at] or new
            elif following is None or at not in node:
                node[at] = new
            node = node[at]
    return root


def _fit(found: Migrated) -> list[str]:
    """Leave out values that a recipe cannot take; gives what is still wrong with the rest."""
    while True:
        try:
            Recipe.model_validate(nested(found.keys))
            return []
        except ValidationError as error:
            details = error.errors(include_url=False)
        before = len(found.keys)
        for detail in details:
            at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])[1:]
            exact = [key for key in found.keys if at and (at == key or at.startswith((f"{key}.", f"{key}[")))]
            for key in exact:
                _leave_out(found, key, f"{found.keys[key]!r}: {detail['msg'].removeprefix('Value error, ')}")
        if len(found.keys) == before:
            return [detail["msg"].removeprefix("Value error, ") for detail in details]
