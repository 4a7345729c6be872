"""The part of `potstill serve` that runs the model: one thread takes what waits and forwards documents of like lengths."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from potstill.cache.origin import format_of, signal_of_examples
from potstill.config import StoreConfig
from potstill.models import LanguageModel
from potstill.serving.protocol import Question
from potstill.signals.kinds import Signal
from potstill.types import Example, PotstillError

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of documents per forward pass, in the metrics
MOST_TOKENS = 2**20  # of one question


class Busy(Exception):
    """More is held than can be answered now: whoever asked may come back."""


class TooLarge(Exception):
    """A question or its answer is larger than the server takes."""


class Task(NamedTuple):
    """One document of a job."""

    job: Job
    number: int

    @property
    def example(self) -> Example:
        return self.job.question.examples[self.number]

    @property
    def length(self) -> int:
        return len(self.example.ids)


class Job:
    """A question under way. Its answer is canceled when nobody waits for it any more."""

    def __init__(self, question: Question) -> None:
        self.question, self.answer = question, Future[Signal]()
        lengths = [len(example.ids) for example in question.examples]
        self.waiting = deque(sorted(range(len(lengths)), key=lengths.__getitem__))  # documents, by their numbers
        self.left = sum(lengths)  # tokens that wait
        self._starts = np.cumsum([0, *(example.supervised_tokens for example in question.examples)]).tolist()
        self._missing = len(lengths)
        # The answer's own arrays: as many bytes as were reserved for it, and nothing of a batch is kept beyond them.
        shapes = question.form.layout().items()
        self._rows = {name: np.empty((self._starts[-1], *shape), dtype) for name, (shape, dtype) in shapes}

    def take(self, tokens: int) -> Iterator[Task]:
        """Its next documents, as many as fit, and at least one."""
        first = True
        while self.waiting and (first or Task(self, self.waiting[0]).length <= tokens):
            task = Task(self, self.waiting.popleft())
            tokens, first = tokens - task.length, False
            self.left -= task.length
            yield task

    def put(self, number: int, part: dict[str, npt.NDArray[Any]]) -> None:
        for name, values in self._rows.items():
            values[self._starts[number] : self._starts[number + 1]] = part[name]
        self._missing -= 1
        if not self._missing:
            rows, self._rows = self._rows, {}  # whoever asked has them alone, and lets go of them
            with suppress(InvalidStateError):
                self.answer.set_result(rows)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.answer.set_exception(error)


class Scorer:
    """Answers questions in the order they came, as many at once as fit `batch_tokens`. One that does not fit has so many of its
    documents scored and goes to the end of the queue: nobody waits for all of it."""

    def __init__(self, teacher: LanguageModel, batch_tokens: int, most_bytes: int = 2**30) -> None:
        self.teacher, self.batch_tokens = teacher, batch_tokens
        self.most_bytes = most_bytes  # of an answer
        self.counts: Counter[str] = Counter()  # documents, tokens, padding, passes, and documents per pass by bucket
        self.seconds = 0.0  # of forward passes
        self._waiting: deque[Job] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="scorer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        with self._wake:
            if self._closing:
                raise Busy("the server ends")
            self._waiting.append(job)
            self._wake.notify()

    def drop(self, job: Job) -> None:
        """Nobody waits for it any more."""
        job.answer.cancel()
        with self._wake, suppress(ValueError):  # the one that is being scored is not among them
            self._waiting.remove(job)

    def close(self) -> None:
        """What waits is not computed any more: whoever could answer it has ended."""
        with self._wake:
            self._closing = True
            left = list(self._waiting)
            self._waiting.clear()
            self._wake.notify()
        for job in left:
            job.fail(RuntimeError("the server has ended"))
        self._thread.join()

    def _work(self) -> None:
        while tasks := self._taken():
            try:
                self._answer_all(tasks)
            except Exception as error:  # this thread must outlive whatever it is asked
                for task in tasks:
                    task.job.fail(error)
            del tasks  # else the questions would live until the next one comes

    def _taken(self) -> list[Task]:
        """Of what waits, as much as fits the budget; nothing: it is time to end."""
        with self._wake:
            while not self._closing:
                tasks: list[Task] = []
                tokens = 0
                while self._waiting and (not tasks or tokens + self._waiting[0].left <= self.batch_tokens):
                    job = self._waiting.popleft()
                    if job.answer.done():
                        continue
                    tokens += job.left
                    tasks += job.take(self.batch_tokens)
                    if job.left:
                        self._waiting.append(job)
                        break
                if tasks:
                    return tasks
                self._wake.wait()
            return []

    def _answer_all(self, tasks: Sequence[Task]) -> None:
        for batch in self._batches(tasks):
            wanted = [task for task in batch if not (task.job.answer.done() or self._closing)]
            if wanted:
                self._answer(wanted)

    def _batches(self, tasks: Sequence[Task]) -> Iterator[list[Task]]:
        """Of one format and of like lengths, each within the budget when padded to its longest."""
        batch: list[Task] = []
        for task in sorted(tasks, key=lambda task: (repr(task.job.question.form), task.length)):
            padded, held = (len(batch) + 1) * task.length, sum(one.length for one in batch) + task.length
            # More than a quarter of padding is worth a pass of its own, where that is not a tiny one.
            wasteful = padded > 1.25 * held and held > self.batch_tokens // 8
            other = bool(batch) and batch[0].job.question.form != task.job.question.form
            if batch and (other or wasteful or padded > self.batch_tokens):
                yield batch
                batch = []
            batch.append(task)
        yield batch

    def _answer(self, tasks: Sequence[Task]) -> None:
        examples = [task.example for task in tasks]
        given = [task.job.question.given[task.number] for task in tasks if task.job.question.given is not None]
        begin = time.perf_counter()
        try:
            found = signal_of_examples(self.teacher, tasks[0].job.question.form, examples, given or None)
        except Exception as error:  # of the model's code, which may raise anything: those who asked are told
            if len({task.job for task in tasks}) == 1:
                tasks[0].job.fail(error)
                return
            for task in tasks:  # the others need not suffer from one of them
                self._answer([task])
            return
        self._count([task.length for task in tasks], time.perf_counter() - begin)
        at = 0
        for task in tasks:
            end = at + task.example.supervised_tokens
            task.job.put(task.number, {name: values[at:end] for name, values in found.items()})
            at = end

    def _count(self, lengths: Sequence[int], seconds: float) -> None:
        bucket = next((str(most) for most in BUCKETS if len(lengths) <= most), "+Inf")
        padding = len(lengths) * max(lengths) - sum(lengths)
        self.counts.update(documents=len(lengths), tokens=sum(lengths), padding=padding, passes=1)
        self.counts[bucket] += 1
        self.seconds += seconds


def check_question(question: Question, teacher: LanguageModel, most_tokens: int | None, most_bytes: int) -> None:
    """PotstillError: the model cannot answer it."""
    form = question.form
    module = teacher.model.get_output_embeddings()
    rows = min(module.weight.shape[0], teacher.model.get_input_embeddings().weight.shape[0])
    if not 0 < form.vocabulary <= rows:
        raise PotstillError(f"probabilities over {form.vocabulary} ids were asked for, and the model has {rows}")
    if form.has_head:
        own = format_of(StoreConfig(kind="hidden"), teacher)
        if (form.width, form.dtype) != (own.width, own.dtype):
            raise PotstillError(
                f"hidden states of width {form.width} in {form.dtype} were asked for, and the model's are of width "
                f"{own.width} in {own.dtype}"
            )
    longest = max(len(example.ids) for example in question.examples)
    if most_tokens is not None and longest > most_tokens:
        raise PotstillError(f"a document has {longest} tokens, and this server scores up to {most_tokens}")
    if question.tokens > MOST_TOKENS:
        raise TooLarge(f"the request has {question.tokens:,} tokens, and this server takes {MOST_TOKENS:,} at once")
    if question.answer_bytes > most_bytes:
        raise TooLarge(
            f"the answer would be {question.answer_bytes / 2**20:.4g} MB, and this server gives up to "
            f"{most_bytes / 2**20:.4g} MB at once (--max-answer-mb)"
        )
