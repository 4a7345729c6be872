"""A few families of docs/models.md in each of its modes, and the page in step with what was measured."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"
LIST = Path(os.environ.get("POTSTILL_ASSETS", TOOLS.parents[1] / "shared" / "assets")) / "field" / "families.txt"
# Dense, soft-capped, a hybrid, experts, one that also sees, recurrent.
SAMPLE = ["llama", "gemma2", "falcon_h1", "mixtral", "qwen3_vl", "mamba2"]
UNPACKED = {"falcon_h1", "mamba2"}


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(TOOLS))
    try:
        yield importlib.import_module("write_models_docs")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_family_works_in_every_mode(tool, kind, tmp_path):
    family = next(family for family in tool.FAMILIES if family.model_type == kind)
    tool.model_modes.make(family, tmp_path)
    found = {mode: tool.try_mode(mode, tmp_path) for mode in tool.model_modes.MODES}
    packing = found.pop("packing")
    assert {mode: how["says"] for mode, how in found.items() if not how["works"]} == {}
    assert packing["works"] == (kind not in UNPACKED)
    assert packing["works"] or packing["says"].endswith("cannot keep packed documents apart: set data.packing to false")


def test_a_wrong_number_is_no_yes(tool, tmp_path, monkeypatch):
    """Weights that change between the two computations."""
    modes = tool.model_modes
    modes.make(next(family for family in tool.FAMILIES if family.model_type == "llama"), tmp_path)
    exact = modes._own_loss
    monkeypatch.setattr(modes, "_own_loss", lambda model, text: exact(model, text) * 1.01)
    found = tool.try_mode("student", tmp_path)
    assert not found["works"] and found["says"].startswith("the loss is off by")


def test_docs_are_what_was_measured(tool):
    results = json.loads(tool.RESULT.read_text(encoding="utf-8"))
    assert tool.DOC.read_text(encoding="utf-8") == tool.page(results), "run python tools/write_models_docs.py"
    assert list(results["families"]) == [family.model_type for family in tool.FAMILIES]
    for mode in ("student", "teacher", "writing", "bf16", "resume"):
        works = [found["modes"][mode]["works"] for found in results["families"].values()]
        assert sum(works) >= 0.9 * len(works), mode


@pytest.mark.skipif(not LIST.exists(), reason=f"needs {LIST}")
def test_the_families_are_those_of_the_list(tool):
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    listed = [(kind.split("+")[0], name) for kind, name in (line.split("\t") for line in lines)]
    assert [(family.model_type, family.name) for family in tool.FAMILIES] == listed
