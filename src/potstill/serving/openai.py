"""A teacher behind an OpenAI-compatible server that gives log-probabilities of the prompt.

vLLM has `prompt_logprobs` for that; others answer `echo` with `logprobs`, and some shift them by one or leave them out. So
a server is probed before it is believed, and again after it was away: what it says about a text as a prompt must be what it
says when it goes on from the beginnings of that text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from potstill.cache.codec import Format, Signal
from potstill.cache.origin import CLOSE, Identity, format_for
from potstill.cache.reading import template_fingerprint, tokenizer_fingerprint
from potstill.config import StoreConfig, TeacherConfig
from potstill.models import load_tokenizer
from potstill.serving.http import SMALL, Connection, Refused
from potstill.serving.likeliest import COMPARED, LEAST_REST, Row, distance, ids_of_text, top_k_signal
from potstill.serving.protocol import check_signal
from potstill.types import DenseTarget, Example, PotstillError

PROBE = (
    "The committee met on 14 March 1851; its report, long and careful, was read aloud, and then (as usual) put away."
)
PREFIXES = 4  # beginnings of the probe's text to go on from
UNSEEN_SECONDS = 30.0  # in which no server ends and begins again
# A model's generation_config may set any of these, and --logprobs-mode processed_logprobs tells what they leave
NO_DEFAULTS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ENTRY = 512  # bytes at most, of one token and its log-probability in an answer
ABSENT = (400, 404, 405, 422, 501)


class Ignored(PotstillError):
    """The server does not give what was asked for, and does not say so."""


class OpenAIServer:
    """A server with `/v1/completions`."""

    request_tokens = 0
    whole = False

    def __init__(self, connection: Connection, config: TeacherConfig) -> None:
        self.connection = connection
        self._name, about = self._model(config.served_model_name)
        where = f"{connection.where}.tokenizer"
        self.tokenizer = self._tokenizer(config, about, where)
        self.vocabulary = len(self.tokenizer)
        longest = about.get("max_model_len")
        self.positions = (
            longest - 1 if type(longest) is int and longest > 1 else None
        )  # one token is always written too
        self.identity = Identity(
            self._name,
            None,
            f"served {self._name}",
            "unknown",
            tokenizer_fingerprint(self.tokenizer),
            template_fingerprint(self.tokenizer),
        )
        self._ids_of_text: dict[str, int] | None = None
        self._lock = threading.Lock()
        self._check_tokenizer()
        store = config.store if config.cache is not None else config.remote
        self._echo = False
        self._beyond = 0  # of the likeliest ids, so many may be none of the tokenizer's
        self._k = store.k if store.kind == "top_k" else 1
        self._probe_ids = list(self.tokenizer(PROBE).input_ids)[: self.positions]
        self._first = self._probed()
        self.probe: Sequence[float] | None = [round(row.chosen, 4) for row in self._first]
        self._trusted = (connection.failures, connection.opened)
        self._trusted_at = time.monotonic()

    # What it is

    def _model(self, wanted: str | None) -> tuple[str, dict[str, Any]]:
        found = self.connection.find("/v1/models")
        try:
            models = {str(one["id"]): one for one in found.json()["data"]} if found is not None else {}
        except (ValueError, KeyError, TypeError) as error:
            raise self.connection.error(
                f"it is neither `potstill serve` nor an OpenAI-compatible server (/v1/models: {error!r})"
            ) from error
        if wanted is None and len(models) == 1:
            return next(iter(models.items()))
        if wanted is None or (models and wanted not in models):
            there = ", ".join(models) or "none"
            raise self.connection.error(
                f"name the model with {self.connection.where}.served_model_name: {wanted or 'none is named'}, and it "
                f"has {there}"
                if models
                else "it is neither `potstill serve` nor an OpenAI-compatible server: it has no /version and no /v1/models"
            )
        return wanted, models.get(wanted, {})

    def _tokenizer(self, config: TeacherConfig, about: Mapping[str, Any], where: str) -> Any:
        names = [config.tokenizer] if config.tokenizer else [about.get("root"), self._name]
        # Whoever runs the server chooses the other names, and must not choose whose code runs here.
        trusted = {config.tokenizer, config.served_model_name} if config.trust_remote_code else set()
        problem: Exception | None = None
        for name in dict.fromkeys(name for name in names if isinstance(name, str)):
            try:
                return load_tokenizer(name, where, None, name in trusted)
            except PotstillError as error:
                problem = error
            except Exception as error:  # of a name that the server gave: libraries raise anything over it
                if name in (config.tokenizer, config.served_model_name):
                    raise
                problem = error
        raise self.connection.error(
            f"it does not hand its tokenizer out: name it with {where} ({problem}); code from the hub is run only for a name "
            "that the recipe gives"
            if config.trust_remote_code
            else f"it does not hand its tokenizer out: name it with {where} ({problem})"
        )

    def _check_tokenizer(self) -> None:
        """Compare with the server's, where it can be asked."""
        body = {"model": self._name, "prompt": PROBE, "add_special_tokens": True}
        found = self.connection.send("POST", "/tokenize", body, absent=ABSENT)
        try:
            theirs = None if found is None else found.json().get("tokens")
        except (ValueError, AttributeError):
            theirs = None
        ours = list(self.tokenizer(PROBE).input_ids)
        if isinstance(theirs, list) and theirs and isinstance(theirs[0], int) and theirs != ours:
            raise self.connection.error(
                f"it has another tokenizer than {self.tokenizer.name_or_path}: it makes {theirs[:6]} … of a text that is "
                f"{ours[:6]} … here; name the right one with {self.connection.where}.tokenizer"
            )

    def format(self, store: StoreConfig) -> Format:
        if store.kind not in ("top_k", "token_logprobs") or store.tail_samples:
            what = "draws from the rest" if store.kind == "top_k" else f"kind {store.kind}"
            raise self.connection.error(
                f"only `potstill serve` gives {what}: choose top_k or token_logprobs, without rest"
            )
        if set(store.temperatures) != {1.0}:
            raise self.connection.error(
                "it gives log-probabilities at temperature 1 only: set loss.temperature to 1, or use `potstill serve`, which "
                "gives all of them"
            )
        return format_for(store, self.vocabulary, 0, "float32")

    def head(self, width: int) -> DenseTarget:
        raise self.connection.error("only `potstill serve` hands out its output head")

    # What it says

    def score(
        self, form: Format, examples: Sequence[Example], given: Sequence[npt.NDArray[np.int32]] | None = None
    ) -> Signal:
        assert given is None
        parts = [self._document(form, example) for example in examples]
        if self._doubtful():
            self._look_again()
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _document(self, form: Format, example: Example) -> Signal:
        ids, places = example.ids.tolist(), np.flatnonzero(example.supervised).tolist()
        with self.understood():
            signal = self._chosen(ids, places) if form.kind == "token_logprobs" else None
            while signal is None:
                signal = self._top_k(form, ids, places)
        try:
            check_signal(signal, form, example.supervised_tokens)
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

    def _chosen(self, ids: list[int], places: Sequence[int]) -> Signal:
        rows = self._prompt_rows(ids, 1)
        return {"token_logprobs": np.array([rows[i - 1].chosen for i in places], dtype=np.float32)}

    def _top_k(self, form: Format, ids: list[int], places: Sequence[int]) -> Signal | None:
        """None: too many of them were ids that the tokenizer does not have, and more are asked for from now on."""
        asked = form.k + self._beyond
        try:
            chosen, found = self._likeliest(ids, places, asked)
        except Refused as error:
            if not self._beyond:
                raise
            raise Refused(
                f"{error}; its model has rows for ids that its tokenizer does not have, and {self._beyond} of them are among "
                f"the likeliest: let the server give {asked}, or set a smaller k"
            ) from error
        kept, logprobs = np.zeros((len(places), form.k), dtype=np.int32), np.zeros((len(places), form.k))
        outside = np.zeros(len(places))  # mass of ids that are none
        for i, (some, values) in enumerate(found):
            best = np.lexsort((some, -values))[:asked]
            if len(best) < asked:
                raise self.connection.error(
                    f"it gives {len(best)} of the {asked} likeliest tokens that were asked for: set a smaller k, or let the "
                    "server give more (vLLM: --max-logprobs)"
                )
            some, values = some[best], values[best]
            own = some < form.vocabulary
            if own.sum() < form.k:
                self._beyond = max(self._beyond, asked - int(own.sum()))
                return None
            outside[i] = np.exp(values[~own]).sum()
            kept[i], logprobs[i] = some[own][: form.k], values[own][: form.k]
        share = np.log(np.maximum(1 - outside, LEAST_REST))
        return top_k_signal(form, kept, logprobs - share[:, None], chosen - share)

    def _likeliest(
        self, ids: list[int], places: Sequence[int], k: int
    ) -> tuple[npt.NDArray[np.float64], list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]]:
        """How likely the tokens at some places are; ids that are likeliest there, and how likely those are."""
        if self._echo:
            rows = self._prompt_rows(ids, k)
            found = [self._by_id(rows[i - 1].entries) for i in places]
            chosen = [rows[i - 1].chosen for i in places]
            return np.array(chosen, dtype=np.float64), [(np.array([*x]), np.array([*x.values()])) for x in found]
        # Without a Row for each: other threads wait for the interpreter meanwhile.
        listed = self._prompt_logprobs(ids, k)
        arrays, own = [], []
        for i in places:
            try:
                own.append(listed[i][str(ids[i])]["logprob"])
                values = [entry["logprob"] for entry in listed[i].values()]
                arrays.append((np.array([*map(int, listed[i])]), np.array(values, dtype=np.float64)))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise self._no_entry(i, ids[i], error) from error
        return np.array(own, dtype=np.float64), arrays

    def _prompt_rows(self, ids: list[int], k: int) -> list[Row]:
        """One for each token but the first."""
        if self._echo:
            choice = self.go_on(ids, {"echo": True, "logprobs": k})
            return self._echo_rows(choice, ids)
        found, rows = self._prompt_logprobs(ids, k), []
        for i in range(1, len(ids)):
            try:
                entries = {f"token_id:{key}": float(entry["logprob"]) for key, entry in found[i].items()}
                rows.append(Row(entries[f"token_id:{ids[i]}"], entries))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise self._no_entry(i, ids[i], error) from error
        return rows

    def _prompt_logprobs(self, ids: list[int], k: int) -> list[Any]:
        """As vLLM gives them."""
        found = self.go_on(ids, {"prompt_logprobs": k}).get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(ids):
            raise self._ignores(f"its prompt_logprobs are {_shape(found)} where {len(ids)} tokens were sent")
        return found

    def _no_entry(self, place: int, token: int, error: Exception) -> PotstillError:
        return self.connection.error(
            f"its prompt_logprobs have no entry for the token that was sent at place {place} (id {token}): {error!r}"
        )

    def _echo_rows(self, choice: Mapping[str, Any], ids: list[int]) -> list[Row]:
        found = choice.get("logprobs")
        parts = found if isinstance(found, dict) else {}
        own, top, tokens = (parts.get(name) for name in ("token_logprobs", "top_logprobs", "tokens"))
        if not isinstance(own, list) or len(own) < len(ids):
            raise self._ignores(f"its token_logprobs are {_shape(own)} where {len(ids)} tokens were sent")
        told = tokens[: len(ids)] if isinstance(tokens, list) else []
        if any(str(a).startswith("token_id:") and a != f"token_id:{b}" for a, b in zip(told, ids, strict=False)):
            raise self.connection.error("it echoes other tokens than were sent: it has another tokenizer")
        rows = []
        for i in range(1, len(ids)):
            entries = top[i] if isinstance(top, list) and len(top) > i else None
            if not isinstance(own[i], int | float) or not isinstance(entries, dict):
                raise self._ignores(f"it has {own[i]!r} and {_shape(entries)} entries for token {i}")
            rows.append(Row(float(own[i]), {str(token): float(value) for token, value in entries.items()}))
        return rows

    def _by_id(self, entries: Mapping[str, float]) -> dict[int, float]:
        found = {self._id(token): value for token, value in entries.items()}
        unknown = [token for token in entries if self._id(token) is None]
        if unknown or len(found) != len(entries):
            raise self.connection.error(
                f"it names tokens by their text, and {unknown[:1]} is not the text of one id alone: only remote.kind: "
                "token_logprobs "
                "can be had from it"
            )
        return {i: value for i, value in found.items() if i is not None}

    def _id(self, text: str) -> int | None:
        if text.startswith("token_id:") and text[9:].isdigit():
            return int(text[9:])
        if self._ids_of_text is None:
            self._ids_of_text = ids_of_text(self.tokenizer)
        return self._ids_of_text.get(text)

    def go_on(self, ids: list[int], keys: Mapping[str, Any]) -> dict[str, Any]:
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

    # Whether it can be believed

    def _probed(self) -> list[Row]:
        """The probe's rows, when they are what the server says of the beginnings of the text; else an error."""
        ids = self._probe_ids
        places = [len(ids) * (i + 1) // (PREFIXES + 1) for i in range(PREFIXES)]
        with self.understood():
            rows = self._first_rows(ids)
            expected = {place: self._going_on(ids[:place]) for place in places}
        if distance(rows, expected, 0) <= CLOSE:
            return rows
        for shift, words in ((-1, "the one after it"), (1, "the one before it")):
            if distance(rows, expected, shift) <= CLOSE:
                raise self.connection.error(
                    "its log-probabilities of a prompt are shifted by one: what it gives for a token is that of "
                    f"{words}. It cannot be a teacher"
                )
        raise self.connection.error(
            "its log-probabilities of a prompt are not what it gives when it goes on from the beginnings of that "
            "prompt (they "
            f"differ by {distance(rows, expected, 0):.2f} nats on average). It cannot be a teacher"
        )

    def _first_rows(self, ids: list[int]) -> list[Row]:
        """By `prompt_logprobs`, or else by `echo`."""
        k = max(self._k, COMPARED)
        if self._echo:
            return self._prompt_rows(ids, k)
        try:
            return self._prompt_rows(ids, k)
        except (Refused, Ignored) as first:
            self._echo = True
            try:
                return self._prompt_rows(ids, k)
            except (Refused, Ignored) as second:
                # Whoever knows prompt_logprobs and refuses them says why.
                raise first if isinstance(first, Refused) else second from None

    def _going_on(self, ids: list[int]) -> dict[str, float]:
        """The likeliest next tokens, as the server names them when it writes."""
        found = self.go_on(ids, {"logprobs": COMPARED}).get("logprobs")
        top = found.get("top_logprobs") if isinstance(found, dict) else None
        if not isinstance(top, list) or not top or not isinstance(top[0], dict):
            raise self.connection.error(
                "it gives no log-probabilities of what it writes (logprobs), so that those of a prompt cannot be checked"
            )
        # The token that was drawn is there too, also where it is not among the likeliest.
        likeliest = sorted(((str(token), float(value)) for token, value in top[0].items()), key=lambda entry: -entry[1])
        return dict(likeliest[:COMPARED])

    def _doubtful(self) -> bool:
        """It failed; or it was connected to anew after a while, in which it may have been started again unseen."""
        failures, opened = self._trusted
        late = time.monotonic() - self._trusted_at > UNSEEN_SECONDS
        return self.connection.failures != failures or (late and self.connection.opened != opened)

    def _look_again(self) -> None:
        """After the server was away: the same model, that can still be believed."""
        with self._lock:
            if not self._doubtful():
                return
            failures = self.connection.failures
            name, _ = self._model(self._name)
            again = self._probed()
            before, now = (np.array([row.chosen for row in rows]) for rows in (self._first, again))
            if name != self._name or float(np.abs(before - now).mean()) > CLOSE:
                raise self.connection.error(
                    f"it now serves another model than when the run began, though it is called {name} too: start the one it "
                    "had again, or begin another run"
                )
            self._trusted = (failures, self.connection.opened)
            self._trusted_at = time.monotonic()


def _shape(found: Any) -> str:
    return f"{len(found)}" if isinstance(found, list | dict) else "nothing" if found is None else repr(found)[:40]
