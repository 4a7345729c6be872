"""docs/benchmarks.md and its plot, from the results of benchmarks/loss.py and nothing else."""

from __future__ import annotations

import math
from typing import Any

CONTENDERS = {
    "products": "products alone",
    "potstill": "potstill",
    "plain": "plain PyTorch",
    "liger": "Liger",
    "liger_compiled": "Liger, compiled",
    "trl_full": "TRL, full logits",
    "trl_chunked": "TRL, chunked",
}
PEERS = [name for name in CONTENDERS if name not in ("products", "potstill")]
DIVERGENCES = {"forward_kl": "forward KL", "reverse_kl": "reverse KL", "jsd": "JSD 0.5"}
FAILURES = {"memory": "out of memory", "time": "too long", "missing": "missing", "error": "failed"}
LIMITS = {"forward_kl": 1.08, "reverse_kl": 1.08, "jsd": 1.15}  # dense; top-k: 1.08
GB = 2**30

Entry = dict[str, Any]  # one case: {"case": …, "contenders": {name: …}}


def title(case: dict[str, Any]) -> str:
    target = f"top-{case['top_k']}" if case["top_k"] else "dense"
    widths = f"{case['student']}" if case["top_k"] else f"{case['student']:,} / {case['teacher']:,}"
    return f"{DIVERGENCES[case['divergence']]}, {target} · {case['rows']:,} × {case['vocabulary']:,} · {widths}"


def seconds(entry: Entry, name: str) -> float | None:
    """Processor time of the cheapest call of all processes."""
    one = entry["contenders"].get(name)
    return min(run["cpu_seconds"] for run in one["runs"]) if one and one["status"] == "ok" else None


def peak(entry: Entry, name: str) -> float | None:
    one = entry["contenders"].get(name)
    return max(run["peak_bytes"] for run in one["runs"]) if one and one["status"] == "ok" else None


def ratio(entry: Entry, name: str, to: str) -> float | None:
    ours, theirs = seconds(entry, name), seconds(entry, to)
    return ours / theirs if ours and theirs else None


def absent(entry: Entry, name: str) -> str:
    one = entry["contenders"].get(name)
    if one is None:
        return "–" if entry["case"]["top_k"] and name not in ("plain", "trl_full") else "not run"
    return FAILURES[one["status"]]


def gradient_bytes(case: dict[str, Any]) -> int:
    return 4 * case["student"] * (case["rows"] + case["vocabulary"])


def page(results: dict[str, Any]) -> str:
    entries = ordered(results)
    return TEXT.format(
        machine=machine(results["machine"]),
        limit=results["memory_gb"],
        time=time_table(entries),
        memory=memory_table(entries),
        targets=target_table(entries),
        agreement=agreement(entries),
        load=busy(entries, results["machine"]["cores"]) + f"\n{results.get('remarks', '')}".rstrip(),
        versions=", ".join(f"{name} {version}" for name, version in results["machine"]["versions"].items()),
    )


def ordered(results: dict[str, Any]) -> list[Entry]:
    def key(entry: Entry) -> tuple[Any, ...]:
        case = entry["case"]
        divergence = list(DIVERGENCES).index(case["divergence"])
        return (case["top_k"] > 0, case["vocabulary"], case["rows"], divergence)

    return sorted(results["cases"].values(), key=key)


def machine(info: dict[str, Any]) -> str:
    memory = f", {info['memory_gb']} GB of memory" if "memory_gb" in info else ""
    return f"{info['cpu']}, {info['cores']} cores{memory}; {info['threads']} thread (`OMP_NUM_THREADS=1`), float32"


def time_table(entries: list[Entry]) -> str:
    lines = [
        "| case | products | potstill | " + " | ".join(CONTENDERS[name] for name in PEERS) + " |",
        "|---" * (3 + len(PEERS)) + "|",
    ]
    for entry in entries:
        base, ours = seconds(entry, "products"), ratio(entry, "potstill", "products")
        cells = [title(entry["case"]), f"{base:.2f} s" if base else absent(entry, "products")]
        cells.append(f"**{ours:.3f}**" if ours else absent(entry, "potstill"))
        for name in PEERS:
            to_products, to_us = ratio(entry, name, "products"), ratio(entry, name, "potstill")
            both = f"{to_products:.2f} ({to_us:.2f})" if to_products and to_us else None
            cells.append(both or absent(entry, name))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory_table(entries: list[Entry]) -> str:
    names = ["potstill", *PEERS]
    lines = [
        "| case | gradients | " + " | ".join(CONTENDERS[name] for name in names) + " |",
        "|---" * (2 + len(names)) + "|",
    ]
    for entry in entries:
        cells = [title(entry["case"]), f"{gradient_bytes(entry['case']) / GB:.2f}"]
        for name in names:
            value = peak(entry, name)
            text = absent(entry, name) if value is None else f"{value / GB:.2f}"
            cells.append(f"**{text}**" if name == "potstill" and value is not None else text)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def target_table(entries: list[Entry]) -> str:
    lines = ["| target | measured | met |", "|---|---|---|"]

    def line(target: str, measured: str, met: bool | None) -> None:
        lines.append(f"| {target} | {measured} | {'–' if met is None else 'yes' if met else '**no**'} |")

    groups = [(f"dense {DIVERGENCES[d]}: at most {limit:.2f} × the products", limit, d) for d, limit in LIMITS.items()]
    for label, limit, divergence in [*groups, ("top-64: at most 1.08 × the student's three products", 1.08, None)]:
        ratios = [
            r
            for e in entries
            if (bool(e["case"]["top_k"]) if divergence is None else not e["case"]["top_k"])
            and divergence in (None, e["case"]["divergence"])
            and (r := ratio(e, "potstill", "products"))
        ]
        line(
            label,
            ", ".join(f"{r:.3f}" for r in ratios) or "not run",
            all(r <= limit for r in ratios) if ratios else None,
        )
    against = [r for e in entries for name in PEERS if (r := ratio(e, name, "potstill"))]
    nearest = f"the nearest takes {min(against):.2f} × potstill's time" if against else "not run"
    line("faster than every peer in every case", nearest, min(against) > 1 if against else None)
    for label, measured, met in memory_targets(entries):
        line(label, measured, met)
    return "\n".join(lines)


def memory_targets(entries: list[Entry]) -> list[tuple[str, str, bool | None]]:
    """Flat: beside the gradients, which any loss hands out, four times the rows take hardly more."""
    lines: list[tuple[str, str, bool | None]] = []
    by_shape: dict[tuple[Any, ...], dict[int, float]] = {}
    for entry in entries:
        case, value = entry["case"], peak(entry, "potstill")
        if value is not None:
            key = (case["top_k"] > 0, case["vocabulary"], case["student"], case["teacher"])
            beside = value - gradient_bytes(case)
            rows = by_shape.setdefault(key, {})
            rows[case["rows"]] = max(beside, rows.get(case["rows"], 0.0))
    pairs = [(rows[min(rows)], rows[max(rows)]) for rows in by_shape.values() if len(rows) > 1]
    said = ", ".join(f"{few / GB:.2f} → {many / GB:.2f} GB" for few, many in pairs)
    flat = all(many - few < max(0.25 * few, 0.1 * GB) for few, many in pairs) if pairs else None
    lines.append(("memory beside the gradients flat from 1,024 to 4,096 rows", said or "not run", flat))
    largest = [e for e in entries if e["case"]["rows"] == 4096 and e["case"]["vocabulary"] == 151936]
    for entry in largest:
        ours, plain = peak(entry, "potstill"), peak(entry, "plain")
        if ours is None or entry["case"]["top_k"]:
            continue
        label = "at most ¼ of plain PyTorch's memory at 4,096 × 151,936"
        if plain is None:
            lines.append((label, f"{ours / GB:.2f} GB; plain: {absent(entry, 'plain')}", None))
        else:
            lines.append((label, f"1/{plain / ours:.1f}: {ours / GB:.2f} of {plain / GB:.2f} GB", ours * 4 <= plain))
    return lines


def busy(entries: list[Entry], cores: int) -> str:
    """What else the machine did, where it did something."""
    runs = [run for entry in entries for one in entry["contenders"].values() for run in one.get("runs", [])]
    loads = [run["load"] for run in runs if "load" in run]
    if not loads or max(loads) < 1.6:
        return ""
    spreads = [
        max(times) / min(times) - 1
        for entry in entries
        for one in entry["contenders"].values()
        if len(times := [run["cpu_seconds"] for run in one.get("runs", [])]) > 1
    ]
    return (
        f"\nThe machine was not idle: its load was {min(loads):.1f} to {max(loads):.1f} on {cores} cores, and calls that are "
        f"the same took up to {max(spreads, default=0):.0%}\nlonger at one time than at another. So ratios near a target "
        "do not decide whether it is met."
    )


def agreement(entries: list[Entry]) -> str:
    """How far any contender's loss and gradient norms are from potstill's, relatively."""
    worst = 0.0
    for entry in entries:
        ours = entry["contenders"].get("potstill")
        if not ours or ours["status"] != "ok":
            continue
        for name in PEERS:
            theirs = entry["contenders"].get(name)
            if theirs and theirs["status"] == "ok":
                pairs = zip(
                    [ours["loss"], *ours["gradient_norms"]], [theirs["loss"], *theirs["gradient_norms"]], strict=True
                )
                worst = max(worst, *(abs(a - b) / abs(a) for a, b in pairs))
    return f"{worst:.0e}" if worst else "0"


TEXT = """\
# Benchmarks

## The fused loss

How long `fused_linear_kd` takes, how much memory, and what else there is. Written by `benchmarks/loss.py` from
`benchmarks/results/loss.json`; `make bench-loss` runs it anew, about an hour on an idle core.

Machine: {machine}.
Versions: {versions}.

Each contender ran in a process of its own, one process at a time, with hidden states and a head as inputs and their
two gradients as outputs; the loss is the mean over the rows. After a call with a few rows that loads the libraries,
whole calls are timed, and the fastest counts. A time is the processor's, the system's share included: that of the
clock, on an idle core.{load}
Losses and gradient norms of all contenders agree with potstill's to {agreement}, relatively.

- **products alone**: the limit. The student's logits, the teacher's logits, and the two products of the student's gradients, in
  chunks of rows, into buffers that are there already. Against a top-64 teacher, the student's three products.
- **plain PyTorch**: full logits, `log_softmax`, `kl_div`, autograd.
- **Liger**: `LigerFusedLinearJSDLoss` with its own chunk of 1,024 rows, eager and compiled. It has no loss against a truncated
  teacher. Compiling takes half a minute for each shape, which is not counted.
- **TRL, full logits**: `GKDTrainer.generalized_jsd_loss`; against top-64, what its trainer for remote teachers does with k
  entries and a tail.
- **TRL, chunked**: `ChunkedDivergenceFunction` of its `DistillationTrainer`, written for GPUs: it makes the logits again in the
  backward pass, and for JSD once more, so that it keeps none.

![Time and memory of the fused loss and its peers](benchmarks-loss.svg)

### Time

× the products alone, and in brackets × potstill. A case is: rows × vocabulary · width of the student's / the teacher's
hidden states.

{time}

### Memory

Peak resident memory above the inputs, in GB. All of it counts: the gradients too, whose own size is in the second column. A
process could have {limit:.0f} GB.

{memory}

### Targets

{targets}

## What makes the difference

At these widths the products are nearly all of the work, so the loss can only lose time beside them. Plain PyTorch loses
it in memory: each elementwise step reads and writes gigabytes, and the pages of every fresh buffer are first filled
with zeros by the system. potstill makes products for chunks of rows as large as the products like, and goes through
what they give in blocks of a few rows that stay in the processor's cache, in place: the gradient takes the place of the
logits. The room for a chunk's logits, 192 MB for each side, is kept from call to call: touching it anew takes a quarter
of a second here, 7 % of a call with 1,024 rows at V 49,152. So memory does not grow with the rows, and what is left
beside the products are some twenty passes over blocks in the cache: about 4 ns an entry of the logits for forward KL,
7 ns for JSD and 2 ns against top-64, measured by themselves.
"""

COLOURS = {  # light, dark, shape
    "potstill": ("#b3261e", "#ff8a7a", "diamond"),
    "plain": ("#5f6368", "#b8bcc2", "circle"),
    "liger": ("#1a5fb4", "#7ab8ff", "square"),
    "liger_compiled": ("#1a5fb4", "#7ab8ff", "hollow"),
    "trl_full": ("#8a6100", "#f2c14e", "circle"),
    "trl_chunked": ("#8a6100", "#f2c14e", "ring"),
}
LEFT, TIME, GAP, MEMORY, TOP, ROW = 330, 340, 40, 230, 78, 26


def plot(results: dict[str, Any]) -> str:
    """Two panels over the same cases: time × the products, and memory above the inputs on a logarithmic scale."""
    entries = ordered(results)
    ratios = [r for e in entries for name in COLOURS if (r := ratio(e, name, "products"))]
    peaks = [p / GB for e in entries for name in COLOURS if (p := peak(e, name))]
    most = max(2, math.ceil(max(ratios, default=2)))
    low = 2 ** math.floor(math.log2(max(min(peaks, default=0.25), 1e-3)))
    high = 2 ** math.ceil(math.log2(max(*peaks, low * 2) if peaks else low * 2))
    bottom = TOP + ROW * len(entries)
    width, height = LEFT + TIME + GAP + MEMORY + 30, bottom + 34
    memory_left = LEFT + TIME + GAP

    def x_time(value: float) -> float:
        return LEFT + (value - 1) / (most - 1) * TIME

    def x_memory(value: float) -> float:
        return memory_left + math.log(value / low) / math.log(high / low) * MEMORY

    parts = [head(width, height)]
    step = 0.5 if most <= 4 else 1.0
    ticks = [1 + step * k for k in range(int((most - 1) / step) + 1)]
    doubles = [low * 2**k for k in range(round(math.log2(high / low)) + 1)]
    for tick, x in [(f"{t:g}", x_time(t)) for t in ticks] + [(f"{d:g}", x_memory(d)) for d in doubles]:
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 16}">time, × the matrix products alone</text>')
    parts.append(f'<text x="{memory_left}" y="{TOP - 16}">peak memory above the inputs, GB</text>')
    at = 20.0
    for name, (_, _, shape) in COLOURS.items():
        parts.append(mark(name, shape, at, 22))
        parts.append(f'<text x="{at + 11:.0f}" y="26">{CONTENDERS[name]}</text>')
        at += 34 + 6.6 * len(CONTENDERS[name])
    for index, entry in enumerate(entries):
        y = TOP + ROW * index + ROW / 2
        if index % 2 == 0:
            parts.append(f'<rect class="band" x="0" y="{y - ROW / 2}" width="{width}" height="{ROW}"/>')
        parts.append(f'<text class="small" x="14" y="{y + 4}">{title(entry["case"])}</text>')
        for name, (_, _, shape) in reversed(COLOURS.items()):  # ours last, on top
            r, p = ratio(entry, name, "products"), peak(entry, name)
            if r:
                parts.append(mark(name, shape, x_time(max(r, 1.0)), y))
            if p:
                parts.append(mark(name, shape, x_memory(p / GB), y))
    return "\n".join([*parts, "</svg>"]) + "\n"


def head(width: int, height: int) -> str:
    """A background of its own in both schemes: the page around it may be of the other one."""

    def colours(which: int) -> str:
        return " ".join(f".{name} {{ --c: {colour[which]}; }}" for name, colour in COLOURS.items())

    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>Time and memory of the fused loss and its peers</title>
<style>
text {{ font: 13px system-ui, sans-serif; fill: #202124; }} .small {{ font-size: 12px; }}
.ground {{ fill: #ffffff; }} .band {{ fill: #80868b; fill-opacity: 0.09; }} .grid {{ stroke: #80868b; stroke-opacity: 0.35; }}
.full {{ fill: var(--c); }} .open {{ fill: none; stroke: var(--c); stroke-width: 2; }}
{colours(0)}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e8eaed; }} .ground {{ fill: #16181c; }}
{colours(1)}
}}
</style>
<rect class="ground" width="{width}" height="{height}" rx="6"/>"""


def mark(name: str, shape: str, x: float, y: float) -> str:
    if shape in ("circle", "ring"):
        return f'<circle class="{name} {"full" if shape == "circle" else "open"}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    if shape in ("square", "hollow"):
        kind = "full" if shape == "square" else "open"
        return f'<rect class="{name} {kind}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    points = f"{x:.1f},{y - 7:.1f} {x + 7:.1f},{y:.1f} {x:.1f},{y + 7:.1f} {x - 7:.1f},{y:.1f}"
    return f'<polygon class="{name} full" points="{points}"/>'
