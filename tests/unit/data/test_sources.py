from __future__ import annotations

import gzip
import json
import os
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem

from potstill.config import SourceConfig
from potstill.data.sources import Source
from potstill.extras import EXTRAS
from potstill.types import PotstillError

TEXTS = [f"text {i} é" for i in range(700)]


def source(shuffle: bool = False, seed: int = 0, **config: Any) -> Source:
    return Source(SourceConfig(**config), "data.sources[0]", seed=seed, shuffle=shuffle)


def texts(opened: Source, epoch: int = 0, start: tuple[int, int] = (0, 0), column: str = "text") -> list[Any]:
    return [record[column] for record, _, _ in opened.records(epoch, start)]


def write(folder: Path, kind: str, rows: list[dict[str, Any]], name: str = "a") -> Path:
    path = folder / f"{name}.{kind.split('-')[-1]}"
    table = pa.Table.from_pylist(rows) if rows else pa.table({"text": pa.array([], pa.string())})
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if kind in ("jsonl", "lines-json"):
        path.write_text(lines, encoding="utf-8")
    elif kind == "list-json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=100)
    elif kind in ("file-arrow", "stream-arrow"):
        opener = pa.ipc.new_file if kind == "file-arrow" else pa.ipc.new_stream
        with opener(str(path), table.schema) as writer:
            for batch in table.to_batches(max_chunksize=300):
                writer.write_batch(batch)
    return path


KINDS = ["jsonl", "jsonl.gz", "lines-json", "list-json", "parquet", "file-arrow", "stream-arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_its_records_in_order_from_any_of_them(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, [{"number": i, "text": text} for i, text in enumerate(TEXTS)])
    opened = source(files=str(path))
    assert texts(opened) == TEXTS
    positions = [position for _, _, position in opened.records(0)]
    assert positions == [(0, i) for i in range(700)]
    for start in (0, 1, 99, 100, 299, 300, 555, 699, 700):
        assert texts(opened, start=(0, start)) == TEXTS[start:]
    unit = "line" if "json" in kind and kind != "list-json" else "record"
    assert next(opened.records(0, (0, 41)))[1] == f"{path}, {unit} 42"


def test_a_txt_file_is_one_document_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\ntwö\n".encode())
    (tmp_path / "b.txt").write_bytes(b"three")
    opened = source(files=str(tmp_path / "*.txt"))
    assert texts(opened) == ["one\r\ntwö\n", "three"]
    assert texts(opened, start=(0, 1)) == ["three"]
    assert texts(opened, start=(1, 0)) == ["three"]


def test_blank_lines_are_no_records_but_count_as_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}')
    records = list(source(files=str(tmp_path / "a.jsonl")).records(0))
    assert [(r["text"], where.split(", ")[-1], at) for r, where, at in records] == [
        ("a", "line 1", (0, 0)),
        ("b", "line 4", (0, 1)),
    ]
    assert texts(source(files=str(tmp_path / "a.jsonl")), start=(0, 1)) == ["b"]


def test_several_files_come_in_another_order_each_epoch_and_begin_again_in_the_middle(tmp_path: Path) -> None:
    for i in range(6):
        write(tmp_path, "jsonl", [{"text": f"{i}{j}"} for j in range(3)], name=str(i))
    pattern = str(tmp_path / "*.jsonl")
    straight = [f"{i}{j}" for i in range(6) for j in range(3)]
    assert texts(source(files=pattern)) == straight
    assert texts(source(files=[pattern, str(tmp_path / "0.jsonl")])) == [*straight, "00", "01", "02"]
    opened = source(shuffle=True, files=pattern)
    epochs = [texts(opened, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == straight for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert texts(source(shuffle=True, seed=1, files=pattern)) != epochs[0]
    records = list(opened.records(1))
    for i, (_, _, position) in enumerate(records):
        assert texts(source(shuffle=True, files=pattern), 1, position) == epochs[1][i:]


def test_a_fingerprint_is_of_names_sizes_and_rows_and_not_of_places_and_times(tmp_path: Path) -> None:
    def of(**config: Any) -> str | None:
        return source(**config).fingerprint()

    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "parquet", [{"text": "a"}])
        write(tmp_path / folder, "jsonl", [{"text": "a"}])
    files = [str(tmp_path / "x" / "a.*"), str(tmp_path / "y" / "a.*")]
    before = of(files=files[0])
    assert before is not None and before.startswith("2 files of ")
    os.utime(tmp_path / "x" / "a.jsonl", (1, 1))
    assert of(files=files[0]) == of(files=files[1]) == before
    write(tmp_path / "y", "jsonl", [{"text": "a"}, {"text": "b"}])
    (tmp_path / "x" / "a.jsonl").rename(tmp_path / "x" / "a.b.jsonl")
    assert len({before, of(files=files[0]), of(files=files[1])}) == 3
    with pytest.raises(PotstillError, match=r"sources\[0\].files: .*bad.parquet cannot be read"):
        (tmp_path / "bad.parquet").write_bytes(b"no")
        of(files=str(tmp_path / "bad.parquet"))


def test_the_fingerprint_of_a_data_set_is_its_own_and_a_stream_has_none(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for name, count in (("a", 5), ("b", 6)):
        datasets.Dataset.from_dict({"text": TEXTS[:count]}).save_to_disk(str(tmp_path / name))
    a, again, b = (source(dataset=str(tmp_path / name)).fingerprint() for name in "aab")
    assert a == again != b
    assert a is not None and a.startswith("5 rows, ")
    assert source(dataset=str(tmp_path / "a"), streaming=True).fingerprint() is None


def test_globs_may_reach_into_folders(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    write(tmp_path / "x" / "y", "jsonl", [{"text": "deep"}])
    assert texts(source(files=str(tmp_path / "**" / "*.jsonl"))) == ["deep"]


def test_only_the_named_columns_of_a_columnar_file_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", [{"body": "a", "other": 1}])
    assert [record for record, _, _ in source(files=str(path), text="body").records(0)] == [{"body": "a"}]


@pytest.mark.parametrize("kind", [*KINDS, "dataset", "streaming"])
def test_nulls_deep_in_a_chat_are_padding_in_columns_and_meant_in_json(tmp_path: Path, kind: str) -> None:
    add = {"name": "add", "arguments": {"a": 1, "b": None}}
    chats = [[{"role": "assistant", "tool_calls": [add]}], [{"role": "assistant", "tool_calls": [{"name": "now"}]}]]
    rows = [{"chat": chat, "tools": [{"name": "add", "default": None}], "json": '[{"a": null}]'} for chat in chats]
    if kind in ("dataset", "streaming"):
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
        place: dict[str, Any] = {"dataset": str(tmp_path / "set"), "streaming": kind == "streaming"}
    else:
        place = {"files": str(write(tmp_path, kind, rows))}
    opened = source(**place, messages="chat", tools="tools")
    if "json" not in kind:
        del add["arguments"]["b"]  # type: ignore[attr-defined]
    assert texts(opened, column="chat") == chats
    assert (
        texts(opened, column="tools") == [[{"name": "add", "default": None} if "json" in kind else {"name": "add"}]] * 2
    )
    assert texts(source(**place, messages="json"), column="json") == ['[{"a": null}]'] * 2


def test_a_data_set_folder_is_read_by_split_and_shuffled_whole(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "more": list(range(700))})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows.select(range(10)), "test": rows.select(range(10, 20))}).save_to_disk(
        str(tmp_path / "both")
    )
    assert texts(source(dataset=str(tmp_path / "one"))) == TEXTS
    assert texts(source(dataset=str(tmp_path / "both"), split="test")) == TEXTS[10:20]
    opened = source(shuffle=True, dataset=str(tmp_path / "one"))
    first, second = texts(opened, 0), texts(opened, 1)
    assert sorted(first) == sorted(second) == sorted(TEXTS) and first != second and first != TEXTS
    assert texts(source(shuffle=True, dataset=str(tmp_path / "one")), 1, (0, 333)) == second[333:]
    record, where, position = next(opened.records(0, (0, 5)))
    assert record == {"text": first[5]} and position == (0, 5)
    assert where == f"{tmp_path / 'one'}, record {TEXTS.index(first[5]) + 1}"
    with pytest.raises(PotstillError, match=r"data.sources\[0\].split: .* has no split dev \(there: train, test\)"):
        texts(source(dataset=str(tmp_path / "both"), split="dev"))
    with pytest.raises(
        PotstillError, match=r"sources\[0\].text: the data set .* has no column txt .* mean text: text\?"
    ):
        texts(source(dataset=str(tmp_path / "one"), text="txt"))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_streamed_data_set_begins_again_anywhere(tmp_path: Path, shuffle: bool) -> None:
    pytest.importorskip("datasets")
    for i in range(4):
        write(tmp_path, "jsonl", [{"text": f"{i}{j}", "n": j} for j in range(5)], name=str(i))
    config = {"dataset": str(tmp_path), "streaming": True, "shuffle": shuffle}
    straight = [f"{i}{j}" for i in range(4) for j in range(5)]
    epochs = [texts(source(**config), epoch) for epoch in range(2)]
    assert all(sorted(epoch) == straight for epoch in epochs)
    assert (epochs[0] != epochs[1]) == shuffle
    for start in (0, 3, 7, 20):
        assert texts(source(**config), 1, (0, start)) == epochs[1][start:]


def test_a_data_set_that_cannot_be_loaded_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'someone/text' on the Hub (LocalEntryNotFoundError)\nmore\nlines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(PotstillError) as error:
        texts(source(dataset="someone/text"))
    assert str(error.value) == (
        "data.sources[0].dataset: cannot load someone/text (split train): "
        "Couldn't reach 'someone/text' on the Hub (LocalEntryNotFoundError)"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"files": "no.jsonl"}, r"data.sources\[0\].files: there is no file no.jsonl \(looked in /.*/no.jsonl\)"),
        ({"files": "no/*.jsonl"}, r"data.sources\[0\].files: no file matches no/\*.jsonl"),
        ({"files": "."}, r"files: . is a folder; give its files with a glob"),
        ({"files": "a.csv"}, r"files: a.csv is of no known kind; known by their ending: .jsonl, .jsonl.gz, .json, "),
        ({"files": []}, r"data.sources\[0\].files is empty"),
        ({"files": "shipped:nothing"}, r"shipped:nothing does not ship with potstill"),
    ],
)
def test_files_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text\nHi\n")
    with pytest.raises(PotstillError, match=message):
        source(**config)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "file-arrow"])
def test_a_missing_column_names_those_that_are_there(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, [{"body": "a", "id": 1}])
    place = f"{path}, line 1" if kind == "jsonl" else str(path)
    with pytest.raises(PotstillError) as error:
        texts(source(files=str(path)))
    assert str(error.value) == (
        f"data.sources[0].text: {place} has no column text (there: body, id); set text to one of them"
    )
    with pytest.raises(PotstillError) as error:
        texts(source(files=str(path), text="boddy"))
    assert str(error.value) == (
        f"data.sources[0].text: {place} has no column boddy (there: body, id); did you mean text: body?"
    )


def test_a_later_line_without_the_column_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{"q": "a", "a": "b"}, {"q": "c"}])
    with pytest.raises(
        PotstillError, match=r"data.sources\[0\].completion: .*a.jsonl, line 2 has no column a \(there: q\)"
    ):
        texts(source(files=str(path), prompt="q", completion="a"), column="q")


DEEP = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TORN_GZIP = gzip.compress(b'{"text": "a"}\n', mtime=0)[:10] + b"\xff" * 30


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a.jsonl, line 2 is not JSON: Expecting value"),
        ("a.jsonl", b'["a"]\n', r"a.jsonl, line 1 holds a list where a record"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl, line 1 is not UTF-8"),
        ("a.json", b'[{"text": "a"}, 3]', r"a.json, record 2 holds a int where a record"),
        ("a.json", b'[{"text": "a"}', r"a.json is not JSON"),
        ("a.txt", b"ab\xff", r"a.txt is not UTF-8 \(.*position 2.*\); save it as UTF-8"),
        ("a.parquet", b"not a parquet file", r"data.sources\[0\].files: .*a.parquet cannot be read: "),
        ("a.arrow", b"not an arrow file", r"data.sources\[0\].files: .*a.arrow cannot be read: "),
        ("a.jsonl", DEEP + b"\n", r"a.jsonl, line 1 is not JSON: maximum recursion depth exceeded"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}\n", r"a.jsonl, line 1 is not JSON: Exceeds the limit"),
        ("a.json", b"[" + DEEP + b"]", r"a.json is not JSON: maximum recursion depth exceeded"),
        ("a.json", b'[{"text": "\xff"}]', r"a.json is not JSON: 'utf-8' codec"),
        ("a.jsonl.gz", TORN_GZIP, r"data.sources\[0\].files: .*a.jsonl.gz cannot be read: error: Error -3"),
        ("a.jsonl.gz", b"not gzip", r"data.sources\[0\].files: .*a.jsonl.gz cannot be read: "),
    ],
)
def test_broken_files_are_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PotstillError, match=message) as error:
        texts(source(files=str(tmp_path / name)))
    assert "\n" not in str(error.value)


def _untrue_offsets(folder: Path, kind: str) -> dict[str, str]:
    """A column whose first text is said to be a gigabyte long: Arrow itself would read that far."""
    offsets = pa.array([0, 1 << 30, 2], pa.int32()).buffers()[1]
    column = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab"))
    batch = pa.record_batch([column], names=["text"])
    if kind == "folder":
        (folder / "saved").mkdir()
        path = folder / "saved" / "data-00000-of-00001.arrow"
        (folder / "saved" / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": path.name}], "_fingerprint": "f", "_format_columns": None,
                        "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None})
        )  # fmt: skip
        info = {"features": {"text": {"dtype": "string", "_type": "Value"}}}
        (folder / "saved" / "dataset_info.json").write_text(json.dumps(info))
    else:
        path = folder / "a.arrow"
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with make(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    return {"dataset": str(folder / "saved")} if kind == "folder" else {"files": str(path)}


@pytest.mark.parametrize("kind", ["file", "stream", "folder"])
def test_arrow_that_points_outside_itself_is_a_sentence(tmp_path: Path, kind: str) -> None:
    place: dict[str, Any] = _untrue_offsets(tmp_path, kind)
    for more in ({}, {"streaming": True}) if kind == "folder" else ({},):
        with pytest.raises(PotstillError, match=r"cannot be read: .*[Oo]ffset"):
            texts(source(**place, **more))


def test_a_saved_folder_is_read_alike_with_streaming(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "set"))
    for shuffle in (False, True):
        mapped, streamed = (
            source(shuffle, dataset=str(tmp_path / "set"), streaming=streaming) for streaming in (False, True)
        )
        assert texts(streamed) == texts(mapped) and sorted(texts(mapped)) == sorted(TEXTS)
        assert texts(streamed, 1, (0, 500)) == texts(mapped, 1)[500:]


def test_batches_that_a_resume_leaves_out_are_not_read(tmp_path: Path) -> None:
    offsets = pa.array([0, 1 << 30, 2], pa.int32()).buffers()[1]
    untrue = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab"))
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), pa.schema({"text": pa.string()})) as writer:
        for column in (untrue, pa.array(["c", "d"])):
            writer.write_batch(pa.record_batch([column], names=["text"]))
    assert texts(source(files=str(path)), start=(0, 2)) == ["c", "d"]
    assert texts(source(files=str(path)), start=(0, 3)) == ["d"]
    with pytest.raises(PotstillError, match=r"cannot be read: .*[Oo]ffset"):
        texts(source(files=str(path)), start=(0, 1))


@pytest.mark.parametrize("kind", ["parquet", "file-arrow", "stream-arrow"])
def test_no_damage_is_more_than_a_sentence(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, [{"text": text} for text in TEXTS])
    whole = path.read_bytes()
    seed = 12
    generator = random.Random(seed)
    told = 0
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(generator.choice([1, 4, 30])):
            content[generator.randrange(len(content))] = generator.choice([0, 127, 128, 255])
        path.write_bytes(content[: generator.choice([len(content), generator.randrange(len(content))])])
        try:
            texts(source(files=str(path)))
        except PotstillError as error:
            assert "\n" not in str(error), (seed, str(error))
            told += 1
    assert told > 15


def test_only_some_records_have_tools(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"chat": [1]}, {"chat": [2], "tools": [{"name": "f"}]}]
    path = write(tmp_path, "jsonl", rows)
    assert texts(source(files=str(path), messages="chat", tools="tools"), column="tools") == [None, [{"name": "f"}]]
    with pytest.raises(
        PotstillError, match=r"line 2 has no column tolls \(there: chat, tools\); did you mean tools: tools"
    ):
        texts(source(files=str(path), messages="chat", tools="tolls"), column="chat")
    with pytest.raises(
        PotstillError, match=r"data.sources\[0\].tools: no record has a column functions; leave tools out"
    ):
        texts(source(files=str(path), messages="chat", tools="functions"), column="chat")


@pytest.fixture
def bucket() -> Iterator[Any]:
    """A store in memory, which fsspec reads as it reads others."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_gives_every_format_as_a_disk_does(tmp_path: Path, bucket: Any, kind: str) -> None:
    path = write(tmp_path, kind, [{"number": i, "text": text} for i, text in enumerate(TEXTS)])
    address = f"memory://bucket/{path.name}"
    bucket.pipe(address, path.read_bytes())
    here, there = source(files=str(path)), source(files=address)
    assert texts(there) == TEXTS
    for start in (0, 99, 300, 699, 700):
        assert texts(there, start=(0, start)) == TEXTS[start:]
    assert there.fingerprint() == here.fingerprint()
    assert next(there.records(0))[1].startswith(f"{address}, ")


def test_a_glob_over_a_store_has_an_order_of_its_own(tmp_path: Path, bucket: Any) -> None:
    for name in ("c.txt", "a.txt", "b.txt", "deep/d.txt"):
        bucket.pipe(f"memory://bucket/{name}", name.encode())
    assert texts(source(files="memory://bucket/*.txt")) == ["a.txt", "b.txt", "c.txt"]
    assert texts(source(files=["memory://bucket/**/d.txt", "memory://bucket/a.txt"])) == ["deep/d.txt", "a.txt"]
    shuffled = [texts(source(shuffle=True, seed=seed, files="memory://bucket/*.txt")) for seed in range(8)]
    assert {tuple(sorted(each)) for each in shuffled} == {("a.txt", "b.txt", "c.txt")} and len(
        set(map(tuple, shuffled))
    ) > 1


def test_files_inside_an_archive_of_a_store(tmp_path: Path, bucket: Any) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("one.jsonl", "two.jsonl"):
            archive.writestr(f"texts/{name}", json.dumps({"text": name}))
    bucket.pipe("memory://bucket/a.zip", (tmp_path / "a.zip").read_bytes())
    assert texts(source(files="zip://texts/*.jsonl::memory://bucket/a.zip")) == ["one.jsonl", "two.jsonl"]


def test_damage_in_a_store_is_told_like_any_other(bucket: Any) -> None:
    bucket.pipe("memory://bucket/a.parquet", b"PAR1 and no more")
    with pytest.raises(PotstillError, match=r"^data.sources\[0\].files: memory://bucket/a.parquet cannot be read: "):
        texts(source(files="memory://bucket/a.parquet"))


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ("memory://bucket/none.jsonl", "there is no file memory://bucket/none.jsonl"),
        ("memory://bucket/*.parquet", "no file matches memory://bucket/*.parquet"),
        ("memory://bucket/folder", "is a folder; give its files with a glob, such as memory://bucket/folder/*.jsonl"),
        ("memory://bucket/a.bin", "memory://bucket/a.bin is of no known kind"),
        ("nowhere://bucket/a.jsonl", "cannot look for nowhere://bucket/a.jsonl: Protocol not known: nowhere"),
    ],
)
def test_what_a_store_does_not_have_is_one_sentence(bucket: Any, files: str, sentence: str) -> None:
    for name in ("folder/a.jsonl", "a.bin"):
        bucket.pipe(f"memory://bucket/{name}", b"{}")
    with pytest.raises(PotstillError) as caught:
        source(files=files)
    assert str(caught.value).startswith("data.sources[0].files: ") and sentence in str(caught.value)


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs"), ("https", "http")])
def test_a_store_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch, scheme: str, extra: str) -> None:
    for package in (name for names in EXTRAS.values() for name in names):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PotstillError, match=rf"^reading {scheme}:// needs {' and '.join(EXTRAS[extra])}: pip install"):
        source(files=f"{scheme}://bucket/a.jsonl")


def test_the_hub_is_a_store(monkeypatch: pytest.MonkeyPatch, bucket: Any) -> None:
    """`hf://` is read by huggingface_hub's own file system, here with a repository in memory."""
    bucket.pipe("memory://datasets/org/name/data/a.jsonl", b'{"text": "from the hub"}')
    for method in ("glob", "isfile", "size", "open"):
        monkeypatch.setattr(HfFileSystem, method, lambda self, path, *a, to=method: getattr(bucket, to)(f"/{path}", *a))
    assert texts(source(files="hf://datasets/org/name/data/*.jsonl")) == ["from the hub"]
