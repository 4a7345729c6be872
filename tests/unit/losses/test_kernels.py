"""The Triton kernels against the torch blocks and float64, in value and gradient, in Triton's interpreter; and what compilers
make of them for GPUs that are not here. In processes of their own: whether Triton interprets is decided when it is imported."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from kernel_twins import sliced, twins

from potstill.losses import DIVERGENCES, SampledTarget, TopKTarget, fused
from potstill.losses.divergences import LossParams
from potstill.losses.kernels import choose, kernels_for, kernels_note, without_kernels
from potstill.losses.rows import Buffers, Call, DenseRows, SampledRows, TopKRows
from potstill.parallel.vocab import VocabShard

SUPPORT = Path(__file__).parents[2] / "support"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is made for Linux alone")


def outputs(script, *lines, interpret):
    """What a script of tests/support says when it is started with each of these lines, all at once."""
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, *map(str, line)], env=environment, **pipes) for line in lines]
    found = [process.communicate(timeout=500) for process in started]
    for process, (_, said) in zip(started, found, strict=True):
        assert process.returncode == 0, said[-3000:]
    return [out.splitlines() for out, _ in found]


@needs_triton
@pytest.mark.parametrize("tier", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_equal_the_torch_blocks(tier):
    (said,) = outputs("kernel_twins.py", [tier], interpret=True)
    assert int(said[-1]) == len(twins(tier == "quick"))


@needs_triton
@pytest.mark.parametrize("tier", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_over_slices_of_the_vocabulary_equal_the_torch_blocks(tier, tmp_path):
    """And send no more floats a row."""
    found = outputs("kernel_twins.py", *([tier, rank, 2, tmp_path / "meet"] for rank in range(2)), interpret=True)
    assert [int(said[-1]) for said in found] == [len(sliced(tier == "quick"))] * 2


CEILINGS = {"registers": 128, "spills": 2}
THREADS = {"sm_80": 256, "sm_90": 256, "sm_100": 256, "gfx942": 512}


@needs_triton
@pytest.mark.parametrize("tier", ["quick", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", THREADS)
def test_compilers_keep_the_kernels_small_and_their_loads_wide(target, tier):
    """At a width of which nothing is known: the mask of a load is constant over 128 bits all the same."""
    (said,) = outputs("ahead_of_time.py", [target, tier], interpret=False)
    found = [json.loads(line) for line in said]
    assert len(found) == (4 if tier == "quick" else 40)
    for one in found:
        assert all(one[key] <= ceiling for key, ceiling in CEILINGS.items()), one
        # One pass over 4,096 columns of float32 by so many threads, 16 bytes at a time; a bfloat16 gradient is half as wide.
        rows = {"stats": 8, "sums": 8, "rest_stats": 4, "gradient": 10, "rest_gradient": 6}[one["program"].split()[0]]
        rows += 2 * one["program"].endswith("fp32")
        assert one["wide"] == rows * 256 // THREADS[target] and one["narrow"] == 0, one
        assert one["others"] <= 13, f"more than one number of each vector is read on its own: {one}"
        assert one["shared_bytes"] <= 1024, one


def test_importing_potstill_imports_no_triton():
    """Nobody who has none is troubled, and nobody waits for it."""
    check = (
        "import sys, potstill, potstill.losses; sys.exit(any(name.split('.')[0] == 'triton' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


class Gpu:
    """torch.cuda, as the choice asks it."""

    def __init__(self, monkeypatch, capability=(9, 0), there=True):
        choose._without_kernels.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100")

    def __enter__(self):
        return torch.device("cuda", 0)

    def __exit__(self, *error):
        choose._without_kernels.cache_clear()


def test_who_gets_the_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with Gpu(monkeypatch) as cuda:
        assert without_kernels(cuda) is None and kernels_note(cuda) is None
    with Gpu(monkeypatch, capability=(7, 0)) as cuda:
        assert "Tesla V100 has compute capability 7.0, and they need 8.0" in kernels_note(cuda)
    with Gpu(monkeypatch, there=False) as cuda:
        assert "torch finds no GPU" in kernels_note(cuda)
    with Gpu(monkeypatch) as cuda:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert kernels_note(cuda).endswith("(docs/gpu.md): Triton is not installed")
    assert kernels_note(torch.device("mps")).endswith("there are none for the device mps")
    assert kernels_note(torch.device("cpu")) is None and without_kernels(torch.device("cpu")) is not None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert without_kernels(torch.device("cpu")) is None


def test_what_goes_to_the_kernels(monkeypatch):
    monkeypatch.setattr(choose, "without_kernels", lambda device: None)
    imported = types.ModuleType("potstill.losses.kernels.loss")
    imported.loss_of_rows = object()
    monkeypatch.setitem(sys.modules, imported.__name__, imported)
    dense = DenseRows(lambda rows, out: out, 7)
    entries = TopKRows(TopKTarget(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1)))
    draws = SampledRows(SampledTarget(torch.zeros(1, 1), torch.zeros(1, 1)))

    def chosen(*comparisons, dtype=torch.float32, divergence="forward_kl"):
        call = Call(
            comparisons=[(1.0, one) for one in comparisons],
            params=LossParams(divergence),
            row_weight=torch.ones(1),
            shard=VocabShard(7, 7),
            buffers=Buffers(dtype, torch.device("cpu")),
        )
        return kernels_for(call) is imported.loss_of_rows

    assert all(chosen(*some) for some in ([], [dense], [entries], [draws]))
    assert not chosen(dense, dense), "several teachers: the torch blocks"
    assert not chosen(dense, dtype=torch.float64)
    assert set(DIVERGENCES) >= choose.DENSE
    monkeypatch.setitem(DIVERGENCES, "own", DIVERGENCES["tvd"])
    assert not chosen(dense, divergence="own"), "one that was added: the torch blocks, unless its buckets are few"
    assert chosen(entries, divergence="own")


@pytest.mark.parametrize(
    ("device", "vocabulary", "rows"), [("cpu", 49_152, 1024), ("cuda", 128_256, 2048), ("cuda", 2**21, 256)]
)
def test_chunks_are_of_a_size_that_suits_the_device(device, vocabulary, rows):
    assert fused.rows_of_a_chunk(torch.device(device), 4 * vocabulary) == rows


ROOT = SUPPORT.parents[1]
COUNTED = json.loads((ROOT / "benchmarks" / "results" / "loss_bytes.json").read_text(encoding="utf-8"))


def test_what_the_loss_moves_is_what_was_asked_for_and_what_the_docs_say():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for name, case in COUNTED["cases"].items():
        moved, took = case["bytes_per_logit"], case["estimated_ms"]
        ceiling = (
            16 if name.startswith(("top", "64", "cross")) else 18 if name.startswith(("forward", "reverse")) else 28
        )
        assert moved["kernels"] <= ceiling and case["head_gradient_gb"] <= 6, name
        estimates = (f"{took['torch'][gpu]:.0f} → {took['kernels'][gpu]:.0f}" for gpu in COUNTED["settings"]["gpus"])
        line = " | ".join([name, f"{moved['torch']:.0f}", f"{moved['kernels']:.1f}", *estimates])
        assert f"| {line} |" in page
    published = COUNTED["liger_jsd"]
    assert f"{published['ms']} ms and {published['gb']} GB" in page
    assert f"is {published['ours_estimated_ms']} ms" in page and f"take {published['ours_estimated_gb']} GB" in page
    most = {key: max(one[key] for one in COUNTED["compiled"].values()) for key in ("registers", "spills", "narrow")}
    assert f"more than {most['registers']} registers or {most['spills']} spills" in page and most["narrow"] == 0
    assert all(most[key] <= ceiling for key, ceiling in CEILINGS.items())


@needs_triton
@pytest.mark.slow
def test_counting_again_finds_the_same(tmp_path):
    result = tmp_path / "again.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "loss_bytes.py"), "--result", str(result)]
    subprocess.run(command, check=True, timeout=500)
    assert json.loads(result.read_text(encoding="utf-8")) == COUNTED


@needs_triton
@pytest.mark.slow
def test_the_check_of_a_gpu_runs_to_its_end_without_one(tmp_path):
    out = tmp_path / "gpu-check.json"
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu_check.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["tiny"] and all(found[part]["ok"] for part in ("twins", "steps", "loss", "quickstart", "parallel"))
    assert found["twins"]["twins"] == len(twins(quick=True)) and found["machine"]["kernels"] == "used"
    losses = found["parallel"]["losses"]
    assert all(losses[way] == pytest.approx(losses["one"], rel=1e-5) for way in ("dp 2", "tp 2"))
    measured = found["loss"]["measured"]
    for case in ("forward KL", "JSD", "top-64"):
        ours, torchs = measured[f"{case}, potstill"]["loss"], measured[f"{case}, potstill, torch's operations"]["loss"]
        assert ours == pytest.approx(torchs, rel=1e-5)
        assert ours == pytest.approx(measured[f"{case}, plain PyTorch"]["loss"], rel=0.02)  # its logits are bfloat16
