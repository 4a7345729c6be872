"""Inputs that nobody meant: each works, or ends in one sentence. Recipes, overrides, data, templates, manifests, models,
and both sides of the wire of `potstill serve`."""

from __future__ import annotations

import gzip
import http.server
import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from campaign import Campaign, Forge, broken
from forge import Ended
from mutations import BYTES, ODD, changed, copied, files_in, hurt
from served import Served
from tiny_runs import TinyRuns

from potstill.config.recipe import recipe_yaml
from potstill.serving.protocol import Question, read_answer, write_question
from potstill.signals.kinds import TopK
from potstill.types import Example

MEMORY_MB = 4000
Fuzzed = Callable[[random.Random], tuple[Ended, str]]  # what came of it, and what it was

WORDS = ["The", "people", "of", "the", "nation", "met,", "é", "人", "🙂", "and", "spoke.\n"]
CHAT = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "<think>me</think>The people.", "name": "x"},
]


def _recipes(runs: TinyRuns, forge: Forge) -> Fuzzed:
    """As YAML: bytes, or what it says."""
    keys = runs.recipe("fuzzed", eval=runs.evaluation(every=2)).model_dump(mode="json", by_alias=True)
    text = recipe_yaml(runs.recipe("fuzzed")).encode()

    def fuzzed(numbers: random.Random) -> tuple[Ended, str]:
        path = forge.folder / "fuzzed.yaml"
        if numbers.random() < 0.4:
            what = numbers.choice(list(BYTES))
            path.write_bytes(BYTES[what](text, numbers))
        else:
            document, what = changed(keys, numbers)
            path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return forge.do("read_recipe", path.name, memory_mb=MEMORY_MB), what

    return fuzzed


def _dotted(value: Any, prefix: str = "") -> Iterator[str]:
    yield prefix.rstrip(".")
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, sub in inside:
        yield from _dotted(sub, f"{prefix}{key}.")


def _overrides(runs: TinyRuns, forge: Forge) -> Fuzzed:
    """A run with one or two odd values in its recipe."""
    keys = runs.recipe("odd").model_dump(mode="json", by_alias=True)
    recipe = runs.file("odd", "train.steps=2")
    names = [name for name in _dotted(keys) if name]

    def fuzzed(numbers: random.Random) -> tuple[Ended, str]:
        odd = [_override(numbers, names) for _ in range(numbers.randrange(1, 3))]
        fixed = [f"run={forge.folder / 'odd'}"] if numbers.random() < 0.9 else []
        shutil.rmtree(forge.folder / "odd", ignore_errors=True)
        words = [word for word in ["train", recipe, *fixed, *odd] if "\0" not in str(word)]
        return forge.command(*words, memory_mb=MEMORY_MB), " ".join(odd)

    return fuzzed


def _override(numbers: random.Random, names: list[str]) -> str:
    name = numbers.choice(names)
    if numbers.random() < 0.1:
        name = numbers.choice([f"{name}.x", name[:-1], f"{name}[0]", "", name.upper()])
    value = numbers.choice([v for v in ODD if not isinstance(v, str) or len(v) < 100])
    text = json.dumps(value) if numbers.random() < 0.7 else str(value)
    # Nothing here may run for ever, or long enough to look like it.
    return f"{name}={text}" if name not in ("train.steps", "train.epochs") else f"{name}=2"


def _data_files(folder: Path) -> list[Path]:
    """One of each format."""
    folder.mkdir()
    records = [{"text": " ".join(WORDS[i % 3 :]) * (i + 1), "m": CHAT, "p": "Who?", "n": i} for i in range(9)]
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (folder / "data.jsonl").write_text(lines, encoding="utf-8")
    (folder / "data.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "data.json").write_text(json.dumps(records), encoding="utf-8")
    (folder / "data.txt").write_text(records[3]["text"], encoding="utf-8")
    table = pa.Table.from_pylist(records)
    pq.write_table(table, folder / "data.parquet", row_group_size=4)
    pq.write_table(table, folder / "plain.parquet", compression="none", use_dictionary=False)
    for name, new in (("data.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with new(folder / name, table.schema) as out:
            out.write_table(table)
    return sorted(folder.iterdir())


def _data(runs: TinyRuns, forge: Forge) -> Fuzzed:
    """Files of every format, damaged; records with odd values."""
    files = _data_files(runs.folder / "data")
    records = [json.loads(line) for line in (runs.folder / "data" / "data.jsonl").read_text().splitlines()]
    columns = [
        {},
        {"text": "p"},
        {"prompt": "p", "completion": "text"},
        {"messages": "m"},
        {"messages": "m", "tools": "p"},
    ]

    def fuzzed(numbers: random.Random) -> tuple[Ended, str]:
        source = numbers.choice(files)
        path = forge.folder / source.name
        if source.suffix in (".jsonl", ".json") and numbers.random() < 0.6:
            odd, what = changed(records, numbers, 4)
            rows = odd if isinstance(odd, list) else [odd]
            whole = json.dumps(odd) if source.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
            path.write_text(whole, encoding="utf-8")
        else:
            what = numbers.choice(list(BYTES))
            path.write_bytes(BYTES[what](source.read_bytes(), numbers))
        chosen = numbers.choice(columns) if source.suffix != ".txt" else {}
        section = json.dumps({"sources": [{"files": path.name, **chosen}]})
        return forge.do("read_data", section, memory_mb=MEMORY_MB), f"{source.name}, {what}, {chosen}"

    return fuzzed


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# In place of a word of the template, or after it
JINJA = [
    "", "{{ 1/0 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**10 }}", "{{ messages.x.y }}",
    "{{ raise_exception('no') }}",
    "{% include 'x' %}", "{{ ''.__class__.__mro__ }}", "{% set m = none %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages | tojson }}", "{{ range(10**8) | list }}", "{{ strftime_now('%Y') }}", "{{ tools[0].x }}", "{{ 10**10**8 }}",
    "{% for a in messages %}{% for b in messages * 10**6 %}{% endfor %}{% endfor %}", "{{ '%s' % messages }}", "{{ '\\x00' }}",
]  # fmt: skip


def _templates(runs: TinyRuns, forge: Forge) -> Fuzzed:
    chats = runs.folder / "chats.jsonl"
    chats.write_text("".join(json.dumps({"m": CHAT * (i + 1)}) + "\n" for i in range(3)), encoding="utf-8")

    def fuzzed(numbers: random.Random) -> tuple[Ended, str]:
        place = numbers.randrange(len(TEMPLATE))
        end = place if numbers.random() < 0.7 else min(len(TEMPLATE), place + numbers.randrange(30))
        template = TEMPLATE[:place] + numbers.choice(JINJA) + TEMPLATE[end:]
        if numbers.random() < 0.3:
            template = BYTES[numbers.choice(list(BYTES))](TEMPLATE.encode(), numbers).decode(errors="replace")
        section = {"sources": [{"files": str(chats), "messages": "m"}], "template": template}
        return forge.do("read_data", json.dumps(section), memory_mb=MEMORY_MB), template

    return fuzzed


def _manifests(runs: TinyRuns, forge: Forge) -> Fuzzed:
    cache = runs.folder / "cache"
    assert forge.command("cache", "build", runs.teacher, "--data", runs.text, "--out", cache, "--k", 8).code == 0
    manifest = json.loads((cache / "manifest.json").read_text())
    uses: list[Callable[[Path], list[object]]] = [
        lambda folder: ["cache", "info", folder],
        lambda folder: ["cache", "verify", folder],
        lambda folder: ["cache", "convert", folder, "--out", folder.with_name("smaller"), "--k", 4],
        lambda folder: ["cache", "build", runs.teacher, "--data", runs.text, "--out", folder, "--k", 8],
    ]

    def fuzzed(numbers: random.Random) -> tuple[Ended, str]:
        folder = copied(cache, forge.folder / "manifest" / "cache")
        shutil.rmtree(forge.folder / "manifest" / "smaller", ignore_errors=True)
        document, what = changed(manifest, numbers, 3)
        (folder / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
        words = numbers.choices(uses, [3, 2, 1, 1])[0](folder)
        return forge.command(*words, memory_mb=MEMORY_MB), f"{words[1]}: {what}"

    return fuzzed


def _models(runs: TinyRuns, forge: Forge) -> Fuzzed:
    """Configurations and tokenizers with odd values."""
    documents = {path.name: json.loads(path.read_text()) for path in files_in(runs.teacher) if path.suffix == ".json"}
    names = ["config.json"] * 4 + ["tokenizer_config.json"] * 2 + ["generation_config.json", "tokenizer.json"]

    def fuzzed(numbers: random.Random) -> tuple[Ended, str]:
        folder = copied(runs.teacher, forge.folder / "model")
        name = numbers.choice(names)
        if numbers.random() < 0.8:
            document, what = changed(documents[name], numbers)
            (folder / name).write_text(json.dumps(document), encoding="utf-8")
        else:
            what = hurt(folder / name, numbers)
        words = ["eval", folder, "--data", runs.text, "--max-length", 64, "--examples", 2]
        return forge.command(*words, memory_mb=MEMORY_MB), f"{name}, {what}"

    return fuzzed


def _question() -> Question:
    ids = np.arange(5, 25, dtype=np.int32)
    predicted = np.ones(20, dtype=np.bool_)
    predicted[0] = False
    form = TopK(vocabulary=2048, k=4)
    return Question(form, [Example("a" * 32, "", ids, predicted, 0, source="a document")])


def _request(numbers: random.Random, body: bytes) -> tuple[bytes, str]:
    """The bytes of an HTTP request that is wrong somewhere."""
    what = numbers.choice(list(BYTES))
    path = numbers.choice(
        ["/score"] * 8 + ["/version", "/head", "/tokenizer", "/metrics", "/health", "/nowhere", "/%00", "//"]
    )
    method = numbers.choice(["POST"] * 8 + ["GET", "PUT", "HEAD", "OPTIONS", "BREW"])
    headers = {"host": "127.0.0.1", "connection": "close"}
    if numbers.random() < 0.6:
        body = _asked(numbers)
        what = "a question with odd numbers"
    else:
        body = BYTES[what](body, numbers)
    headers["content-length"] = str(len(body))
    if numbers.random() < 0.15:
        headers[
            numbers.choice(["content-length", "transfer-encoding", "content-encoding", "expect", "host", "x" * 5000])
        ] = numbers.choice(["-1", "5", "99999999999999", "chunked", "gzip", "", "100-continue", "évil", "x" * 9000])
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    request = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + body
    if numbers.random() < 0.1:
        what, request = f"{what}, and its head too", BYTES[numbers.choice(list(BYTES))](request, numbers)
    return request, f"{method} {path} {what}"


def _asked(numbers: random.Random) -> bytes:
    """A safetensors body whose header says odd things."""
    body = write_question(_question())
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    for name in ("format", "keys"):
        header["__metadata__"][name] = json.dumps(changed(json.loads(header["__metadata__"][name]), numbers, 1)[0])
    if numbers.random() < 0.4:
        header, _ = changed(header, numbers, 2)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body[8 + length :]


def _answered(port: int, request: bytes) -> bytes:
    """What a server sends to this until it closes; it may close at once."""
    found = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                found += part
    except ConnectionError:
        pass
    return found


def _requests(server: Served) -> Fuzzed:
    question, expected = _question(), None
    body = write_question(question)

    def ended(code: int, err: str, hung: bool = False) -> Ended:
        return Ended(code, 0, "", err, 0.0, hung=hung)

    def fuzzed(numbers: random.Random) -> tuple[Ended, str]:
        nonlocal expected
        request, what = _request(numbers, body)
        lines = len(server.said)
        try:
            found = _answered(server.port, request)
            status = int(found.split(b" ", 2)[1]) if found.startswith(b"HTTP/1.1 ") else 0
            honest = httpx.post(f"{server.address}/score", content=body, timeout=30)
            signal = {name: values.tobytes() for name, values in read_answer(honest.content, question.form, 19).items()}
        except (TimeoutError, httpx.HTTPError) as error:
            return ended(1, repr(error), hung=True), what
        expected = expected or signal
        if signal != expected:
            return ended(70, "an honest question has another answer than before"), what
        if status >= 500 or server.process.poll() is not None:
            return ended(70, f"{status}: {found[-300:]!r}"), what
        told = "".join(server.said[lines:])
        return ended(70 if "Traceback" in told else 0, told), what

    return fuzzed


class _Liar(http.server.BaseHTTPRequestHandler):
    """Between a client and a server: one kind of answer is changed on its way."""

    origin = ""
    path_changed = ""
    change: Callable[[bytes], bytes] = staticmethod(lambda body: body)
    status: int | None = None

    def _pass(self, body: bytes | None) -> None:
        found = httpx.request(self.command, f"{self.origin}{self.path}", content=body, timeout=30)
        content, status = found.content, found.status_code
        if self.path == self.path_changed and status == 200:
            content, status = self.change(content), self.status or status
        self.send_response(status)
        for name, value in found.headers.items():
            if name.startswith("x-potstill") or name == "content-type":
                self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        self._pass(self.rfile.read(int(self.headers["content-length"])))

    def log_message(self, *_: object) -> None:
        pass


class _Quiet(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that has heard enough leaves."""


@contextmanager
def _liar(origin: str) -> Iterator[SimpleNamespace]:
    class Here(_Liar):
        pass

    Here.origin = origin
    with _Quiet(("127.0.0.1", 0), Here) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield SimpleNamespace(lies=Here, address=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def _answers(runs: TinyRuns, forge: Forge, liar: SimpleNamespace) -> Fuzzed:
    """What a client makes of a server that lies, or is broken."""
    remotes = [{"kind": "top_k", "k": 4}, {"kind": "hidden"}, {"kind": "token_logprobs"}]

    def lie(numbers: random.Random) -> tuple[Callable[[bytes], bytes], str]:
        what = numbers.choice(list(BYTES))

        def of_bytes(body: bytes) -> bytes:
            return BYTES[what](body, numbers)

        def of_json(body: bytes) -> bytes:
            return json.dumps(changed(json.loads(body), numbers)[0]).encode()

        return (of_json, "JSON") if numbers.random() < 0.5 else (of_bytes, what)

    def fuzzed(numbers: random.Random) -> tuple[Ended, str]:
        path = numbers.choice(["/version", "/tokenizer", "/head", "/score", "/score"])
        change, what = lie(numbers)
        if path in ("/head", "/score") and what == "JSON":
            change, what = (
                (lambda body: numbers.choice([b"{}", b"[]", b"null", body[:8] + b"{" + body[9:]])),
                "JSON in its place",
            )
        liar.lies.path_changed, liar.lies.change = path, staticmethod(change)
        liar.lies.status = numbers.choice([None] * 8 + [204, 301, 400, 404, 429])
        remote = {**numbers.choice(remotes), "retry_timeout": 0.5, "timeout": 20.0}
        if path == "/head":
            remote["kind"] = "hidden"
            remote.pop("k", None)
        shutil.rmtree(forge.folder / "taught", ignore_errors=True)
        teacher = {"server": liar.address, "remote": remote}
        own = {  # what a teacher that tells only how likely a text is can be learnt from
            "loss": {"divergence": "policy_gradient_kl"},
            "rollouts": {"on_policy_fraction": 1.0, "prompt_tokens": 4, "sampling": {"max_new_tokens": 4}},
        }
        keys = {"teachers": [teacher], **(own if remote["kind"] == "token_logprobs" else {})}
        recipe = runs.file("taught", "train.steps=1", f"run={forge.folder / 'taught'}", **keys)
        ended = forge.command("train", recipe, memory_mb=MEMORY_MB)
        return ended, f"{path} {what} {liar.lies.status} {remote['kind']}"

    return fuzzed


def test_fuzz(runs: TinyRuns, forge: Forge) -> None:
    campaign = Campaign("fuzz", 900)
    with Served(runs.teacher) as server, _liar(server.address) as liar:
        kinds: dict[str, tuple[int, Fuzzed]] = {
            "recipe": (500, _recipes(runs, forge)),
            "override": (250, _overrides(runs, forge)),
            "data": (500, _data(runs, forge)),
            "template": (150, _templates(runs, forge)),
            "manifest": (150, _manifests(runs, forge)),
            "model": (150, _models(runs, forge)),
            "request": (300, _requests(server)),
            "answer": (150, _answers(runs, forge, liar)),
        }
        order = [name for name, (times, _) in kinds.items() for _ in range(times // 50)]
        for case, numbers in campaign.cases(sum(times for times, _ in kinds.values())):
            kind = order[int(case.split("-")[-1]) % len(order)]
            begin = time.monotonic()
            ended, what = kinds[kind][1](numbers)
            campaign.facts.setdefault("seconds_of", {}).setdefault(kind, 0.0)
            campaign.facts["seconds_of"][kind] = round(campaign.facts["seconds_of"][kind] + time.monotonic() - begin, 1)
            campaign.outcomes[f"{kind}: {'works' if not ended.code else 'one sentence'}"] += 1
            if wrong := broken(ended):
                campaign.found(case, f"{kind}, {what[:200]}: {wrong}")
    campaign.end()
