"""Files that are never half there, and what is found when they are damaged all the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from potstill import files
from potstill.files import (
    damage,
    draft_of,
    json_lines,
    model_damage,
    new_file,
    new_folder,
    open_log,
    point,
    remove_folder,
    remove_unfinished,
)
from potstill.text.tokens import write_arrays
from potstill.training.logging import keep_until
from potstill.types import PotstillError


def test_a_new_folder_is_synced_with_all_that_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, and every folder that names one, before the folder gets its own name; then that."""
    synced: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def records(handle: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        synced.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", records)
    monkeypatch.setattr(Path, "rename", renamed)
    with new_folder(tmp_path / "c") as beside:
        (beside / "model" / "inner").mkdir(parents=True)
        (beside / "model" / "inner" / "a").write_text("a")
        (beside / "b").write_text("b")
    before = synced[: synced.index("renamed")]
    inside = {os.path.relpath(name, beside.name) for name in before}
    assert {"b", "model/inner/a", "model/inner", "model", "."} <= inside
    assert before.index(f"{beside.name}/model/inner") > before.index(f"{beside.name}/model/inner/a")
    assert synced[-1] == "."


def test_a_folder_is_removed_whole_or_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    folder = tmp_path / "step-00000002"
    (folder / "model").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", refuses)
        with pytest.raises(PermissionError):
            remove_folder(folder)
        assert not folder.exists()
        left = tmp_path / ".unfinished-removed-step-00000002"
        assert remove_unfinished(tmp_path) == [left]
    assert remove_unfinished(tmp_path) == [] and not left.exists()


def test_a_folder_in_the_place_of_a_link_is_moved_aside(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "latest"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest" / "copy").touch()
    assert point(tmp_path / "latest", tmp_path / "step-1") == tmp_path / "copied-latest"
    assert (tmp_path / "copied-latest" / "copy").exists()
    assert point(tmp_path / "latest", tmp_path / "step-2") is None
    assert os.readlink(tmp_path / "latest") == "step-2"


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"{", b"[1]", b"3", b"null", b"{}", b'{"step": "3"}', b'{"step": -1}', b'{"step": 1.0}', b"[" * 9999],
)
def test_a_line_that_is_no_record_is_none(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}')
    assert [record for _, record in json_lines(path)] == [{"step": 1}, None, {"step": 2}]
    assert [part for part, _ in json_lines(path)][1] == line + b"\n"
    assert list(json_lines(tmp_path / "none")) == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with new_folder(tmp_path / "step-00000002") as beside:
        (beside / "model").mkdir()
        (beside / "model" / "model.safetensors").write_bytes(b"weights")
        (beside / "model" / "config.json").write_text("{}")
        (beside / "progress.json").write_text("{}")
    return tmp_path / "step-00000002"


def test_a_model_is_compared_with_the_manifest_above_it(checkpoint: Path) -> None:
    model = checkpoint / "model"
    link = checkpoint.with_name("latest")
    link.symlink_to(checkpoint.name)
    assert model_damage(model) is None and model_damage(link / "model") is None
    (checkpoint / "progress.json").write_text("changed, but not of the model")
    assert model_damage(model) is None
    (model / "model.safetensors").write_bytes(b"weighty")
    assert model_damage(model) == model_damage(link / "model") == "model/model.safetensors is not what was written"
    assert model_damage(model, weights=False) is None
    (model / "config.json").unlink()
    assert model_damage(model, weights=False) == "model/config.json is missing"


@pytest.mark.parametrize("content", ["[]", "{", '{"files": []}', '{"files": {"model/model.safetensors": 3}}'])
def test_manifests_of_others_are_no_damage(tmp_path: Path, content: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "manifest.json").write_text(content)
    assert model_damage(tmp_path / "model") is None


def test_a_manifest_of_a_checkpoint_that_cannot_be_read_is_damage(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text(json.dumps({"files": None}))
    assert model_damage(checkpoint / "model") == f"{checkpoint / 'manifest.json'} cannot be read"
    (checkpoint / "manifest.json").unlink()  # a model that was copied out has none
    assert model_damage(checkpoint / "model") is None


def test_a_checkpoint_with_a_link_in_it_is_refused_and_a_copy_that_followed_it_is_not(
    checkpoint: Path, tmp_path: Path
) -> None:
    assert damage(checkpoint) is None
    weights, outside = checkpoint / "model" / "model.safetensors", tmp_path / "outside"
    weights.rename(outside)
    weights.symlink_to(outside)
    assert model_damage(checkpoint / "model") is None  # as the cache of the hub has models
    with pytest.raises(PotstillError, match=r"model/model\.safetensors is a link, and may lead out of .*cp -rL"):
        damage(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert damage(tmp_path / "copy") is None
    (tmp_path / "copy" / "model" / "added_tokens.json").symlink_to(outside)  # of no checksum, but it would be read
    with pytest.raises(PotstillError, match=r"model/added_tokens\.json is a link"):
        damage(tmp_path / "copy")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "a.safetensors"
    victim.write_text("mine")
    left = draft_of(path)
    left.symlink_to(victim)
    write_arrays(path, {"a": np.zeros(3)}, {})
    assert victim.read_text() == "mine" and not path.is_symlink() and not left.is_symlink()
    with pytest.raises(ValueError, match="in the middle"), new_file(path) as file:
        file.write(b"half")
        raise ValueError("in the middle")
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "victim"] and path.stat().st_size > 50


def test_logs_that_are_links_are_refused(tmp_path: Path) -> None:
    log, target = tmp_path / "metrics.jsonl", tmp_path / "not-yet"
    log.symlink_to(target)
    for what in (lambda: keep_until(tmp_path, 0, print), lambda: open_log(log)):
        with pytest.raises(PotstillError, match=r"metrics\.jsonl is a link|could not write .*metrics\.jsonl"):
            what()
    log.unlink()
    (tmp_path / "metrics.jsonl.damaged").symlink_to(target)
    with pytest.raises(PotstillError, match=r"metrics\.jsonl\.damaged is a link"):
        keep_until(tmp_path, 0, print)
    assert not target.exists()
    with open_log(log) as file:
        file.write("a line\n")
    assert log.read_text() == "a line\n"


def test_a_disk_that_is_full_for_a_library_is_told_though_a_small_file_still_fits(tmp_path: Path) -> None:
    with (
        pytest.raises(PotstillError, match=r"could not write .*new: No space left on device; what was there before"),
        new_folder(tmp_path / "new"),
    ):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert not (tmp_path / "new").exists()
