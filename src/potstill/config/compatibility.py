"""The one table of what goes together: a teacher's signal, its tokenizer, the loss, whose text is trained on, and how several
teachers are combined. The recipe loader asks it for what a recipe tells; whoever opens a teacher asks it again for what only
a cache's manifest, a server and the tokenizers tell. docs/compatibility.md is written from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from potstill.config.models import StoreConfig, TeacherConfig
from potstill.config.rollouts import RolloutsConfig
from potstill.config.sections import fixed_value
from potstill.config.training import LossConfig, ParallelConfig
from potstill.errors import PotstillError

Text = Literal["data", "student", "teacher"]
MOVING: Literal["moving"] = "moving"  # a temperature that is not the same at every step


@dataclass(frozen=True)
class Combination:
    """One teacher and what it is combined with."""

    signal: str | None = "live"  # None: no teacher, a source of the user's own, or a cache that has not been read yet
    holder: Literal["model", "cache", "server"] = "model"  # what the signal is read from
    alone: bool = False  # a cache without a model or server beside it
    server: Literal["potstill", "openai", "unknown"] | None = None  # that computes it; before it was asked, unknown
    tail_samples: bool = False  # a cache is to keep draws from the rest
    imported: bool = False  # a cache of another system's files
    temperatures: tuple[float, ...] = (1.0,)  # at which a cache can be read
    tokenizer: Literal["same", "other"] | None = "same"  # None: not compared yet
    context_column: bool = (
        False  # or a system message or chat_template_kwargs of its own: another prompt than the student's
    )
    method: str = "prefix_marginal"  # of a teacher that does not read the student's own tokens
    divergence: str = "forward_kl"
    temperature: float | Literal["moving"] = 1.0
    entropy_gate: bool = False
    dynamic_scaling: bool = False
    combine: str = "sum"
    token_clip: bool = False
    student_top_k: bool = False  # loss.student_top_k
    uneven_weights: bool = False  # loss.token_weights: tokens of one answer count differently
    weighting: str | None = None
    filter: bool = False
    text: frozenset[Text] = frozenset()  # whose is trained on; empty: not known here
    writes: bool = False  # this teacher writes some of the text
    compared: bool = False  # eval.on_policy_samples: with no other teacher than this one
    greedy: bool = False  # text is written without sampling
    reward: bool = False  # rollouts.reward
    ranks: int = 1  # processes of the run; before they are counted, 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    placement: str = "replicate"
    own_ranks: bool = False  # this teacher's
    vllm_within: bool = False  # what the student writes, vLLM does in the training's process
    teacher_tp: int | Literal["auto"] = "auto"
    own: Literal["frozen", "ema", "live"] | None = None  # the teacher is the student itself
    in_place: bool = False  # … with the student's own weights in memory

    @classmethod
    def of(
        cls,
        teacher: TeacherConfig | None,
        loss: LossConfig,
        rollouts: RolloutsConfig | None = None,
        parallel: ParallelConfig | None = None,
        *,
        first: bool = True,
    ) -> Combination:
        """What a recipe tells of one of its teachers, the first or another."""
        made = cls(
            signal=None,
            tokenizer=None,
            divergence=loss.divergence,
            temperature=fixed_value(loss.temperature) or MOVING,
            entropy_gate=loss.entropy_gate is not None,
            dynamic_scaling=loss.dynamic_scaling,
            combine=loss.combine_teachers,
            weighting=loss.teacher_weighting,
            token_clip=loss.token_clip is not None,
            student_top_k=loss.student_top_k is not None,
            uneven_weights=loss.token_weights is not None and loss.token_weights.uneven,
        )
        if rollouts is not None:
            shares = (rollouts.data_share, rollouts.on_policy_fraction, rollouts.teacher_fraction)
            text = frozenset(who for who, share in zip(get_args(Text), shares, strict=True) if share)
            greedy = rollouts.sampling.temperature == 0
            within = rollouts.engine.kind == "vllm" and not rollouts.engine.servers
            made = replace(made, text=text, writes=first and "teacher" in text, greedy=greedy, vllm_within=within)
            made = replace(made, reward=rollouts.reward is not None)
        if parallel is not None:
            made = replace(made, cp=parallel.cp, tp=parallel.tp, ep=parallel.ep)
        if teacher is None:
            return made
        context, method = teacher.own_prompt, teacher.cross_tokenizer.method
        made = replace(made, method=method, context_column=context, filter=bool(teacher.filter))
        made = replace(made, placement=teacher.placement, own_ranks=teacher.ranks > 0, teacher_tp=teacher.tp)
        made = replace(made, server=None if teacher.server is None else "unknown")
        if teacher.kind != "cache":
            signal = {"model": "live", "student": "live", "server": teacher.remote.kind}.get(teacher.kind)
            in_place = teacher.student is not None and not teacher.copies
            made = replace(made, own=teacher.student, in_place=in_place)
            return replace(made, holder="server" if teacher.kind == "server" else "model", signal=signal)
        if teacher.model is None and teacher.server is None:
            return replace(made, holder="cache", alone=True)
        return made.computed(teacher.store)

    def stored(self, kind: str, temperatures: tuple[float, ...], imported: bool = False) -> Combination:
        """With a cache of that kind, which top_k can be read at those temperatures."""
        known = temperatures if kind == "top_k" else (1.0,)
        return replace(self, holder="cache", signal=kind, temperatures=known, imported=imported)

    def computed(self, store: StoreConfig) -> Combination:
        """With a cache that a model or a server fills."""
        return replace(self.stored(store.kind, tuple(store.temperatures)), tail_samples=store.tail_samples > 0)

    @property
    def policy_gradient(self) -> bool:
        return self.divergence == "policy_gradient_kl"

    @property
    def other(self) -> bool:
        """Whether the teacher reads other tokens than the student."""
        return self.tokenizer == "other" or self.context_column

    @property
    def chunks(self) -> bool:
        """Whether runs of tokens are compared, and not each token."""
        return self.other and self.method != "prefix_marginal"

    @property
    def entries(self) -> bool:
        """Whether the signal is less than hidden states: it was taken at certain temperatures, and is not the whole of it."""
        return self.signal not in (None, "live", "hidden")

    @property
    def asked_at(self) -> set[float | str]:
        """The temperatures that whoever computes top_k is asked for."""
        if self.holder == "cache":
            return set(self.temperatures)
        return {1.0 if self.other else self.temperature}

    @property
    def asks_trust(self) -> bool:
        """Whether the teachers' say depends on how sure they are."""
        return self.combine == "best" or self.weighting is not None

    def words(self) -> dict[str, Any]:
        """For the reasons."""
        moves, served, draws = self.temperature == MOVING, self.holder == "server", self.signal == "sampled"
        return vars(self) | {
            "temperature": "moves over the run" if moves else f"is {self.temperature:g}",
            "wanted": "…" if moves else f"{self.temperature:g}",
            "knows": "'s draws are at temperature" if draws else " knows the mass of what it left out at",
            "known": ", ".join(f"{t:g}" for t in self.temperatures),
            "trust": "combine_teachers" if self.combine == "best" else "teacher_weighting",
            "holds": "the server is asked for" if served else "the cache holds",
            "use": "use remote.kind:" if served else "use a cache of kind",
        }


@dataclass(frozen=True)
class Rule:
    """What does not go together, and why. `key`: what of the recipe the reason is about; `teacher` and `signal` stand for
    teachers[…] and for its cache or remote.kind."""

    key: str
    refuses: Callable[[Combination], bool]
    reason: str  # with words of the combination in braces


CHUNKED = (
    "common_vocab",
    "projection",
    "span_likelihood",
)  # methods that need the likelihoods of the text's own tokens

# What an OpenAI-compatible server can be asked for: of a text, its own tokens and the likeliest ones, as they are.
OF_SERVERS = (
    Rule(
        "signal",
        lambda c: c.server == "openai" and c.signal in ("hidden", "sampled", "student_top_k"),
        "only `potstill serve` gives kind {signal}, and this is another server: choose top_k or token_logprobs",
    ),
    Rule(
        "signal",
        lambda c: c.server == "openai" and c.signal == "top_k" and c.tail_samples,
        "only `potstill serve` gives draws from the rest, and this is another server: leave tail_samples out",
    ),
    Rule(
        "signal",
        lambda c: c.server == "openai" and c.signal == "top_k" and c.asked_at != {1.0},
        "this server gives log-probabilities at temperature 1 only: set loss.temperature to 1, and store.temperatures to [1], "
        "or use `potstill serve`, which gives all of them",
    ),
)

RULES = (
    # The loss
    Rule(
        "loss.divergence",
        lambda c: c.policy_gradient and c.temperature != 1.0,
        "policy_gradient_kl compares how likely the drawn tokens are, which is at temperature 1: leave temperature out, or "
        "choose another divergence",
    ),
    Rule(
        "loss.entropy_gate",
        lambda c: c.policy_gradient and c.entropy_gate,
        "entropy_gate needs the teacher's distribution, of which divergence: policy_gradient_kl sees the drawn tokens only: "
        "leave entropy_gate out, or choose reverse_kl",
    ),
    Rule(
        "loss.dynamic_scaling",
        lambda c: c.policy_gradient and c.dynamic_scaling,
        "dynamic_scaling divides by the divergence, and the value of policy_gradient_kl may be 0 or below: leave it out",
    ),
    Rule(
        "loss.student_top_k",
        lambda c: c.student_top_k and c.policy_gradient,
        "student_top_k chooses the tokens that distributions are compared on, and policy_gradient_kl compares drawn tokens: "
        "leave student_top_k out, or choose reverse_kl",
    ),
    Rule(
        "loss.student_top_k",
        lambda c: c.student_top_k and (c.entries or c.chunks),
        "student_top_k needs the teacher's whole distribution over the student's tokens: take a model, a cache or server of "
        "kind hidden (remote.kind: student_top_k asks `potstill serve` for the same), and prefix_marginal for other tokens",
    ),
    Rule(
        "loss.student_top_k",
        lambda c: c.student_top_k and c.tp > 1,
        "the student's likeliest tokens are chosen from all of them, of which tensor parallelism gives a rank a part: set "
        "parallel.tp to 1, or leave student_top_k out",
    ),
    Rule(
        "loss.teacher_weighting",
        lambda c: c.weighting is not None and c.combine != "sum",
        "teacher_weighting goes with combine_teachers: sum, not with {combine}: leave one of the two out",
    ),
    # Whose text
    Rule(
        "loss.divergence",
        lambda c: c.policy_gradient and bool(c.text - {"student"}),
        "policy_gradient_kl learns from tokens that the student drew itself: set rollouts.on_policy_fraction to 1",
    ),
    Rule(
        "loss.divergence",
        lambda c: c.policy_gradient and c.greedy,
        "policy_gradient_kl learns from tokens that were drawn, and rollouts.sampling.temperature 0 draws none: set it "
        "above 0",
    ),
    Rule(
        "rollouts.reward",
        lambda c: c.reward and not c.policy_gradient,
        "a reward is an advantage of the tokens that the student drew, and loss.divergence: {divergence} has none: choose "
        "policy_gradient_kl",
    ),
    Rule(
        "teacher",
        lambda c: c.alone and bool(c.text - {"data"}),
        "a cache alone cannot know fresh text: put model or server beside it (it is then read, and written to), or set "
        "rollouts.on_policy_fraction and rollouts.teacher_fraction to 0",
    ),
    Rule(
        "rollouts.teacher_fraction",
        lambda c: c.writes and c.context_column,
        "the first teacher has a prompt of its own, which what it writes would not be an answer to: leave "
        "teachers[0].context_column, system and chat_template_kwargs out",
    ),
    Rule(
        "rollouts.teacher_fraction",
        lambda c: c.writes and c.server == "potstill",
        "the first teacher is behind `potstill serve`, which scores and does not write: give it as model, or behind vLLM",
    ),
    Rule(
        "eval.on_policy_samples",
        lambda c: c.compared and (c.alone or c.server is not None or c.tokenizer != "same"),
        "needs a live teacher (model) with the student's tokenizer to be compared with: set it to 0",
    ),
    # How the work is spread
    Rule(
        "rollouts.teacher_fraction",
        lambda c: c.writes and (c.own_ranks or c.placement != "replicate"),
        "the first teacher writes, for which it has to be whole on the student's ranks: leave teachers[0].ranks and "
        "teachers[0].placement out, or set teacher_fraction to 0",
    ),
    Rule(
        "rollouts.engine",
        lambda c: c.vllm_within and c.own_ranks and (not c.text or "student" in c.text),
        "vLLM in the training's processes makes groups of all of them, and those of a teacher's ranks have no vLLM: start "
        "servers with `vllm serve` and give their addresses as rollouts.engine.server, or leave teachers[].ranks out",
    ),
    Rule(
        "rollouts.teacher_fraction",
        lambda c: c.writes and c.signal == "live" and c.tp > 1 and c.teacher_tp != 1,
        "the first teacher writes, for which it has to be whole on every tp rank: set teachers[0].tp to 1, or "
        "teacher_fraction to 0",
    ),
    Rule(
        "signal",
        lambda c: c.signal == "student_top_k" and (c.ranks > 1 or c.cp > 1 or c.tp > 1),
        "student_top_k asks about the tokens that the student likes best, for which it has to be whole in one process: start "
        "one, or use remote.kind: top_k or hidden",
    ),
    Rule(
        "teacher",
        lambda c: c.in_place and (c.ranks > 1 or c.cp > 1 or c.tp > 1 or c.ep > 1),
        "the student's own weights are spread over the ranks of the run, which compute them together and with gradients: use "
        "student: frozen or ema, which are copies, or start one process",
    ),
    Rule(
        "rollouts.teacher_fraction",
        lambda c: c.writes and c.in_place,
        "the first teacher is the student as it trains: use rollouts.on_policy_fraction for what it writes",
    ),
    Rule(
        "teacher",
        lambda c: c.own is not None and (c.own_ranks or c.placement != "replicate"),
        "a copy of the student is whole on every rank: placement and ranks go with model",
    ),
    Rule(
        "rollouts.teacher_fraction",
        lambda c: c.writes and c.own == "ema",
        "the first teacher is the average of the student's weights, which changes while it would write: use student: frozen, "
        "or set teacher_fraction to 0",
    ),
    # What the signal holds
    Rule(
        "teacher",
        lambda c: c.context_column and c.holder == "cache",
        "context_column, system and chat_template_kwargs go without cache: a cache holds what the teacher says without them",
    ),
    Rule(
        "signal",
        lambda c: c.signal == "sampled" and c.policy_gradient,
        "{holds} draws of the teacher's, and loss.divergence: policy_gradient_kl needs how likely the student's tokens were "
        "to it: {use} token_logprobs, top_k or hidden",
    ),
    Rule(
        "signal",
        lambda c: c.signal == "sampled" and c.divergence not in ("forward_kl", "policy_gradient_kl"),
        "{holds} draws, which are unbiased for forward_kl only, and loss.divergence is {divergence}: use forward_kl, or a "
        "cache of kind top_k or hidden",
    ),
    Rule(
        "signal",
        lambda c: c.signal == "sampled" and c.entropy_gate,
        "{holds} draws, which are unbiased for forward_kl only, and loss.entropy_gate is set: leave it out, or {use} top_k or "
        "hidden",
    ),
    Rule(
        "signal",
        lambda c: c.signal == "token_logprobs" and not c.policy_gradient and not c.other,
        "{holds} only how likely the text's own tokens were, and the loss needs a distribution: {use} top_k or hidden, or "
        "learn by the student's own tokens (loss.divergence: policy_gradient_kl)",
    ),
    Rule(
        "signal",
        lambda c: c.signal == "student_top_k" and c.policy_gradient,
        "student_top_k asks about the tokens that the student likes best, and loss.divergence: policy_gradient_kl about "
        "drawn tokens: use remote.kind: token_logprobs",
    ),
    Rule(
        "signal",
        lambda c: c.imported and c.policy_gradient and not c.other,
        "the cache was imported, and does not know how likely the text's own tokens were where they are not among the "
        "entries, which policy_gradient_kl needs: take another loss.divergence, or a cache that was built here",
    ),
    *OF_SERVERS,
    # Temperatures
    Rule(
        "signal",
        lambda c: c.signal in ("top_k", "student_top_k") and c.holder == "server" and c.temperature == MOVING,
        "{signal} is asked for at one temperature, and loss.temperature moves over the run: use remote.kind: hidden",
    ),
    Rule(
        "signal",
        lambda c: (
            c.holder == "cache"
            and c.signal in ("top_k", "sampled")
            and not (c.policy_gradient or c.other)
            and c.temperature not in c.temperatures
        ),
        "loss.temperature {temperature}, and the cache{knows} {known} only: build one with --temperature {wanted} (top_k), or "
        "of kind hidden, which serves all of them",
    ),
    # Another tokenizer, or another prompt
    Rule(
        "teacher",
        lambda c: c.other and c.policy_gradient,
        "loss.divergence: policy_gradient_kl needs a teacher that reads the student's own tokens, and this one has another "
        "tokenizer or a prompt of its own: use cross_tokenizer.method: span_likelihood with another divergence",
    ),
    Rule(
        "signal",
        lambda c: c.other and c.signal == "student_top_k",
        "student_top_k asks about the student's tokens, and the teacher has others, or a prompt of its own: use remote.kind: "
        "top_k or hidden",
    ),
    Rule(
        "signal",
        lambda c: c.other and c.signal == "sampled",
        "the teacher has another tokenizer, and {holds} draws of the teacher's own tokens, which say nothing about chunks: "
        "{use} top_k or hidden",
    ),
    Rule(
        "signal",
        lambda c: c.other and c.signal == "token_logprobs" and c.method != "span_likelihood",
        "the teacher has another tokenizer, or a prompt of its own, and {holds} only how likely the text's own tokens were: "
        "{use} top_k or hidden, or learn from it with cross_tokenizer.method: span_likelihood",
    ),
    Rule(
        "signal",
        lambda c: c.other and c.temperature == MOVING,
        "the teacher has another tokenizer, or a prompt of its own, and loss.temperature moves over the run; the likelihood "
        "of a chunk of tokens is at one temperature: set loss.temperature to a number",
    ),
    Rule(
        "signal",
        lambda c: c.other and c.method == "span_likelihood" and c.temperature not in (1.0, MOVING),
        "the teacher has another tokenizer, or a prompt of its own, and loss.temperature {temperature}; the method "
        "span_likelihood compares likelihoods of text, which are at 1: leave loss.temperature out, or choose another method",
    ),
    Rule(
        "signal",
        lambda c: c.other and c.entries and c.method != "span_likelihood" and c.temperature not in (1.0, MOVING),
        "the teacher has another tokenizer, or a prompt of its own, and loss.temperature {temperature}; {holds} the "
        "likelihoods of tokens at 1 only: {use} hidden, which serves any temperature",
    ),
    Rule(
        "signal",
        lambda c: c.other and c.signal == "top_k" and c.method != "span_likelihood" and 1.0 not in c.temperatures,
        "the cache knows the mass of what it left out at {known} only, and a teacher with another tokenizer is read at 1: "
        "build one with --temperature 1, or of kind hidden",
    ),
    Rule(
        "signal",
        lambda c: c.other and c.imported and c.method in CHUNKED,
        "the cache was imported, and does not know how likely the text's own tokens were where they are not among the "
        "entries, which cross_tokenizer.method {method} needs: take prefix_marginal or uld",
    ),
    Rule(
        "loss.token_clip",
        lambda c: c.token_clip and c.chunks,
        "a token's divergence is clamped, and cross_tokenizer.method {method} compares chunks of several tokens: leave "
        "token_clip out, or take prefix_marginal",
    ),
    Rule(
        "loss.token_weights",
        lambda c: c.uneven_weights and c.chunks,
        "decay and by_position weigh the tokens of a chunk differently, and cross_tokenizer.method {method} compares the whole "
        "of it: use skip, window or column, or take prefix_marginal",
    ),
    # Several teachers
    Rule(
        "teacher",
        lambda c: c.combine == "average" and (c.entries or c.other or c.filter),
        "loss.combine_teachers is average, for which a teacher must give whole distributions over the student's own ids for "
        "every document: a model with the student's tokenizer, or its hidden states, without filter and context_column",
    ),
    Rule(
        "signal",
        lambda c: c.asks_trust and c.signal in ("sampled", "student_top_k"),
        "{signal} does not tell how sure the teacher is, as loss.{trust} asks: {use} top_k or hidden",
    ),
    Rule(
        "signal",
        lambda c: c.weighting in ("entropy", "max_probability") and c.policy_gradient and c.entries,
        "loss.divergence: policy_gradient_kl reads only how likely the text's own tokens were, which does not tell the "
        "teacher's {weighting}, as loss.teacher_weighting asks: take teacher_weighting: ce, or kind hidden",
    ),
    Rule(
        "teacher",
        lambda c: c.weighting in ("entropy", "max_probability") and c.other and c.method == "span_likelihood",
        "cross_tokenizer.method: span_likelihood reads only how likely the text was, which does not tell the teacher's "
        "{weighting}, as loss.teacher_weighting asks: take teacher_weighting: ce, or another method",
    ),
)


def refusals(combination: Combination) -> list[Rule]:
    """All rules that a combination breaks. Before the tokenizers were compared: those it breaks either way."""
    if combination.tokenizer is not None:
        return [rule for rule in RULES if rule.refuses(combination)]
    same, other = (refusals(replace(combination, tokenizer=which)) for which in ("same", "other"))
    return [rule for rule in same if rule in other] or (same if other else [])


def reasons(combination: Combination, where: str, signal: str | None = None) -> list[str]:
    """Why a combination is refused, each with the key it is about. `where`: the teacher's; `signal`: that of what is read of
    it, where it is not a key of `where`."""
    held = {"cache": ".cache", "server": ".remote.kind", "model": ""}[combination.holder]
    keys = {"teacher": where, "signal": signal or where + held}
    words = combination.words()
    return [f"{keys.get(rule.key, rule.key)}: {rule.reason.format(**words)}" for rule in refusals(combination)]


def not_given(store: StoreConfig) -> list[str]:
    """Why an OpenAI-compatible server cannot fill a cache of that kind."""
    asked = Combination(server="openai").computed(store)
    return [rule.reason.format(**asked.words()) for rule in OF_SERVERS if rule.refuses(asked)]


def check(combination: Combination, where: str, signal: str | None = None) -> None:
    """An error with every reason, if there is any."""
    if found := reasons(combination, where, signal):
        raise PotstillError("\n".join(found))
