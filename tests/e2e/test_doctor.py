"""The doctor finds each planted fault, and nothing in a sound recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from threaded import Completions, Threaded
from tiny import CPU
from tiny_models import TOKENIZER, make_model, write_jsonl
from tiny_runs import LLAMA, TinyRuns

from potstill.config import TeacherConfig
from potstill.doctor import machine
from potstill.models import load_teacher
from potstill.shipped import locate

pytestmark = pytest.mark.e2e

Command = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
BAD = ("warning", "error")
TURN = "'<|im_start|>' + message['role'] + '\\n' + message['content']"
TEMPLATE = (
    "{{% for message in messages %}}{{{{ {turn} + '{end}' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '{opening}' }}}}{{% endif %}}"
)
OPENING = "<|im_start|>assistant\\n"


def template(end: str = "<|im_end|>\\n", opening: str = OPENING) -> str:
    return TEMPLATE.format(turn=TURN, end=end, opening=opening)


def tokenizer_at(folder: Path, **keys: Any) -> Path:
    """The shipped tokenizer with other keys in its configuration."""
    shutil.copytree(locate(TOKENIZER), folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | keys))
    return folder


def model_with(folder: Path, **keys: Any) -> Path:
    """A tiny model whose tokenizer has other keys."""
    made = make_model(folder)
    config = json.loads((made / "tokenizer_config.json").read_text())
    (made / "chat_template.jinja").unlink(missing_ok=True)
    (made / "tokenizer_config.json").write_text(json.dumps(config | keys))
    return made


def other_content(folder: Path) -> Path:
    """As many ids, two of which have changed places."""
    tokenizer_at(folder)
    file = folder / "tokenizer.json"
    keys = json.loads(file.read_text())
    vocabulary = keys["model"]["vocab"]
    a, b = list(vocabulary)[300:302]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(keys))
    return folder


def chats(folder: Path, count: int = 12) -> dict[str, Any]:
    records = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} and {i}?"},
                {"role": "assistant", "content": f"It is {2 * i}."},
            ]
        }
        for i in range(count)
    ]
    path = write_jsonl(folder / "chats.jsonl", records)
    return {"sources": [{"files": str(path), "messages": "messages"}], "max_length": 64}


def examined(command: Command, *arguments: object) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code, and by check what is not well."""
    said = command("doctor", *arguments, "--json")
    found: dict[str, list[dict[str, str]]] = {}
    for each in json.loads(said.out):
        if each["status"] in BAD:
            assert each["advice"]
            found.setdefault(each["check"], []).append(each)
    return said.code, found


def fresh(tokenizer: object) -> dict[str, Any]:
    return {"tokenizer": str(tokenizer), "config": LLAMA}


def test_a_tokenizer_of_the_right_size_but_other_content(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    other = other_content(tmp_path / "other")
    path = runs.file("student", student={"model": str(runs.teacher), "tokenizer": str(other)})
    code, found = examined(command, path)
    assert code == 1 and "both have 2,048 ids): id " in found["tokenizer"][0]["said"]
    assert "not loaded" in found["set-up"][0]["said"]


def test_too_little_disk_and_a_world_that_does_not_fit(
    command: Command, runs: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_disk", lambda folder: 100_000)
    code, found = examined(command, runs.file("small", parallel={"tp": 2}), "--processes", 3)
    assert code == 1
    assert "0.1 MB are free" in found["disk"][0]["said"] and found["disk"][0]["status"] == "error"
    assert "are 2 ranks, and there are 3 for the student" in found["processes"][0]["said"]
    table = command("doctor", runs.file("small"))
    assert table.code == 1 and "checkpoints take" in " ".join(table.out.split()) and "errors" in table.out


def test_train_says_what_the_quick_checks_find(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    """And trains all the same."""
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"q": f"{i} and {i}?", "a": f" {2 * i}."} for i in range(8)])
    data = {"sources": [{"files": str(pairs), "prompt": "q", "completion": "a"}], "append_eos": False, "max_length": 64}
    said = command("train", runs.file("ends", "train.steps=1", data=data))
    assert (
        said.code == 0 and "ends: answers do not end with eos (<|eos|>): the student never learns to stop" in said.out
    )
    sound = command("train", runs.file("sound", "train.steps=1"))
    assert "never learns" not in sound.out


@pytest.mark.slow
def test_ends_that_are_not_learnt(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"q": f"{i} and {i}?", "a": f" {2 * i}."} for i in range(8)])
    data = {"sources": [{"files": str(pairs), "prompt": "q", "completion": "a"}], "append_eos": False, "max_length": 64}
    padded = tokenizer_at(tmp_path / "padded", pad_token="<|eos|>")
    _, found = examined(command, runs.file("ends", student=fresh(padded), data=data))
    assert "do not end with eos (<|eos|>), and pad is eos" in found["ends"][0]["said"]
    _, found = examined(command, runs.file("learnt", student=fresh(padded), data={**data, "append_eos": True}))
    assert "ends" not in found

    endless = tokenizer_at(tmp_path / "endless", chat_template=template(end="\\n"))
    _, found = examined(command, runs.file("chat", student=fresh(endless), data=chats(tmp_path)))
    assert "never with eos (<|eos|>)" in found["ends"][0]["said"]


@pytest.mark.slow
def test_templates_that_differ(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    data = chats(tmp_path)
    plain = tokenizer_at(tmp_path / "plain", chat_template=template())
    marked = model_with(
        tmp_path / "marked", chat_template=template().replace("'\\n' + message", "' says\\n' + message")
    )
    _, found = examined(command, runs.file("b", student=fresh(plain), data=data, teachers=[{"model": str(marked)}]))
    assert "another chat template than the student" in found["chat templates"][0]["said"]
    thinks = model_with(tmp_path / "thinks", chat_template=template(opening=OPENING + "<think>\\n"))
    _, found = examined(command, runs.file("c", student=fresh(plain), data=data, teachers=[{"model": str(thinks)}]))
    assert (
        "opens a thought before an answer, and the student's says nothing of thinking" in found["thinking"][0]["said"]
    )
    ended = model_with(tmp_path / "ended", chat_template=template(), eos_token="<|im_end|>")
    (ended / "generation_config.json").unlink()
    _, found = examined(command, runs.file("d", student=fresh(plain), data=data, teachers=[{"model": str(ended)}]))
    assert "the student's eos is <|eos|> and that of teachers[0] <|im_end|>" in found["teachers' ends"][0]["said"]


@pytest.mark.slow
def test_teachers_that_are_worth_nothing(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    """One that is worse than the student, one of noise, and one of the student's size with other tokens."""
    student = {"model": "shipped:teacher"}
    calm = make_model(tmp_path / "calm", initializer_range=0.01)
    code, found = examined(command, runs.file("worse", student=student, teachers=[{"model": str(calm)}]))
    assert "the teacher is not better" in found["headroom"][-1]["said"]
    code, found = examined(command, runs.file("noise", student=student))
    assert code == 1 and "teachers[0] reads the text no better than noise" in found["headroom"][0]["said"]
    mixed = make_model(tmp_path / "mixed", initializer_range=0.01)
    shutil.copy(other_content(tmp_path / "other") / "tokenizer.json", mixed)
    _, found = examined(command, runs.file("mixed", teachers=[{"model": str(mixed)}]))
    assert "as many ids as the student (2,048)" in found["teachers' tokenizers"][0]["said"]


@pytest.mark.slow
def test_caches(command: Command, runs: TinyRuns, tmp_path: Path) -> None:
    """Of other data, half built, of another template, and with few tokens kept."""
    records = [json.loads(line) for line in runs.text.read_text().splitlines()]
    half = write_jsonl(tmp_path / "half.jsonl", records[:30])
    others = write_jsonl(tmp_path / "others.jsonl", [{"text": f"Nothing of that, {i} times."} for i in range(20)])
    words = ["cache", "build", runs.file("built"), "teachers.0.store.k=4"]
    assert command(*words, f"data.sources.0.files={half}", "--out", tmp_path / "cache").code == 0
    teachers = [{"cache": str(tmp_path / "cache")}]

    code, found = examined(command, runs.file("half", teachers=teachers))
    assert code == 1 and "has 30 of the first 60 documents" in found["cache"][0]["said"]
    sources = {"sources": [{"files": str(others)}], "max_length": 64}
    code, found = examined(command, runs.file("others", teachers=teachers, data=sources))
    assert code == 1 and "has 0 of the first 20 documents" in found["cache"][0]["said"]
    code, found = examined(
        command, runs.file("k", teachers=teachers, data={"sources": [{"files": str(half)}], "max_length": 64})
    )
    assert code == 0 and list(found) == ["top-k mass"] and "the 4 likeliest tokens" in found["top-k mass"][0]["said"]
    skipping = [{**teachers[0], "on_missing": "skip"}]
    code, found = examined(command, runs.file("skips", teachers=skipping))
    assert code == 0 and "left out" in found["cache"][0]["said"]

    data, rendered = chats(tmp_path), tmp_path / "rendered"
    assert command("cache", "build", runs.file("chats", data=data), "--out", rendered).code == 0
    other = tokenizer_at(tmp_path / "marked", chat_template=template())
    code, found = examined(
        command, runs.file("t", student=fresh(other), data=data, teachers=[{"cache": str(rendered)}])
    )
    assert code == 1 and "another chat template" in found["cache"][0]["said"]


@pytest.mark.slow
def test_servers(command: Command, runs: TinyRuns) -> None:
    """One with another model, one that shifts by one, one that ignores log-probabilities; and a sound one."""
    model = load_teacher(TeacherConfig(model=str(runs.teacher)), CPU, "teachers[0]")

    def asked(way: str, **keys: Any) -> tuple[int, dict[str, list[dict[str, str]]]]:
        with Threaded(Completions(model, "tiny", way).application) as server:
            remote = {"k": 64, "retry_timeout": 5.0}
            config = {"server": server.address, "tokenizer": TOKENIZER, "remote": remote, **keys}
            return examined(command, runs.file("served", teachers=[config]))

    for way, keys, words in (
        ("vllm", {"served_model_name": "large"}, "large, and it has tiny"),
        ("shifted", {}, "are shifted by one"),
        ("ignoring", {}, "ignores the request for log-probabilities"),
    ):
        code, found = asked(way, **keys)
        assert code == 1 and words in found["teachers' tokenizers"][0]["said"]
    code, found = asked("vllm")
    assert code == 0 and set(found) <= {"top-k mass"}  # the tiny teacher is sure of little


@pytest.mark.slow
def test_cut_examples_and_too_little_memory(
    command: Command, runs: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "of the union " * 60
    records = [{"q": "Say it.", "a": long if i % 10 < 3 else " Short."} for i in range(100)]
    pairs = write_jsonl(
        tmp_path / "pairs.jsonl", [dict(record, q=f"{record['q']} {i}") for i, record in enumerate(records)]
    )
    data = {"sources": [{"files": str(pairs), "prompt": "q", "completion": "a"}], "max_length": 100}
    _, found = examined(command, runs.file("long", data=data))
    assert "cut 30 of 100 sampled examples" in found["lengths"][0]["said"]
    monkeypatch.setattr(machine, "free_memory", lambda device: 1000)
    code, found = examined(command, runs.file("tight"))
    assert code == 1 and found["memory"][0]["status"] == "error" and "first step" not in found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["distil", "chat", "cross-tokenizer", "draft", "lora", "mixed", "on-policy", "sequence-level"]
)
def test_nothing_is_wrong_with_what_is_shipped(
    command: Command, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "recipes" / f"{name}.yaml"
    assert examined(command, path, f"run={tmp_path / 'run'}", "train.batch_size=4", "train.micro_batch_size=null") == (
        0,
        {},
    )
