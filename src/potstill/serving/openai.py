"""A teacher behind an OpenAI-compatible server that gives log-probabilities of the prompt.

vLLM has `prompt_logprobs` for that; others answer `echo` with `logprobs`, and some shift them by one or leave them out. So
a server is probed before it is trusted, and again after it was away: what it says about a text as a prompt must be what it
says when it continues the beginnings of that text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from potstill.cache.origin import CLOSE, Identity
from potstill.cache.reading import template_fingerprint, tokenizer_fingerprint
from potstill.config import StoreConfig, TeacherConfig
from potstill.config.compatibility import not_given
from potstill.http_client import NO_SUCH_PATH, SMALL, Connection, Refused
from potstill.models import load_tokenizer
from potstill.serving.protocol import Given
from potstill.signals.kinds import Signal, SignalKind, kind_for
from potstill.types import Example, Head, PotstillError

PROBE = (
    "The committee met on 14 March 1851; its report, long and careful, was read aloud, and then (as usual) put away."
)
PREFIXES = 4  # beginnings of the probe's text that are continued
COMPARED = 5  # likeliest tokens of each place that are compared
UNSEEN_SECONDS = 30.0  # in which no server ends and begins again
# A model's generation_config may set any of these, and --logprobs-mode processed_logprobs tells what they leave
NO_DEFAULTS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ENTRY = 512  # bytes at most, of one token and its log-probability in an answer
LEAST_REST = 1e-10  # of the mass: what float32 log-probabilities of the others leave is no better known
BY_ID = "token_id:"  # before an id, where tokens are named by it


class Ignored(PotstillError):
    """The server does not give what was asked for, and does not say so."""


class Row(NamedTuple):
    """What a server says about one token of a prompt: its log-probability, and those of the likeliest, by the names that the
    server has for them: an id, with BY_ID before it or not, or the token's text."""

    own: float
    likeliest: Mapping[str, float]


class OpenAIServer:
    """A server with `/v1/completions`. `score` gives the rows of documents, checked, on any thread."""

    request_tokens = 0  # each document has a request of its own
    api: Literal["openai"] = "openai"  # no hidden states, draws or likelihoods of any ids, and one temperature

    def __init__(self, connection: Connection, config: TeacherConfig) -> None:
        self.connection = connection
        self._name, about = self._model(config.served_model_name)
        self.tokenizer = self._tokenizer(config, about)
        self.vocabulary = len(self.tokenizer)
        longest = about.get("max_model_len")  # of which one is always written
        self.positions = longest - 1 if type(longest) is int and longest > 1 else None
        prints = tokenizer_fingerprint(self.tokenizer), template_fingerprint(self.tokenizer)
        self.identity = Identity(self._name, None, f"served {self._name}", "unknown", *prints)
        self._check_tokenizer()
        store = config.store if config.cache is not None else config.remote
        self._echo = False  # it is asked by `echo`
        self._beyond = 0  # so many of the likeliest ids may not be the tokenizer's
        self._k = store.k if store.kind == "top_k" else 1
        self._first = self._probed()
        self.probe: Sequence[float] | None = [
            round(row.own, 4) for row in self._first
        ]  # tells the model from another of its name
        self._lock = threading.Lock()
        self._trust(connection.failures)

    # What it is

    def _model(self, wanted: str | None) -> tuple[str, dict[str, Any]]:
        found = self.connection.get("/v1/models", accepted=NO_SUCH_PATH)
        none = "it is neither `potstill serve` nor an OpenAI-compatible server"
        try:
            models = {str(one["id"]): one for one in found.json()["data"]} if found.good else {}
        except (ValueError, KeyError, TypeError) as error:
            raise self.connection.error(f"{none} (/v1/models: {error!r})") from error
        if wanted is None and not models:
            raise self.connection.error(f"{none}: it has no /version and no /v1/models")
        name = next(iter(models)) if wanted is None and len(models) == 1 else wanted
        if name is None or (models and name not in models):
            raise self.connection.error(
                f"name the model with {self.connection.where}.served_model_name: {wanted or 'none is named'}, and it has "
                f"{', '.join(models)}"
            )
        return name, models.get(name, {})

    def _tokenizer(self, config: TeacherConfig, about: Mapping[str, Any]) -> Any:
        names = [config.tokenizer] if config.tokenizer else [about.get("root"), self._name]
        # Whoever runs the server chooses the other names, and must not choose whose code runs here.
        ours, where = {config.tokenizer, config.served_model_name}, f"{self.connection.where}.tokenizer"
        problem: Exception | None = None
        for name in dict.fromkeys(name for name in names if isinstance(name, str)):
            try:
                return load_tokenizer(name, where, None, config.trust_remote_code and name in ours)
            except Exception as error:  # libraries raise anything over a name that the server gave
                if name in ours and not isinstance(error, PotstillError):
                    raise
                problem = error
        code = "; code from the hub is run only for a name that the recipe gives" if config.trust_remote_code else ""
        raise self.connection.error(f"it does not hand its tokenizer out: name it with {where} ({problem}){code}")

    def _check_tokenizer(self) -> None:
        """Compare with the server's, where it can be asked."""
        body = {"model": self._name, "prompt": PROBE, "add_special_tokens": True}
        found = self.connection.post("/tokenize", body, accepted=(400, 422, *NO_SUCH_PATH))
        try:
            theirs = found.object().get("tokens") if found.good else None
        except ValueError:
            theirs = None
        ours = list(self.tokenizer(PROBE).input_ids)
        if isinstance(theirs, list) and theirs and isinstance(theirs[0], int) and theirs != ours:
            raise self.connection.error(
                f"it has another tokenizer than {self.tokenizer.name_or_path}: it makes {theirs[:6]} … of a text that is "
                f"{ours[:6]} … here; name the right one with {self.connection.where}.tokenizer"
            )

    def format(self, store: StoreConfig) -> SignalKind:
        for reason in not_given(store):
            raise self.connection.error(reason)
        return kind_for(store, self.vocabulary, 0, "float32")

    def head(self, width: int) -> Head:
        raise self.connection.error("only `potstill serve` hands out its output head")

    # What it says

    def score(self, form: SignalKind, examples: Sequence[Example], given: Given | None = None) -> Signal:
        assert given is None
        parts = [self._document(form, example) for example in examples]
        self._look_again()
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _document(self, form: SignalKind, example: Example) -> Signal:
        ids, places = example.ids.tolist(), np.flatnonzero(example.supervised).tolist()
        signal: Signal | None = None
        with self.understood():
            if form.kind == "token_logprobs":
                own = [row.own for row in self._rows(ids, 1, places)]
                signal = {"token_logprobs": np.array(own, dtype=np.float32)}
            while signal is None:
                signal = self._top_k(form, ids, places)
        try:
            form.check(signal, example.supervised_tokens)
        except ValueError as error:
            raise self.connection.error(f"its answer is wrong: {error}; no step was taken with it") from error
        return signal

    @contextmanager
    def understood(self) -> Iterator[None]:
        """What a server sends as numbers and lists may be anything."""
        try:
            yield
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise self.connection.error(
                f"its answer is not understood ({error!r}); no step was taken with it"
            ) from error

    def _top_k(self, form: SignalKind, ids: list[int], places: Sequence[int]) -> Signal | None:
        """None: too many of them were ids that the tokenizer does not have, and more are asked for from now on."""
        asked = form.k + self._beyond
        try:
            rows = self._rows(ids, asked, places)
        except Refused as error:
            if not self._beyond:
                raise
            raise Refused(
                f"{error}; its model has rows for ids that its tokenizer does not have, and {self._beyond} of them are among "
                f"the likeliest: let the server give {asked}, or set a smaller k"
            ) from error
        kept, logprobs = np.zeros((len(rows), form.k), dtype=np.int32), np.zeros((len(rows), form.k))
        outside = np.zeros(len(rows))  # mass of ids that the tokenizer does not have
        for i, row in enumerate(rows):
            some = np.array([*map(self._id if self._echo else int, row.likeliest)])
            values = np.array([*row.likeliest.values()], dtype=np.float64)
            best = np.lexsort((some, -values))[:asked]
            if len(best) < asked:
                raise self.connection.error(
                    f"it gives {len(best)} of the {asked} likeliest tokens that were asked for: set a smaller k, or let the "
                    "server give more (vLLM: --max-logprobs)"
                )
            some, values = some[best], values[best]
            known = some < form.vocabulary
            if known.sum() < form.k:
                self._beyond = max(self._beyond, asked - int(known.sum()))
                return None
            outside[i] = np.exp(values[~known]).sum()
            kept[i], logprobs[i] = some[known][: form.k], values[known][: form.k]
        share = np.log(np.maximum(1 - outside, LEAST_REST))
        return top_k_signal(form, kept, logprobs - share[:, None], np.array([row.own for row in rows]) - share)

    def _rows(self, ids: list[int], k: int, places: Sequence[int]) -> list[Row]:
        """What it says about the tokens at some places of a prompt, with the k likeliest there."""
        if self._echo:
            choice = self.completion(ids, {"echo": True, "logprobs": k})
            return self._echoed(choice.get("logprobs"), ids, places)
        listed, rows = self.completion(ids, {"prompt_logprobs": k}).get("prompt_logprobs"), []
        if not isinstance(listed, list) or len(listed) != len(ids):
            raise self._ignores(f"its prompt_logprobs are {_shape(listed)} where {len(ids)} tokens were sent")
        for i in places:
            try:
                own = float(listed[i][str(ids[i])]["logprob"])
                rows.append(Row(own, {name: entry["logprob"] for name, entry in listed[i].items()}))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise self.connection.error(
                    f"its prompt_logprobs have no entry for the token that was sent at place {i} (id {ids[i]}): {error!r}"
                ) from error
        return rows

    def _echoed(self, found: Any, ids: list[int], places: Sequence[int]) -> list[Row]:
        parts = found if isinstance(found, dict) else {}
        own, top, tokens = (parts.get(name) for name in ("token_logprobs", "top_logprobs", "tokens"))
        if not isinstance(own, list) or len(own) < len(ids):
            raise self._ignores(f"its token_logprobs are {_shape(own)} where {len(ids)} tokens were sent")
        told = tokens[: len(ids)] if isinstance(tokens, list) else []
        if any(str(a).startswith(BY_ID) and a != f"{BY_ID}{b}" for a, b in zip(told, ids, strict=False)):
            raise self.connection.error("it echoes other tokens than were sent: it has another tokenizer")
        rows = []
        for i in places:
            entries = top[i] if isinstance(top, list) and len(top) > i else None
            if not isinstance(own[i], int | float) or not isinstance(entries, dict):
                raise self._ignores(f"it has {own[i]!r} and {_shape(entries)} entries for token {i}")
            rows.append(Row(float(own[i]), entries))
        return rows

    def _id(self, name: str) -> int:
        if name.startswith(BY_ID) and name[len(BY_ID) :].isdigit():
            return int(name[len(BY_ID) :])
        if name not in self._ids_of_text:
            raise self.connection.error(
                f"it names tokens by their text, and {[name]} is not the text of one id alone: only remote.kind: "
                "token_logprobs can be had from it"
            )
        return self._ids_of_text[name]

    @cached_property
    def _ids_of_text(self) -> dict[str, int]:
        """Tokens by what they say, where no other says the same."""
        found: dict[str, list[int]] = {}
        for i in range(len(self.tokenizer)):
            text = self.tokenizer.decode([i], clean_up_tokenization_spaces=False)
            for name in {text, self.tokenizer.convert_ids_to_tokens(i)}:
                found.setdefault(name, []).append(i)
        return {name: ids[0] for name, ids in found.items() if len(ids) == 1}

    def completion(self, ids: list[int], keys: Mapping[str, Any]) -> dict[str, Any]:
        """Its choice of what follows these ids; one token, unless `keys` say otherwise."""
        body: dict[str, Any] = {"model": self._name, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "seed": 0}
        body |= {"top_p": 1.0, "return_tokens_as_token_ids": True, **({} if self._echo else NO_DEFAULTS), **keys}
        listed = max(int(keys.get(name) or 0) for name in ("prompt_logprobs", "logprobs")) + 2
        most = SMALL + ENTRY * listed * (len(ids) + body["max_tokens"])
        try:
            choice = self.connection.post("/v1/completions", body, most).json()["choices"][0]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise self.connection.error(f"its answer to /v1/completions is not understood ({error!r})") from error
        return choice if isinstance(choice, dict) else {}

    def _ignores(self, what: str) -> Ignored:
        words = (
            f"it ignores the request for log-probabilities of the prompt ({what}): a teacher must give them (vLLM does)"
        )
        return Ignored(str(self.connection.error(words)))

    # Whether it can be trusted

    def _probed(self) -> list[Row]:
        """The probe's rows, if they are what the server says when it continues the beginnings of the text; else an error."""
        ids = list(self.tokenizer(PROBE).input_ids)[: self.positions]
        places = [len(ids) * (i + 1) // (PREFIXES + 1) for i in range(PREFIXES)]
        with self.understood():
            rows = self._first_rows(ids)
            expected = {place: self._next_token(ids[:place]) for place in places}
            apart = {shift: distance(rows, expected, shift) for shift in (0, -1, 1)}
        if apart[0] <= CLOSE:
            return rows
        for shift, words in ((-1, "the one after it"), (1, "the one before it")):
            if apart[shift] <= CLOSE:
                raise self.connection.error(
                    "its log-probabilities of a prompt are shifted by one: what it gives for a token is that of "
                    f"{words}. It cannot be a teacher"
                )
        raise self.connection.error(
            "its log-probabilities of a prompt are not what it gives when it goes on from the beginnings of that prompt (they "
            f"differ by {apart[0]:.2f} nats on average). It cannot be a teacher"
        )

    def _first_rows(self, ids: list[int]) -> list[Row]:
        """By `prompt_logprobs`, or else by `echo`; one for each token but the first."""
        problem: PotstillError | None = None
        for echo in dict.fromkeys((self._echo, True)):
            self._echo = echo
            try:
                return self._rows(ids, max(self._k, COMPARED), range(1, len(ids)))
            except (Refused, Ignored) as error:
                # Whoever knows prompt_logprobs and refuses them says why.
                problem = problem if isinstance(problem, Refused) else error
        assert problem is not None
        raise problem

    def _next_token(self, ids: list[int]) -> dict[str, float]:
        """The likeliest next tokens, as the server names them when it writes."""
        found = self.completion(ids, {"logprobs": COMPARED}).get("logprobs")
        top = found.get("top_logprobs") if isinstance(found, dict) else None
        if not isinstance(top, list) or not top or not isinstance(top[0], dict):
            raise self.connection.error(
                "it gives no log-probabilities of what it writes (logprobs), so that those of a prompt cannot be checked"
            )
        # The token that was drawn is there too, also where it is not among the likeliest.
        return dict(sorted(top[0].items(), key=lambda entry: -entry[1])[:COMPARED])

    def _trust(self, failures: int) -> None:
        self._trusted = (failures, self.connection.sockets.opened, time.monotonic())

    def _look_again(self) -> None:
        """After a failure, or a new connection after a while, in which it may have been started again unseen: it must have the
        same model, and still be trusted."""
        with self._lock:
            before, opened, since = self._trusted
            failures, late = self.connection.failures, time.monotonic() - since > UNSEEN_SECONDS
            if failures == before and not (late and self.connection.sockets.opened != opened):
                return
            name, _ = self._model(self._name)
            first, now = (np.array([row.own for row in rows]) for rows in (self._first, self._probed()))
            if name != self._name or float(np.abs(first - now).mean()) > CLOSE:
                raise self.connection.error(
                    f"it now serves another model than when the run began, though it is called {name} too: start the one it "
                    "had again, or begin another run"
                )
            self._trust(failures)


def top_k_signal(
    form: SignalKind, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float64], own: npt.NDArray[np.float64]
) -> dict[str, npt.NDArray[Any]]:
    """Of k ids, largest first [R, k], and of the text's own token [R]."""
    kept = np.exp(logprobs).sum(-1)
    # The text's own token is given too where it is not among the k: the rest is no smaller than that.
    outside = np.where(own < logprobs[:, -1], np.exp(own), 0.0)
    most = (form.vocabulary - form.k) * np.exp(logprobs[:, -1])
    rest = np.minimum(np.maximum(1 - kept, np.maximum(outside, LEAST_REST)), most)
    with np.errstate(divide="ignore"):  # no rest: k is the whole vocabulary
        odds = np.log(rest) - np.log(kept)
    found = {"logprobs": logprobs, "odds": odds[:, None], "token_logprobs": own}
    return {"ids": ids, **{name: values.astype(np.float32) for name, values in found.items()}}


def distance(rows: Sequence[Row], expected: Mapping[int, Mapping[str, float]], shift: int) -> float:
    """Between the probe's rows and what the server says when it writes, in nats."""
    differences = []
    for place, likeliest in expected.items():
        if 0 < place + shift <= len(rows):
            entries = {name.removeprefix(BY_ID): value for name, value in rows[place - 1 + shift].likeliest.items()}
            # One that is not among them is no likelier than the least of the likeliest.
            least = min(sorted(entries.values(), reverse=True)[:COMPARED], default=np.inf)
            for name, value in likeliest.items():
                there = entries.get(name.removeprefix(BY_ID))
                differences.append(max(0.0, value - least) if there is None else abs(there - value))
    return float(np.mean(differences)) if differences else float("inf")


def _shape(found: Any) -> str:
    return f"{len(found)}" if isinstance(found, list | dict) else "nothing" if found is None else repr(found)[:40]
