"""The loss's Triton programs compiled for GPUs that are not here, and what the compilers say of them: registers, spills, and
how wide memory is read. Run in a process without TRITON_INTERPRET: Triton decides when a program is decorated."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from potstill.losses.kernels import programs
from potstill.losses.kernels.chunk import BLOCK, WARPS
from potstill.losses.kernels.dense import KINDS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WIDE = {"S": "*fp32", "T": "*fp32", "Label": "*i64", "scale": "fp32", "cap": "fp32", "mix": "fp32"}


@dataclass(frozen=True)
class Compiled:
    registers: int
    spills: int  # instructions, or registers on AMD
    shared_bytes: int
    wide: int  # loads and stores of 128 bits in the loops …
    narrow: int  # … of 8 or 16 bits …
    others: int  # … and of 32 or 64, as a row's own numbers are read


def programs_compiled() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every program as plain as it is used, and with all that it can do at once."""
    cases: dict[str, tuple[Any, dict[str, Any]]] = {}
    for cap, name in ((False, "plain"), (True, "all, cap")):
        everything = dict.fromkeys(("CE", "REVERSE", "ENTROPY"), cap)
        cases[f"stats {name}"] = (programs.stats, {"CAP": cap, "FORWARD": True, **everything})
        for kind, divergence in enumerate(KINDS):
            constants = {"CAP": cap, "KIND": kind}
            if kind >= programs.JSD:
                cases[f"sums {divergence} {name}"] = (programs.sums, constants)
            cases[f"gradient {divergence} {name}"] = (programs.gradient, {**constants, "GATE": cap, "CE": True})
        cases[f"rest_stats {name}"] = (programs.rest_stats, {"CAP": cap, "KD": True, "CE": cap})
        cases[f"rest_gradient {name}"] = (programs.rest_gradient, {"CAP": cap, "KD": True, "CE": True})
    return cases


def source(program: Any, constants: dict[str, Any], gradient: str) -> ASTSource:
    """As the launcher would specialise it: pointers and strides are multiples of 16, widths and the number of rows are not."""
    types = WIDE | {"G": f"*{gradient}"}
    constants = {**constants, "BLOCK": BLOCK}
    signature, hints = {}, {}
    for place, name in enumerate(program.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "*fp32" if name in ("Rows", "Out") else "i32")
        if signature[name].startswith("*") or name.startswith("stride"):
            hints[(place,)] = [["tt.divisibility", 16]]
    fixed = {(program.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(program, signature, constexprs=fixed, attrs=hints)


def compiled(target: str, program: Any, constants: dict[str, Any], gradient: str = "bf16") -> Compiled:
    found = triton.compile(source(program, constants, gradient), target=TARGETS[target], options={"num_warps": WARPS})
    return _amd(found) if target.startswith("gfx") else _nvidia(found)


def _nvidia(found: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "program.cubin"
        cubin.write_bytes(found.asm["cubin"])
        usage = _said(TOOLS / "cuobjdump", "-res-usage", cubin)
        assembly = _said(TOOLS / "nvdisasm", "-c", cubin)
    loads = re.findall(r"\b(?:LDG|STG)\.E\S*", assembly)
    wide = sum(".128" in load or ".ENL2.256" in load for load in loads)
    narrow = sum(re.search(r"\.(U8|S8|U16|S16)\b", load) is not None for load in loads)
    spills = len(re.findall(r"\b(?:STL|LDL)\b", assembly))
    return Compiled(
        int(re.search(r"REG:(\d+)", usage)[1]), spills, found.metadata.shared, wide, narrow, len(loads) - wide - narrow
    )


def _amd(found: Any) -> Compiled:
    assembly = found.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.search(rf"{key}:\s+(\d+)", assembly)[1])

    accesses = re.findall(r"(?:global|buffer)_(?:load|store)_(\w+)", assembly)
    wide = sum(kind == "dwordx4" for kind in accesses)
    narrow = sum(kind in ("short", "ushort", "short_d16", "ubyte", "byte") for kind in accesses)
    return Compiled(
        number(".vgpr_count"),
        number(".vgpr_spill_count"),
        found.metadata.shared,
        wide,
        narrow,
        len(accesses) - wide - narrow,
    )


def _said(*command: Any) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def main(target: str, tier: str) -> None:
    """One JSON line for each program."""
    cases = [
        (name, gradient, *case)
        for name, case in programs_compiled().items()
        for gradient in (("bf16", "fp32") if "gradient" in name else ("bf16",))
    ]
    if tier == "quick":
        wanted = ("stats", "sums jsd", "gradient skew_reverse_kl", "rest_gradient")
        cases = [case for case in cases if case[1] == "bf16" and case[0].endswith("cap") and case[0].startswith(wanted)]
    for name, gradient, program, constants in cases:
        found = compiled(target, program, constants, gradient)
        print(json.dumps({"target": target, "program": f"{name} {gradient}", **vars(found)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
