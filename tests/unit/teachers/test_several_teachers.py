"""Several teachers: weights by row in the loss, means of distributions, whom a document listens to, and prompts that only the
teacher reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from taught import KD, batches_of, relative
from tiny import CPU, LLAMA, tiny
from tiny_cross import random_case, truncated

import potstill
from potstill.config import DataConfig, LossConfig, StudentConfig, TeacherConfig
from potstill.losses import DIVERGENCES, DenseTarget, SampledTarget, TopKTarget, fused_linear_kd
from potstill.models import LanguageModel, load_student, load_teacher
from potstill.objective.student_loss import StudentLoss
from potstill.teachers.combine import compute_targets
from potstill.teachers.open import as_teachers_need, open_teachers
from potstill.types import MeanTarget, PotstillError


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def value_and_gradients(hidden, weight, targets, **options):
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    out = fused_linear_kd(hidden, weight, targets, **options)
    out.loss.backward()
    return out.loss.detach(), hidden.grad, weight.grad


# --- weights by row


def plain_targets():
    torch.manual_seed(0)
    logits = randn(6, 9)
    top = logits.log_softmax(-1).topk(3)
    shares = torch.rand(6, 4, dtype=torch.float64)
    return {
        "dense": DenseTarget(logits=logits),
        "top-k": TopKTarget(top.indices, top.values, torch.log1p(-top.values.exp().sum(-1))),
        "sampled": SampledTarget(torch.randint(9, (6, 4)), shares / shares.sum(-1, keepdim=True)),
    }


@pytest.mark.parametrize("kind", ["dense", "top-k", "sampled"])
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_weights_by_row_are_those_of_the_rows(kind, chunk_rows):
    target = plain_targets()[kind]
    torch.manual_seed(1)
    hidden, weight, share = randn(6, 4), randn(9, 4), torch.rand(6, dtype=torch.float64)
    share[2] = 0.0
    others = DenseTarget(logits=randn(6, 9))
    ours = value_and_gradients(hidden, weight, [(share, target), (0.5, others)], chunk_rows=chunk_rows)
    one = value_and_gradients(hidden, weight, target, row_weight=share)
    two = value_and_gradients(hidden, weight, others, row_weight=torch.full((6,), 0.5, dtype=torch.float64))
    for found, a, b in zip(ours, one, two, strict=True):
        torch.testing.assert_close(found, a + b)


@pytest.mark.parametrize("method", ["common_vocab", "projection", "span_likelihood", "uld"])
@pytest.mark.parametrize("kind", ["dense", "top-k"])
def test_weights_of_chunks_scale_all_their_rows(method, kind):
    hidden, weight, labels, target = random_case(5, method)
    target = target if kind == "dense" else truncated(target, 6)
    share = torch.full((hidden.shape[0],), 0.25, dtype=torch.float64)
    ours = value_and_gradients(hidden, weight, [(share, target)], labels=labels, chunk_rows=5)
    plain = value_and_gradients(hidden, weight, target, labels=labels)
    for found, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, 0.25 * wanted)


def test_weights_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"the weight of a target \[3\] of torch.float32 must be \[6\]"):
        fused_linear_kd(randn(6, 4), randn(9, 4), [(torch.ones(3), plain_targets()["dense"])])


# --- means of distributions


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_mean_of_distributions_is_one_distribution(divergence, temperature):
    """Against the logarithm of the mean, as ready logits."""
    torch.manual_seed(2)
    parts = [DenseTarget(randn(7, 3), randn(9, 3), bias=randn(9)), DenseTarget(logits=randn(7, 9), logit_scale=1.0)]
    first = parts[0].hidden @ parts[0].head.weight.t() + parts[0].head.bias
    mean = 0.3 * (first / temperature).softmax(-1) + 0.7 * (parts[1].logits / temperature).softmax(-1)
    hidden, weight = randn(7, 4), randn(11, 4)
    options: dict[str, Any] = {
        "divergence": divergence,
        "temperature": temperature,
        "labels": torch.arange(7),
        "ce_weight": 0.2,
    }
    ours = value_and_gradients(hidden, weight, MeanTarget((0.3, 0.7), tuple(parts)), chunk_rows=3, **options)
    wanted = value_and_gradients(hidden, weight, DenseTarget(logits=temperature * mean.log()), **options)
    for found, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("shares", "widths", "says"),
    [((0.5, 0.4), (9, 9), "sum to 1, not to 0.9"), ((0.5, 0.5), (9, 8), r"as many ids, not over \[8, 9\]")],
)
def test_a_mean_that_is_none_is_refused(shares, widths, says):
    parts = tuple(DenseTarget(logits=randn(6, width)) for width in widths)
    with pytest.raises(ValueError, match=says):
        fused_linear_kd(randn(6, 4), randn(9, 4), MeanTarget(tuple(shares), parts))


# --- whom a document listens to


RECORDS = [
    {"text": "The people keep the peace, and the treasury pays for it.", "domain": "state", "hint": "On duty.\n"},
    {"text": "Congress met in the year 1823 to speak of commerce.", "domain": "law", "hint": "On trade.\n"},
    {"text": "Who will stand between the nation and its debts?", "domain": "state", "hint": "A question.\n"},
    {"text": "Treaties were signed; the harbours opened again.", "domain": "money", "hint": "On the sea.\n"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three teachers: two with the student's tokenizer, one with another."""
    folders = []
    for number, tokenizer in enumerate(("bytes-2k", "bytes-2k", "pieces-1k")):
        config = StudentConfig(
            config={**LLAMA, "hidden_size": 24 + 8 * number}, tokenizer=f"shipped:tokenizers/{tokenizer}"
        )
        made = load_student(config, CPU, 10 + number)
        folder = tmp_path_factory.mktemp("teacher") / str(number)
        made.model.save_pretrained(folder)
        made.tokenizer.save_pretrained(folder)
        folders.append(str(folder))
    return folders


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in RECORDS))
    return path


@pytest.fixture(scope="module")
def student() -> LanguageModel:
    return tiny(0)


def open_all(configs: list[dict[str, Any]], student, file: Path, source: dict[str, Any] | None = None, **loss: Any):
    checked = [TeacherConfig.model_validate(config) for config in configs]
    data = DataConfig.model_validate({"sources": [{"files": str(file), **(source or {})}], "max_length": 128})
    data = as_teachers_need(data, checked)
    settings = LossConfig.model_validate(loss)
    return open_teachers(checked, student, data, settings, CPU).teachers, batches_of(data, student), settings


def asked(teachers, batches, settings):
    return [
        compute_targets(teachers, [teacher.prepare(batch) for teacher in teachers], batch, settings)
        for batch in batches
    ]


def taken(student, batches, targets):
    module = StudentLoss(student)
    module.zero_grad()
    tokens, total = sum(batch.supervised_tokens for batch in batches), 0.0
    for batch, some in zip(batches, targets, strict=True):
        loss, _ = module(batch, some, tokens, replace(KD, ce_weight=0.3))
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in module.named_parameters()}


def by_document(batch) -> list[slice]:
    """The rows of each document."""
    ends = torch.tensor([example.supervised_tokens for example in batch.examples]).cumsum(0).tolist()
    return [slice(end - e.supervised_tokens, end) for end, e in zip(ends, batch.examples, strict=True)]


def text_logprobs(model: str, text: str) -> float:
    """Sum of the log-probabilities of a text's tokens and eos, by the model itself."""
    teacher = load_teacher(TeacherConfig(model=model), CPU, "teachers[0]")
    ids = torch.tensor([[*teacher.tokenizer(text)["input_ids"], teacher.tokenizer.eos_token_id]])
    if ids[0, -2] == ids[0, -1]:
        ids = ids[:, :-1]
    with torch.no_grad():
        logp = teacher.model(ids).logits.log_softmax(-1)
    return logp[0, :-1].gather(-1, ids[0, 1:, None]).sum().item()


@pytest.mark.parametrize("cross", [False, True], ids=["one tokenizer", "two tokenizers"])
def test_confidence_by_the_likelihood_of_the_text(models, student, file, cross):
    chosen = [models[0], models[2] if cross else models[1]]
    configs = [{"model": chosen[0], "weight": 2.0}, {"model": chosen[1], "cross_tokenizer": {"method": "common_vocab"}}]
    teachers, batches, settings = open_all(configs, student, file, teacher_weighting="ce")
    for batch, targets in zip(batches, asked(teachers, batches, settings), strict=True):
        for rows, example in zip(by_document(batch), batch.examples, strict=True):
            count = example.supervised_tokens
            scores = torch.tensor([text_logprobs(model, example.text) / count for model in chosen]).double()
            if cross:  # its first token, and eos, are in no chunk or are predicted from nothing
                scores[1] = _in_chunks(teachers[1], batch, targets[1][1], rows)
            wanted = torch.tensor([2.0, 1.0]).double() * scores.exp()
            wanted = 3.0 * wanted / wanted.sum()
            for number in range(2):
                share = targets[number][0][rows]
                torch.testing.assert_close(share.double(), wanted[number].expand(count), rtol=1e-4, atol=1e-5)
    teachers, batches, settings = open_all(configs, student, file)
    assert [share for share, _ in asked(teachers, batches, settings)[0]] == [2.0, 1.0]


def _in_chunks(teacher, batch, target, rows) -> float:
    """What the teacher thinks of a document's chunks, a student's token, from its own logits."""
    made = teacher.prepare(batch)
    first, _ = teacher.source.signal(batch, made.reading, made.plan.asked, ())
    logp = (first.target.hidden @ first.target.head.weight.t()).log_softmax(-1)
    first = logp.gather(-1, target.token[:, None]).squeeze(-1) + target.inner
    inside = (target.chunks.first >= rows.start) & (target.chunks.first < rows.stop)
    tokens = inside.sum() + ((target.chunks.inner >= rows.start) & (target.chunks.inner < rows.stop)).sum()
    return (first[inside].sum() / tokens).item()


@pytest.mark.parametrize("what", ["entropy", "max_probability"])
def test_confidence_by_how_sure_the_teachers_are(models, student, file, what):
    configs = [{"model": model} for model in models[:2]]
    teachers, batches, settings = open_all(configs, student, file, teacher_weighting=what)
    for batch, targets in zip(batches, asked(teachers, batches, settings), strict=True):
        p = [(t.hidden @ t.head.weight.t()).double().softmax(-1) for _, t in targets]
        rows_say = [(x * x.log()).sum(-1) if what == "entropy" else x.amax(-1) for x in p]
        for rows in by_document(batch):
            sure = torch.stack([x[rows].mean() for x in rows_say])
            sure = sure.exp() if what == "entropy" else sure
            for number, (share, _) in enumerate(targets):
                torch.testing.assert_close(
                    share[rows].double().mean(), 2.0 * sure[number] / sure.sum(), rtol=1e-4, atol=1e-6
                )


def test_the_best_teacher_of_a_document_has_it_to_itself(models, student, file):
    configs = [{"model": model} for model in models[:2]]
    teachers, batches, settings = open_all(configs, student, file, combine_teachers="best")
    chosen = set()
    for batch, targets in zip(batches, asked(teachers, batches, settings), strict=True):
        for rows, example in zip(by_document(batch), batch.examples, strict=True):
            scores = [text_logprobs(model, example.text) for model in models[:2]]
            best = scores.index(max(scores))
            chosen.add(best)
            assert targets[best][0][rows].tolist() == [2.0] * example.supervised_tokens
            assert targets[1 - best][0][rows].tolist() == [0.0] * example.supervised_tokens
    assert chosen  # and what the loss makes of such weights is tested above


@pytest.mark.parametrize("method", ["prefix_marginal", "common_vocab"])
@pytest.mark.parametrize(
    "loss", [{"combine_teachers": "best"}, {"teacher_weighting": "ce"}, {"teacher_weighting": "entropy"}], ids=str
)
def test_a_teacher_with_nothing_to_say_is_not_the_surest(models, student, tmp_path, method, loss):
    """One that cannot read so far leaves a document to the other."""
    short = load_student(
        StudentConfig(config={**LLAMA, "max_position_embeddings": 24}, tokenizer="shipped:tokenizers/pieces-1k"), CPU, 3
    )
    short.model.save_pretrained(tmp_path / "short")
    short.tokenizer.save_pretrained(tmp_path / "short")
    long = {"q": " ".join(r["text"] for r in RECORDS[:2]), "a": " It is so."}
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, (long, {"q": "Say it.", "a": " It is so."}))))
    configs = [{"model": models[0]}, {"model": str(tmp_path / "short"), "cross_tokenizer": {"method": method}}]
    teachers, batches, settings = open_all(
        configs, student, tmp_path / "pairs.jsonl", {"prompt": "q", "completion": "a"}, **loss
    )
    for batch, targets in zip(batches, asked(teachers, batches, settings), strict=True):
        for rows, example in zip(by_document(batch), batch.examples, strict=True):
            first = targets[0][0][rows] if len(targets) > 1 else torch.full((example.supervised_tokens,), targets[0][0])
            if len(example.ids) > 24:
                assert first.tolist() == [first[0].item()] * len(first)
                assert len(targets) == 1 or (targets[1][0][rows] == 0).all()
                assert first[0] == 1.0  # its own weight, and not the other's


def test_averaged_teachers_are_one(models, student, file):
    """Two times the same one is that one; two different ones are neither."""
    alone, batches, settings = open_all([{"model": models[0], "weight": 2.0}], student, file)
    twice, _, average = open_all(
        [{"model": models[0]}, {"model": models[0]}], student, file, combine_teachers="average"
    )
    wanted = taken(student, batches, asked(alone, batches, settings))
    found = taken(student, batches, asked(twice, batches, average))
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert relative(found[1], wanted[1]) < 1e-5
    both, _, average = open_all([{"model": model} for model in models[:2]], student, file, combine_teachers="average")
    assert taken(student, batches, asked(both, batches, average))[0] != pytest.approx(wanted[0], rel=1e-3)


@pytest.mark.parametrize(("one", "two"), [(0, 1), (0, 2), (2, 1)])
def test_a_teacher_is_asked_about_its_documents_only(models, student, file, one, two):
    """The step is what the documents give apart, each with its own teacher; the one that nobody teaches gives cross-entropy."""
    configs = [
        {"model": models[one], "filter": {"domain": "state"}},
        {"model": models[two], "filter": {"domain": ["law", "war"]}},
    ]
    teachers, batches, settings = open_all(configs, student, file)
    loss, gradients = taken(student, batches, asked(teachers, batches, settings))
    tokens = sum(batch.supervised_tokens for batch in batches)
    total, sums = 0.0, {name: torch.zeros_like(g) for name, g in gradients.items()}
    for number, domains in ((one, ["state"]), (two, ["law"]), (None, ["money"])):
        lines = [json.dumps(record) for record in RECORDS if record["domain"] in domains]
        part = file.parent / f"part-{number}-{domains[0]}.jsonl"
        part.write_text("\n".join(lines))
        alone, some, plain = open_all([{"model": models[number or 0]}], student, part)
        targets = asked(alone, some, plain) if number is not None else [[] for _ in some]
        value, own = taken(student, some, targets)
        share = sum(batch.supervised_tokens for batch in some) / tokens
        total += value * share
        sums = {name: sums[name] + share * own[name] for name in sums}
    assert loss == pytest.approx(total, rel=1e-5)
    assert relative(gradients, sums) < 1e-4


def test_a_batch_that_a_teacher_is_not_for_does_not_ask_it(models, student, file):
    teachers, batches, settings = open_all([{"model": models[0], "filter": {"domain": "poetry"}}], student, file)
    made = teachers[0].prepare(batches[0])
    assert made.batch is None
    assert compute_targets(teachers, [made], batches[0], settings) == []


# --- prompts that only the teacher reads


def forward_kl(student, model: str, pairs) -> float:
    """Σ KL over the tokens of completions, from whole texts: (student's prompt, teacher's prompt, completion ids)."""
    teacher = load_teacher(TeacherConfig(model=model), CPU, "teachers[0]")
    total = 0.0
    for ours, theirs, completion in pairs:
        with torch.no_grad():
            p, q = (
                m.model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
                for m, prompt in ((teacher, theirs), (student, ours))
            )
        total += (p.exp() * (p - q)).sum().item()
    return total


def test_a_teacher_reads_a_prompt_of_its_own_before_a_completion(models, student, tmp_path):
    records = [{"q": "Say it.", "hint": f"{r['hint']}Say it.", "a": " " + r["text"]} for r in RECORDS]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))
    columns = {"prompt": "q", "completion": "a"}
    teachers, batches, settings = open_all([{"model": models[0], "context_column": "hint"}], student, file, columns)
    module, found = StudentLoss(student), 0.0
    for batch, targets in zip(batches, asked(teachers, batches, settings), strict=True):
        found += module(batch, targets, 1.0, KD)[0].item()
    ids = lambda text: student.tokenizer(text)["input_ids"]  # noqa: E731
    eos = [student.tokenizer.eos_token_id]
    pairs = [(ids(r["q"]), ids(r["hint"]), ids(r["q"] + r["a"])[len(ids(r["q"])) :] + eos) for r in records]
    assert found == pytest.approx(forward_kl(student, models[0], pairs), rel=5e-5)
    plain, batches, settings = open_all([{"model": models[0]}], student, file, columns)
    without = sum(
        module(b, t, 1.0, KD)[0].item() for b, t in zip(batches, asked(plain, batches, settings), strict=True)
    )
    assert abs(without - found) > 2e-4  # four times what the first comparison allows


def test_a_teacher_reads_a_prompt_of_its_own_before_a_text(models, student, file):
    """All of the text but its first token, which the student has nothing before."""
    teachers, batches, settings = open_all([{"model": models[0], "context_column": "hint"}], student, file)
    module, found = StudentLoss(student), 0.0
    for batch, targets in zip(batches, asked(teachers, batches, settings), strict=True):
        found += module(batch, targets, 1.0, KD)[0].item()
    ids = lambda text: student.tokenizer(text)["input_ids"]  # noqa: E731
    pairs = []
    for record in RECORDS:
        first, *rest = ids(record["text"])
        assert (
            ids(record["hint"] + record["text"])[-len(rest) :] == rest
        )  # the words meet where the prompt ends, or after
        before = ids(record["hint"] + record["text"])[: -len(rest)]
        pairs.append(([first], before, [*rest, student.tokenizer.eos_token_id]))
    assert found == pytest.approx(forward_kl(student, models[0], pairs), rel=5e-5)


def test_a_system_message_of_the_teachers_own(models, student, tmp_path):
    chats = [[{"role": "user", "content": "Say it."}, {"role": "assistant", "content": r["text"]}] for r in RECORDS]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"chat": c, "hint": r["hint"]}) for c, r in zip(chats, RECORDS, strict=True)))
    teachers, batches, settings = open_all(
        [{"model": models[0], "context_column": "hint"}], student, file, {"messages": "chat"}
    )
    (batch,), (targets,) = batches, asked(teachers, batches, settings)
    made = teachers[0].prepare(batch)
    assert made.counts["tokens_in_chunks"] == made.counts["tokens"] == batch.supervised_tokens
    for example, theirs in zip(batch.examples, made.reading.examples, strict=True):
        hint = next(r["hint"] for r in RECORDS if r["text"] in example.text)
        assert hint.strip() in theirs.text and hint.strip() not in example.text
        assert theirs.ids[theirs.supervised].tolist() == example.ids[example.supervised].tolist()
    assert StudentLoss(student)(batch, targets, 1.0, KD)[0].item() > 0


def test_a_system_message_and_a_template_for_one_teacher(models, student, tmp_path):
    """Of three turns the student learns the last; the teacher reads another system message in place of the record's, and its
    template is told something of its own. Value and gradient are those of a twin that reads both texts whole."""
    chats = [
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Begin."},
            {"role": "assistant", "content": "I begin."},
            {"role": "user", "content": "Say it."},
            {"role": "assistant", "content": r["text"]},
        ]
        for r in RECORDS
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"chat": chat}) for chat in chats))
    own = {"model": models[0], "system": "Think long.", "chat_template_kwargs": {"never": "read"}}
    checked = [TeacherConfig.model_validate(own)]
    sources = [{"files": str(file), "messages": "chat"}]
    data = DataConfig.model_validate({"sources": sources, "max_length": 128, "supervise": "last"})
    (teacher,) = open_teachers(checked, student, data, LossConfig(), CPU).teachers
    module = StudentLoss(student)
    module.zero_grad()
    found, pairs = 0.0, []
    for batch in batches_of(data, student):
        made = teacher.prepare(batch)
        loss = module(batch, [(1.0, teacher.targets(batch, made))], 1.0, KD)[0]
        loss.backward()
        found += loss.item()
        for ours, theirs in zip(batch.examples, made.reading.examples, strict=True):
            assert "Be short." in ours.text and "Think long." in theirs.text and "Be short." not in theirs.text
            assert len(ours.spans) == len(theirs.spans) == 1
            answer = ours.ids[ours.supervised].tolist()
            assert theirs.ids[theirs.supervised].tolist() == answer
            pairs.append((*(x.ids[: x.supervised.argmax()].tolist() for x in (ours, theirs)), answer))
    gradient = {name: p.grad.clone() for name, p in module.named_parameters()}
    assert found == pytest.approx(forward_kl(student, models[0], pairs), rel=5e-5)
    module.zero_grad()
    reference = load_teacher(TeacherConfig(model=models[0]), CPU, "teachers[0]")
    for ours, theirs, answer in pairs:
        q = student.model(torch.tensor([[*ours, *answer]])).logits[0, len(ours) - 1 : -1].log_softmax(-1)
        with torch.no_grad():
            p = reference.model(torch.tensor([[*theirs, *answer]])).logits[0, len(theirs) - 1 : -1].log_softmax(-1)
        (p.exp() * (p - q)).sum().backward()
    assert relative(gradient, {name: p.grad for name, p in module.named_parameters()}) < 1e-4


# --- from a recipe, and what is refused


def recipe_of(run: Path, file: Path, teachers: list[dict[str, Any]], **loss: Any) -> dict[str, Any]:
    return {
        "run": str(run),
        "student": {"config": LLAMA, "tokenizer": "shipped:tokenizers/bytes-2k"},
        "teachers": teachers,
        "data": {"sources": [{"files": str(file)}], "max_length": 128},
        "loss": loss,
        "train": {"steps": 2, "batch_size": 4},
    }


@pytest.mark.parametrize(
    ("extra", "loss"),
    [
        ({}, {"combine_teachers": "best"}),
        ({}, {"teacher_weighting": "entropy"}),
        ({"filter": {"domain": "law"}}, {}),
        ({"context_column": "hint"}, {}),
    ],
)
def test_from_a_recipe(models, file, tmp_path, extra, loss):
    """Three teachers, two of them with the student's tokenizer."""
    teachers = [{"model": models[0]}, {"model": models[1], **extra}, {"model": models[2]}]
    run = potstill.train(recipe_of(tmp_path / "run", file, teachers, **loss))
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and steps[1]["kd"] > 0 and steps[0]["align_bytes"] == 1.0


@pytest.mark.parametrize(
    ("teachers", "loss", "says"),
    [
        (
            [{"model": 0}, {"model": 2}],
            {"combine_teachers": "average"},
            r"teachers\[1\]: loss.combine_teachers is average",
        ),
        (
            [{"model": 0}, {"model": 1, "context_column": "hint"}],
            {"combine_teachers": "average"},
            r"without filter and context_column",
        ),
        ([{"model": 0, "filter": {"topic": "x"}}], {}, r"has no column topic"),
        (
            [{"model": 0}],
            {"combine_teachers": "best", "teacher_weighting": "ce"},
            r"teacher_weighting goes with combine_teachers: sum",
        ),
        ([{"model": 0, "cache": "somewhere", "context_column": "hint"}], {}, r"chat_template_kwargs go without cache"),
    ],
)
def test_refused(models, file, tmp_path, teachers, loss, says):
    teachers = [{**teacher, "model": models[teacher["model"]]} for teacher in teachers]
    with pytest.raises(PotstillError, match=says):
        potstill.train(recipe_of(tmp_path / "run", file, teachers, **loss))
