from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_tokenizer import BOS, CHATML, EOS, ids, tiny_tokenizer

from potstill.config import DataConfig
from potstill.data import Prefetched, StepBatches, collate, prefetch
from potstill.data.layout import pack
from potstill.types import Batch, Example, PotstillError, StepBatch

THINKING = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('|')[-1])")


def example(text: str, supervised: str | None = None) -> Example:
    """`supervised` marks each token of bos + text with 1 or 0."""
    all_ids = np.array([BOS, *ids(text)], dtype=np.int32)
    mask = np.array([c == "1" for c in supervised or "0" + "1" * (len(all_ids) - 1)])
    return Example(key=text, text=text, ids=all_ids, supervised=mask, supervised_bytes=0)


def steps(data: DataConfig, **kwargs: Any) -> StepBatches:
    tokenizer = kwargs.pop("tokenizer", None) or tiny_tokenizer(chat_template=THINKING)
    settings = {"batch_size": 4, "micro_batch_size": 4, "seed": 0, "epochs": 1} | kwargs
    return StepBatches(data, tokenizer, **settings)


def texts(step: StepBatch) -> list[str]:
    return [e.text for batch in step.batches for e in batch.examples]


def all_texts(found: list[StepBatch]) -> list[str]:
    return [text for step in found for text in texts(step)]


def same(a: Batch, b: Batch) -> bool:
    tensors = [
        (a.input_ids, b.input_ids),
        (a.position_ids, b.position_ids),
        (a.document, b.document),
        (a.rows.student, b.rows.student),
        (a.rows.teacher, b.rows.teacher),
        (a.rows.labels, b.rows.labels),
    ]
    keys = [e.key for e in a.examples] == [e.key for e in b.examples]
    flags = (a.packed, a.supervised_tokens) == (b.packed, b.supervised_tokens)
    return keys and flags and all(torch.equal(x, y) for x, y in tensors)


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def documents(count: int, name: str = "d") -> list[dict[str, Any]]:
    """Different texts of 3 to 22 bytes."""
    return [{"text": f"{name}{i} " + "x" * (i * 7 % 19)} for i in range(count)]


def test_two_documents_in_a_row_have_their_own_numbers_and_positions() -> None:
    batch = collate([[example("ab"), example("c")], [example("def", "0011")]], pad_id=EOS)
    assert batch.input_ids.tolist() == [[BOS, *ids("ab"), BOS, *ids("c")], [BOS, *ids("def"), EOS]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.document.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
    assert batch.packed
    assert batch.rows.student.tolist() == [0, 1, 3, 6, 7]
    assert batch.rows.teacher.tolist() == [0, 1, 3, 6, 7]
    assert batch.rows.labels.tolist() == [*ids("abc"), *ids("ef")]
    assert batch.supervised_tokens == len(batch.rows) == 5
    assert [e.text for e in batch.examples] == ["ab", "c", "def"]
    dtypes = (batch.input_ids.dtype, batch.position_ids.dtype, batch.document.dtype, batch.rows.labels.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.int32, torch.int64)


def test_one_document_a_row_is_not_packed_and_the_last_of_a_row_predicts_nothing() -> None:
    batch = collate([[example("a")], [example("bc")]], pad_id=0)
    assert not batch.packed
    assert batch.input_ids.tolist() == [[BOS, *ids("a"), 0], [BOS, *ids("bc")]]
    assert batch.rows.student.tolist() == [0, 3, 4]


def test_pad_equal_to_eos_is_padding_and_the_real_eos_is_supervised(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "d"}])
    data = DataConfig(sources=[{"files": path}], max_length=8, packing=False, shuffle=False)
    (step,) = steps(data, tokenizer=tiny_tokenizer(pad="<|eos|>"), batch_size=2, micro_batch_size=2)
    (batch,) = step.batches
    assert batch.input_ids.tolist() == [[BOS, *ids("abc"), EOS], [BOS, *ids("d"), EOS, EOS, EOS]]
    assert batch.document.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert batch.rows.labels.tolist() == [*ids("abc"), EOS, *ids("d"), EOS]
    assert batch.rows.student.tolist() == [0, 1, 2, 3, 5, 6]


def test_pack_fits_the_longest_first_into_the_tightest_room() -> None:
    rows, left = pack([3, 6, 4, 7, 2, 5], rows=3, row_length=10)
    assert rows == [[0, 3], [1, 2], [4, 5]]
    assert left == []


def test_pack_leaves_over_what_has_no_place_and_places_the_urgent_first() -> None:
    assert pack([6, 7, 8], rows=2, row_length=10) == ([[2], [1]], [0])
    assert pack([6, 7, 8], rows=2, row_length=10, urgent=1) == ([[0], [2]], [1])


def test_packed_rows_hold_every_document_once_and_are_nearly_full(tmp_path: Path) -> None:
    records = documents(500)
    path = write_jsonl(tmp_path / "a.jsonl", records)
    data = DataConfig(sources=[{"files": path}], max_length=64)
    found = list(steps(data))
    assert sorted(all_texts(found)) == sorted(r["text"] for r in records)
    assert all(w.batches[0].input_ids.shape[0] == 4 for w in found[:-1])
    assert all(w.batches[0].input_ids.shape[1] <= 64 for w in found)
    counts = found[-1].counts
    tokens = sum(len(r["text"]) + 2 for r in records)
    assert (counts["examples"], counts["documents"], counts["tokens"]) == (500, 500, tokens)
    assert counts["supervised_tokens"] == tokens - 500
    assert counts["padding_tokens"] == sum(w.batches[0].input_ids.numel() for w in found) - tokens
    assert counts["padding_tokens"] < 0.03 * tokens
    # A token is predicted from its own document: the label follows its student position in the same one.
    for step in found:
        (batch,) = step.batches
        flat, document = batch.input_ids.flatten(), batch.document.flatten()
        assert torch.equal(flat[batch.rows.student + 1], batch.rows.labels)
        assert torch.equal(document[batch.rows.student + 1], document[batch.rows.student])


def test_padded_steps_hold_alike_lengths(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(130))
    data = DataConfig(sources=[{"files": path}], max_length=64, packing=False)
    found = list(steps(data))
    assert sorted(all_texts(found)) == sorted(r["text"] for r in documents(130))
    assert [len(texts(w)) for w in found] == [4] * 32 + [2]
    assert found[-1].counts["padding_tokens"] < 0.1 * found[-1].counts["tokens"]
    widths = [w.batches[0].input_ids.shape[1] for w in found[:16]]
    assert widths != sorted(widths) and widths != sorted(widths, reverse=True)


@pytest.mark.parametrize("packing", [True, False])
def test_micro_batches_only_divide_a_step(tmp_path: Path, packing: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(90))
    data = DataConfig(sources=[{"files": path}], max_length=32, packing=packing)
    rows: dict[int, list[list[list[int]]]] = {}
    for micro in (8, 4, 1):
        found = list(steps(data, batch_size=8, micro_batch_size=micro))
        assert all(b.input_ids.shape[0] == micro for w in found[:-1] for b in w.batches)
        rows[micro] = [
            [
                ids_of_row[mask > 0].tolist()
                for b in w.batches
                for ids_of_row, mask in zip(b.input_ids, b.document, strict=True)
            ]
            for w in found
        ]
    assert rows[8] == rows[4] == rows[1]


@pytest.mark.parametrize("packing", [True, False])
def test_a_budget_of_tokens_divides_the_same_steps_with_less_padding(tmp_path: Path, packing: bool) -> None:
    """Texts of 3 to 90 tokens in the order they come: a fixed number of rows is padded to whatever lies beside them."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * (3 + 29 * i % 87)} for i in range(90)])
    data = DataConfig(sources=[{"files": path}], max_length=96, packing=packing)
    fixed = list(steps(data, batch_size=32, micro_batch_size=4))
    filled = list(steps(data, batch_size=32, micro_batch_size=4, tokens_per_micro_batch=4 * 96))
    assert [sorted(texts(step)) for step in filled] == [sorted(texts(step)) for step in fixed]
    assert all(b.input_ids.numel() <= 4 * 96 for step in filled for b in step.batches)
    passes, before = (sum(len(step.batches) for step in found) for found in (filled, fixed))
    padding, padded = (found[-1].counts["padding_tokens"] for found in (filled, fixed))
    assert passes < before
    assert padding <= padded if packing else padding < padded / 2


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_cover_every_example_once_each(tmp_path: Path, packing: bool, shuffle: bool) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", documents(36, "a"))
    second = write_jsonl(tmp_path / "b.jsonl", documents(11, "b"))
    data = DataConfig(
        sources=[{"files": first}, {"files": second}],
        max_length=32,
        packing=packing,
        shuffle=shuffle,
        shuffle_buffer=10,
    )
    expected = Counter(r["text"] for r in documents(36, "a") + documents(11, "b"))
    one, three = list(steps(data)), list(steps(data, epochs=3))
    assert Counter(all_texts(one)) == expected
    assert Counter(all_texts(three)) == Counter({text: 3 for text in expected})
    assert [w.epoch for w in three] == sorted(w.epoch for w in three)
    assert {w.epoch for w in three} == {0, 1, 2}
    # Epochs meet in one step only.
    border = next(i for i, w in enumerate(three) if w.epoch == 1)
    assert set(all_texts(three[: border + 1])) == set(expected)
    assert max(Counter(all_texts(three[:border])).values()) == 1
    assert steps(data, epochs=3).count() == len(three)
    seen: list[int] = []
    count = steps(data).count(seen.append)
    assert count == len(one) == seen[-1]


def test_the_same_chats_through_two_templates_are_counted_each(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * (1 + i % 7)}] for i in range(60)
    ]
    source = {"files": write_jsonl(tmp_path / "a.jsonl", [{"chat": chat} for chat in chats]), "messages": "chat"}
    longer = source | {"chat_template_kwargs": {"mood": "x" * 60}}
    data = DataConfig(sources=[source, longer], max_length=200, shuffle=False)
    tokenizer = tiny_tokenizer(chat_template="{{ mood | default('') }}" + CHATML)
    found = list(steps(data, tokenizer=tokenizer, batch_size=2))
    assert steps(data, tokenizer=tokenizer, batch_size=2).count() == len(found)


def test_without_shuffling_documents_come_in_order(tmp_path: Path) -> None:
    records = [{"text": f"{i:06}"} for i in range(100)]
    data = DataConfig(sources=[{"files": write_jsonl(tmp_path / "a.jsonl", records)}], max_length=8, shuffle=False)
    assert all_texts(list(steps(data))) == [r["text"] for r in records]
    padded = data.model_copy(update={"packing": False})
    assert all_texts(list(steps(padded))) == [r["text"] for r in records]


def test_shuffling_depends_on_the_seed_and_the_epoch(tmp_path: Path) -> None:
    data = DataConfig(
        sources=[{"files": write_jsonl(tmp_path / "a.jsonl", documents(64))}], max_length=24, packing=False
    )
    first = all_texts(list(steps(data)))
    assert first == all_texts(list(steps(data)))
    assert first != all_texts(list(steps(data, seed=1)))
    both = all_texts(list(steps(data, epochs=2)))
    assert both[:64] != both[64:]


def test_a_mixture_draws_by_weight_and_goes_round(tmp_path: Path) -> None:
    sources = [
        {"files": write_jsonl(tmp_path / "a.jsonl", documents(50, "a")), "weight": 3},
        {"files": write_jsonl(tmp_path / "b.jsonl", documents(7, "b")), "weight": 1},
    ]
    data = DataConfig(sources=sources, max_length=24, packing=False, shuffle_buffer=64)
    found = list(islice(steps(data, epochs=None), 1000))
    names = Counter(text[0] for text in all_texts(found))
    assert names.total() == 4000
    assert abs(names["a"] / 4000 - 0.75) < 0.02
    each = Counter(all_texts(found))
    of_b = [each[r["text"]] for r in documents(7, "b")]
    assert max(of_b) - min(of_b) <= 13  # whole rounds, but for what waits in a group
    with pytest.raises(PotstillError, match=r"data.sources: weights have no meaning when every source is read whole"):
        steps(data, epochs=1)


def test_without_epochs_it_goes_round(tmp_path: Path) -> None:
    data = DataConfig(
        sources=[{"files": write_jsonl(tmp_path / "a.jsonl", documents(6))}], max_length=24, packing=False
    )
    found = list(islice(steps(data, epochs=None), 30))
    assert all(len(texts(w)) == 4 for w in found)
    assert set(Counter(all_texts(found)).values()) == {20}


@pytest.mark.parametrize("packing", [True, False])
def test_a_limit_takes_the_first_examples(tmp_path: Path, packing: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(100))
    data = DataConfig(sources=[{"files": path}], max_length=24, packing=packing, shuffle=False)
    found = list(steps(data, limit=21))
    assert sorted(all_texts(found)) == sorted(r["text"] for r in documents(21))
    assert list(steps(data, limit=21, state=found[-1].state)) == []


def make_sources(folder: Path, kind: str) -> list[dict[str, Any]]:
    if kind == "jsonl":
        for i in range(4):
            write_jsonl(folder / f"{i}.jsonl", documents(17, f"f{i}"))
        return [{"files": str(folder / "*.jsonl")}]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(documents(61)), folder / "a.parquet", row_group_size=9)
        return [{"files": str(folder / "a.parquet"), "fraction": 0.8}]
    if kind == "pieces":  # texts of many pieces, among empty ones
        records = [{"text": " ".join(f"{j}w{i}" for i in range(j * 5 % 40))} for j in range(23)]
        return [{"files": write_jsonl(folder / "a.jsonl", records)}]
    if kind == "chat":
        chats = [
            [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": f"t{i}|a{i}"},
                {"role": "user", "content": "and"},
                {"role": "assistant", "content": f"b{i}"},
            ][: 4 if i % 3 else 1]
            for i in range(30)
        ]
        return [{"files": write_jsonl(folder / "a.jsonl", [{"chat": c} for c in chats]), "messages": "chat"}]
    if kind == "dataset":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(documents(47)).save_to_disk(str(folder / "set"))
        return [{"dataset": str(folder / "set")}]
    (folder / "t").mkdir()
    for i in range(9):
        (folder / "t" / f"{i}.txt").write_text(f"text file {i}")
    several: list[dict[str, Any]] = [
        {"files": str(folder / "t" / "*.txt")},
        {"files": write_jsonl(folder / "a.jsonl", documents(31, "a"))},
        {"files": write_jsonl(folder / "b.jsonl", [{"q": f"q{i}", "a": "a" * (i % 5)} for i in range(13)])}
        | {"prompt": "q", "completion": "a"},
    ]
    if kind == "mixture":
        for weight, source in enumerate(several, 1):
            source["weight"] = weight
    return several


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "pieces", "chat", "dataset", "combine_teachers", "mixture"])
def test_every_state_goes_on_exactly_as_the_undisturbed_run(
    tmp_path: Path, kind: str, packing: bool, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potstill.data.loader.GROUP_STEPS", 3)
    monkeypatch.setattr("potstill.data.planning.TOKENIZED_AT_ONCE", 5)
    max_length = 110 if kind == "chat" else 32
    data = DataConfig(
        sources=make_sources(tmp_path, kind),
        max_length=max_length,
        piece_bytes=20,
        packing=packing,
        shuffle=shuffle,
        shuffle_buffer=25,
    )
    settings: dict[str, Any] = {"batch_size": 3, "micro_batch_size": 2, "seed": 5}
    settings["epochs"] = None if kind == "mixture" else 3
    whole = list(islice(steps(data, **settings), 60))
    assert len(whole) >= 8
    for i in range(0, len(whole), 1 if len(whole) < 40 else 3):
        state = json.loads(json.dumps(whole[i].state))
        rest = list(islice(steps(data, state=state, **settings), len(whole) - i - 1 if kind == "mixture" else 60))
        expected = whole[i + 1 :]
        if len(whole) == 60 and kind != "mixture":
            rest = rest[: len(expected)]
        assert len(rest) == len(expected)
        for a, b in zip(rest, expected, strict=True):
            assert (a.counts, a.epoch, a.state) == (b.counts, b.epoch, b.state)
            assert all(same(x, y) for x, y in zip(a.batches, b.batches, strict=True))


def test_a_state_is_small_and_of_the_same_sources(tmp_path: Path) -> None:
    data = DataConfig(sources=[{"files": write_jsonl(tmp_path / "a.jsonl", documents(900))}], max_length=64)
    states = [w.state for w in steps(data)]
    assert max(len(json.dumps(state)) for state in states) < 1200
    more = DataConfig(sources=[*data.sources, *data.sources], max_length=64)
    with pytest.raises(PotstillError, match=r"data.sources: the saved state is of 1 sources, the recipe has 2"):
        steps(more, state=states[0])


def test_data_that_changed_since_the_state_was_taken_is_refused_or_allowed(tmp_path: Path) -> None:
    kept = {"files": write_jsonl(tmp_path / "a.jsonl", documents(20, "a"))}
    other = {"files": write_jsonl(tmp_path / "b.jsonl", documents(20, "b"))}
    data = DataConfig(sources=[kept, other], max_length=32, shuffle=False)
    first, second, *_ = steps(data)
    assert next(steps(data, state=first.state)).state == second.state
    write_jsonl(tmp_path / "b.jsonl", documents(21, "b"))
    with pytest.raises(PotstillError) as error:
        steps(data, state=first.state)
    assert str(error.value).startswith("data.sources[1] is not what the run began with (then 1 file of ")
    assert "run=" in str(error.value) and "checkpoint.resume=force" in str(error.value)
    on = next(steps(data, state=first.state, changed_data_ok=True))
    assert on.counts["examples"] == first.counts["examples"] + len(texts(on))
    assert list(steps(data, state=on.state))  # from here on the changed data is what the run has


def test_what_is_cut_dropped_and_split_is_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefgh"}, {"text": ""}, {"text": "ab"}])
    data = DataConfig(sources=[{"files": path}], max_length=6)
    assert list(steps(data))[-1].counts == {
        "documents": 3,
        "examples": 2,
        "tokens": 6 + 4,
        "supervised_tokens": 5 + 3,
        "padding_tokens": 2,
        "cut_examples": 1,
        "cut_tokens": 4,
        "dropped_examples": 1,
        "dropped_tokens": 0,
        "split_conversations": 0,
    }
    pairs = [{"q": "abcdefgh", "a": "x"}, {"q": "a", "a": "b"}, {"q": "abcdefghi", "a": "x"}]
    source = {"files": write_jsonl(tmp_path / "b.jsonl", pairs), "prompt": "q", "completion": "a"}
    counts = list(steps(DataConfig(sources=[source], max_length=6)))[-1].counts
    assert (counts["examples"], counts["dropped_examples"], counts["dropped_tokens"]) == (1, 2, 12)
    assert (counts["cut_tokens"], counts["documents"]) == (5 + 6, 3)
    chats = make_sources(tmp_path, "chat")
    counts = list(steps(DataConfig(sources=chats, max_length=128)))[-1].counts
    assert (counts["documents"], counts["examples"]) == (30, 40)
    assert (counts["split_conversations"], counts["dropped_examples"]) == (20, 10)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_steps_for_evaluation_score_every_byte_whatever_the_tokenizer_adds(
    tmp_path: Path, bos: bool, eos: bool
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(50))
    data = DataConfig(sources=[{"files": path}], max_length=32, piece_bytes=9)
    found = list(steps(data, tokenizer=tiny_tokenizer(bos=bos, eos=eos), evaluation=True))
    every = sum(len(r["text"]) for r in documents(50))
    assert sum(e.supervised_bytes for w in found for b in w.batches for e in b.examples) == every
    assert found[-1].counts["supervised_tokens"] == every  # a byte is a token here, and eos would be one more
    assert all(row[0] == BOS for w in found for b in w.batches for row in b.input_ids.tolist())


@pytest.mark.parametrize("epochs", [1, None])
def test_an_empty_data_set_is_an_error_and_no_endless_loop(tmp_path: Path, epochs: int | None) -> None:
    empty = {"files": write_jsonl(tmp_path / "a.jsonl", [])}
    with pytest.raises(PotstillError, match=r"eval.data.sources\[0\]: .*a.jsonl holds no records"):
        next(steps(DataConfig(sources=[empty], max_length=8), epochs=epochs, key="eval.data"))
    blank = {"files": write_jsonl(tmp_path / "b.jsonl", [{"text": ""}] * 3)}
    with pytest.raises(PotstillError, match=r"data.sources: nothing to learn from in any of \d+ examples"):
        next(steps(DataConfig(sources=[blank], max_length=8), epochs=epochs))
    none = {"files": write_jsonl(tmp_path / "c.jsonl", documents(3)), "fraction": 1e-6}
    with pytest.raises(PotstillError, match=r"data.sources\[0\].fraction: 1e-06 keeps none of the source's 3 records"):
        next(steps(DataConfig(sources=[none], max_length=8), epochs=epochs))
    if epochs is None:
        mixed = [blank | {"weight": 1}, blank | {"weight": 1}]
        with pytest.raises(PotstillError, match="nothing to learn from"):
            next(steps(DataConfig(sources=mixed, max_length=8), epochs=None))


def alive() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_prefetched_gives_the_same_steps_ahead_of_time(tmp_path: Path) -> None:
    data = DataConfig(sources=[{"files": write_jsonl(tmp_path / "a.jsonl", documents(90))}], max_length=32)
    expected = list(steps(data))
    with Prefetched(steps(data)) as ahead:
        found = list(ahead)
    assert [w.state for w in found] == [w.state for w in expected]
    assert all(
        same(x, y) for a, b in zip(found, expected, strict=True) for x, y in zip(a.batches, b.batches, strict=True)
    )
    assert alive() == 0
    assert list(ahead) == []


def test_prefetched_stays_within_its_depth_and_measures_the_wait() -> None:
    made: list[int] = []
    stands_still, four = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        assert stands_still.wait(60)  # until the reader has found nothing
        for i in range(10):
            made.append(i)
            if i == 3:
                four.set()
            yield i

    ahead = Prefetched(slow(), depth=2, interrupted=lambda: bool(stands_still.set()))
    assert next(ahead) == 0
    assert ahead.waited >= prefetch._POLL_SECONDS
    assert four.wait(60)
    assert len(made) == 4  # one taken, two ready, one in hand
    ahead.close()
    ahead.close()
    assert alive() == 0


def test_prefetched_raises_what_its_thread_raised_after_what_came_before() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise PotstillError("the file is gone")

    ahead = Prefetched(broken())
    assert next(ahead) == 1
    with pytest.raises(PotstillError, match="the file is gone"):
        next(ahead)
    assert list(ahead) == []
    assert alive() == 0


def test_a_forgotten_prefetched_ends_its_thread() -> None:
    ahead = Prefetched(iter(range(100)))
    assert next(ahead) == 0
    del ahead
    assert alive() == 0


@pytest.mark.parametrize("case", range(20))
def test_any_settings_lose_nothing_and_go_on_from_anywhere(
    tmp_path: Path, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(case)
    monkeypatch.setattr("potstill.data.loader.GROUP_STEPS", choose.randint(1, 4))
    monkeypatch.setattr("potstill.data.planning.TOKENIZED_AT_ONCE", choose.choice([1, 3, 256]))
    sources = [
        {
            "files": write_jsonl(
                tmp_path / f"{s}.jsonl", [{"text": f"{s}.{i} " + "x" * choose.randint(0, 40)} for i in range(n)]
            )
        }
        for s, n in enumerate(choose.choices([1, 2, 9, 40], k=choose.randint(1, 3)))
    ]
    data = DataConfig(
        sources=sources,
        max_length=choose.choice([16, 50, 200]),
        piece_bytes=choose.choice([None, 14]),
        packing=choose.random() < 0.6,
        shuffle=choose.random() < 0.7,
        shuffle_buffer=choose.choice([1, 7, 1000]),
    )
    epochs, limit = choose.randint(1, 4), choose.choice([None, None, 1, 30])
    settings = {"batch_size": choose.randint(1, 6), "micro_batch_size": choose.randint(1, 3), "seed": case}
    settings |= {"epochs": epochs, "limit": limit}
    whole = list(steps(data, **settings))
    one_epoch = Counter(all_texts(list(steps(data, **settings | {"epochs": 1, "limit": None}))))
    found = Counter(all_texts(whole))
    if limit is None:
        assert found == Counter({text: n * epochs for text, n in one_epoch.items()})
    else:
        assert found.total() == min(limit, one_epoch.total() * epochs)
    assert all(sum(b.input_ids.shape[0] for b in w.batches) == settings["batch_size"] for w in whole[:-1])
    assert steps(data, **settings).count() == len(whole)
    for i in sorted(choose.sample(range(len(whole)), min(6, len(whole)))):
        rest = list(steps(data, **settings, state=json.loads(json.dumps(whole[i].state))))
        assert [w.state for w in rest] == [w.state for w in whole[i + 1 :]]
        assert [all_texts([w]) for w in rest] == [all_texts([w]) for w in whole[i + 1 :]]
