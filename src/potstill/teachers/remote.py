"""A teacher behind a server: its documents are asked for ahead of the step, and read as those of a cache are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from potstill.config import StoreConfig, TeacherConfig
from potstill.http_client import Connection
from potstill.models import LanguageModel, evaluating
from potstill.parallel.mesh import ranks
from potstill.serving.openai import OpenAIServer
from potstill.serving.protocol import PotstillServer, potstill_version
from potstill.signals import kinds
from potstill.signals.document import Document, exact
from potstill.signals.kinds import Signal as Arrays
from potstill.signals.kinds import SignalKind
from potstill.teachers.protocols import Asked, Reading, Signal, SignalSource
from potstill.teachers.stored import StoredSignal
from potstill.types import Batch, Example, Head, PotstillError, TopKTarget

Given = Sequence[npt.NDArray[np.int32]]
Server = PotstillServer | OpenAIServer


def open_server(config: TeacherConfig, where: str) -> RemoteOrigin:
    """Ask the server what it is. `remote.concurrency` is the run's: each rank with rows of its own has a share of it."""
    assert config.server is not None
    dp = ranks().dp
    mine = max(1, len(range(dp.index, config.remote.concurrency, dp.size)))
    remote = config.remote.model_copy(update={"concurrency": mine})
    connection = Connection(config.server, remote, where)
    version = potstill_version(connection)
    server: Server = OpenAIServer(connection, config) if version is None else PotstillServer(connection, version)
    return RemoteOrigin(server, remote.concurrency)


class RemoteOrigin:
    """Requests under way at a server, at most so many at once."""

    ahead = True

    def __init__(self, server: Server, concurrency: int) -> None:
        self.server = server
        self.tokenizer, self.positions, self.identity = server.tokenizer, server.positions, server.identity
        self.probe, self.at_once = server.probe, concurrency
        self.heads: dict[tuple[torch.device, int], Head] = {}  # downloaded once, whoever reads with it

    def format(self, store: StoreConfig) -> SignalKind:
        return self.server.format(store)

    def head(self, width: int) -> Head:
        return self.server.head(width)

    def begin(self, form: SignalKind, examples: Sequence[Example]) -> Callable[[], Arrays]:
        asked = self.score(form, examples)

        def wait() -> Arrays:
            parts = asked()
            return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

        return wait

    def score(
        self, form: SignalKind, examples: Sequence[Example], given: Given | None = None
    ) -> Callable[[], list[Arrays]]:
        """Send some documents, each with something to predict; what is given back waits for the rows of each."""
        groups = list(_groups(examples, self.server.request_tokens))
        asked = []
        for group in groups:
            some, ids = [examples[i] for i in group], None if given is None else [given[i] for i in group]
            asked.append(self.server.connection.submit(self.server.score, form, some, ids))

        def wait() -> list[Arrays]:
            found: list[Arrays] = [{}] * len(examples)
            for group, answer in zip(groups, asked, strict=True):
                rows, at = answer.get(), 0
                for i in group:
                    end = at + examples[i].supervised_tokens
                    found[i] = {name: values[at:end] for name, values in rows.items()}
                    at = end
            return found

        return wait

    def close(self) -> None:
        self.server.connection.close()


def _groups(examples: Sequence[Example], request_tokens: int) -> Iterator[list[int]]:
    """Documents that share a request, of like lengths."""
    group: list[int] = []
    tokens = 0
    for i in sorted(range(len(examples)), key=lambda i: len(examples[i].ids)):
        if group and tokens + len(examples[i].ids) > request_tokens:
            yield group
            group, tokens = [], 0
        group.append(i)
        tokens += len(examples[i].ids)
    if group:
        yield group


class ServedSignal(StoredSignal):
    """Documents as a server scores them now. `reader`: gives examples in the teacher's tokens; None: it reads the student's."""

    def __init__(
        self,
        origin: RemoteOrigin,
        form: SignalKind,
        width: int,
        temperature: float = 1.0,
        reader: Callable[[Sequence[Example]], list[Example]] | None = None,
    ) -> None:
        super().__init__(form, width, temperature)
        self.origin, self.ahead, self._reader = origin, origin.at_once, reader

    def documents(self, batch: Batch, compute: bool) -> list[Document]:
        examples = batch.examples
        read = examples if self._reader is None else self._reader(examples)
        # A document that was left out of the batch is not to be asked about either.
        both = enumerate(zip(examples, read, strict=True))
        there = [i for i, (own, theirs) in both if own.supervised.any() and theirs.supervised.any()]
        found: list[Arrays] = [self.form.no_rows()] * len(read)
        for i, signal in zip(there, self.origin.score(self.form, [read[i] for i in there])(), strict=True):
            found[i] = signal
        return [exact(self.form, e, signal) for e, signal in zip(read, found, strict=True)]

    def head(self, device: torch.device) -> Head:
        key, heads = (device, self.width), self.origin.heads
        if key not in heads:
            heads[key] = self.origin.head(self.width).to(device)
        return heads[key]

    def close(self) -> None:
        self.origin.close()


class StudentTopK(SignalSource):
    """Asks a server how likely those tokens are to the teacher that the student likes best: reverse KL on them, and on all
    others as one, is exact. The student is read first, so that nothing can be asked ahead of the step."""

    def __init__(self, origin: RemoteOrigin, student: LanguageModel, form: SignalKind) -> None:
        self._origin, self._student, self._form = origin, student, form

    def signal(self, batch: Batch, reading: Reading, asked: Sequence[Asked], host: Sequence[Signal]) -> list[Signal]:
        ids, form = self._likes(batch), self._form
        counts = [example.supervised_tokens for example in batch.examples]
        there = [i for i, count in enumerate(counts) if count]
        given = np.split(ids, np.cumsum(counts)[:-1])
        answers = self._origin.score(form, [batch.examples[i] for i in there], [given[i] for i in there])()
        answers = answers or [form.no_rows()]
        logprobs, tail = (np.concatenate([answer[name] for answer in answers]) for name in ("logprobs", "tail"))
        found = torch.from_numpy(ids).long(), torch.from_numpy(logprobs), torch.from_numpy(tail)
        return [Signal(TopKTarget(*found, form.vocabulary).to(batch.input_ids.device))]

    def _likes(self, batch: Batch) -> npt.NDArray[np.int32]:
        with evaluating(self._student.model):
            hidden = self._student.hidden(batch, batch.rows.student)
        if not len(batch.rows):  # left out after it was read: other ranks may share the forward pass
            return np.zeros((0, self._form.k), dtype=np.int32)
        target = self._student.at_rows(hidden, self._form.vocabulary)
        top = kinds.TopK(self._form.vocabulary, k=self._form.k)
        ids: npt.NDArray[np.int32] = top.compute(target, batch.rows.labels)["ids"]
        return ids

    def close(self) -> None:
        self._origin.close()


def server_form(config: TeacherConfig, origin: RemoteOrigin, width: int, temperature: float) -> SignalKind:
    """What the server is asked for, over its first `width` ids."""
    remote = config.remote
    k = min(remote.k, width)
    if remote.kind == "student_top_k":
        return kinds.Given(width, k=k, temperatures=(temperature,))
    settings = {"k": k, "temperatures": [temperature]} if remote.kind == "top_k" else {}
    form = origin.format(StoreConfig.model_validate({"kind": remote.kind, **settings}))
    if form.vocabulary != width and origin.server.api == "openai":
        raise PotstillError(
            f"the probabilities of {config.server} are over {form.vocabulary} ids and the student's tokenizer has {width}: "
            "take the teacher's tokenizer for the student (student.tokenizer)"
        )
    return replace(form, vocabulary=width)
