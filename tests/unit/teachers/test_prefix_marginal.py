"""The method `prefix_marginal`: against its naive twin, and from real text through real tokenizers, byte by byte."""

from __future__ import annotations

import pytest
import torch
from taught import KD, cross_teacher
from tiny import CPU, LLAMA, batch_of, tiny
from tiny_prefix import naive_probabilities, random_prefix_marginal

from potstill.cache.reading import TeacherText
from potstill.config import CrossTokenizerConfig, StudentConfig
from potstill.data import Encoder
from potstill.losses import DIVERGENCES, DenseTarget, fused_linear_kd
from potstill.losses import dense as dense_module
from potstill.losses.dense import target_logits
from potstill.models import load_student
from potstill.objective.student_loss import StudentLoss
from potstill.teachers.prefix_marginal import PrefixMarginalView
from potstill.teachers.tokenizer_pair import TokenizerPair
from potstill.types import Example

TEXTS = [
    "The people of the United States.",
    "Peace, commerce – naïve façades\n",
    "2,024 treaties; 日本 and 🙂🙂",
    "unhappiness\t\tand   runs of spaces   ",
    "[INST] {not: special} [/INST]",
    "Commerce between independent governments, constitutional amendments, secretaries, treasury departments, citizens "
    "abroad.",
]


def both(hidden, head, labels, target, **options):
    """Value and gradients from the spelling and from its twin's probabilities as ready logits."""
    found = []
    temperature = options.get("temperature", 1.0)
    twin = DenseTarget(logits=temperature * naive_probabilities(target, temperature).log())
    for one, chunk_rows in ((target, 5), (twin, None)):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss = fused_linear_kd(h, w, one, labels=labels, ce_weight=0.3, chunk_rows=chunk_rows, **options).loss
        loss.backward()
        found.append((loss.detach(), h.grad, w.grad))
    return found


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_equals_the_naive_twin(divergence, temperature, monkeypatch):
    monkeypatch.setattr(dense_module, "MARGINAL_BYTES", 3 * 4 * 29)  # three rows at once
    for seed in range(4):
        ours, naive = both(*random_prefix_marginal(seed), divergence=divergence, temperature=temperature)
        for got, wanted in zip(ours, naive, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-8)  # e^−20 is 2e-9


def test_some_of_the_rows():
    _, _, _, target = random_prefix_marginal(7)
    rows = torch.tensor([0, 3, 4, 4, 11])
    whole = target_logits(target, slice(None))
    twin = naive_probabilities(target)
    torch.testing.assert_close(whole.softmax(-1), twin)
    torch.testing.assert_close(target_logits(target.select(rows), slice(None)), whole[rows])
    torch.testing.assert_close(target_logits(target, slice(2, 7)), whole[2:7])


@pytest.mark.parametrize("teacher_tokenizer", ["bytes-2k", "pieces-1k"])
@pytest.mark.parametrize("student_tokenizer", ["bytes-2k", "pieces-1k"])
def test_from_text_byte_by_byte(student_tokenizer, teacher_tokenizer):
    """The rows' probabilities from nothing but the bytes of both vocabularies and the teacher's logits."""
    student, teacher = (
        load_student(StudentConfig(config=LLAMA, tokenizer=f"shipped:tokenizers/{name}"), CPU, number)
        for number, name in enumerate((student_tokenizer, teacher_tokenizer))
    )
    teacher.model.eval()
    aligned = cross_teacher(student, teacher, CrossTokenizerConfig(method="prefix_marginal"))
    pair = aligned.view.pair
    encode = Encoder(student.tokenizer, max_length=100, append_eos=True)
    documents = [e.example for e in encode([Example(f"{i:032x}", text) for i, text in enumerate(TEXTS)])]
    batch = batch_of(documents[:2], *documents[2:])
    made = aligned.prepare(batch)
    found = target_logits(aligned.targets(batch, made), slice(None)).softmax(-1)
    torch.testing.assert_close(found.sum(-1), torch.ones(len(found)))
    cuts = [cut(student.tokenizer, pair.student, pair.teacher, y) for y in range(len(pair.teacher))]
    row = checked = inside = spanning = 0
    for example, read in zip(batch.examples, made.reading.examples, strict=True):
        with torch.no_grad():
            p = teacher.model(torch.from_numpy(read.ids[None].astype("int64"))).logits[0].float().softmax(-1)
        for place in range(len(example.ids)):
            if not example.supervised[place]:
                continue
            known = made.known is None or made.known[row]
            wanted = by_bytes(pair, cuts, example.ids, read.ids, place, p) if known else None
            if wanted is not None:
                expected, is_inside, spans = wanted
                torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-7)
                checked, inside, spanning = checked + 1, inside + is_inside, spanning + spans
            row += 1
    assert row == len(found) and checked > 0.9 * row
    # Rows inside a token of the teacher's that began within one of the student's are left out: 4 of the first pair's, 1 of the
    # second's.
    pairs = {("bytes-2k", "pieces-1k"): (1, 12), ("pieces-1k", "bytes-2k"): (16, 4)}
    assert (inside, spanning) == pairs.get((student_tokenizer, teacher_tokenizer), (0, 0))


def spellings(table, ids, other) -> list[bytes]:
    """What each token adds to the text: specials nothing, and of a first token not the prefix that the tokenizer made up
    (unless the other one makes it up as well)."""
    found = [table.token_bytes(int(i)) if table.kinds[i] < 2 else b"" for i in ids]
    if table.prefix != "none" and other.prefix == "none":
        first = next(i for i, b in enumerate(found) if b)
        found[first] = found[first].removeprefix(b" ")
    return found


def cut(tokenizer, student, teacher, y) -> dict[int, int]:
    """A teacher's token as the student's tokenizer cuts it in a text: where each part begins, and its id. The longest tokens,
    one after the other, for half a character."""
    content = teacher.token_bytes(y) if teacher.kinds[y] < 2 else b""
    found, at = {}, len(content)
    if not content:
        return found
    for index in reversed(tokenizer("\n" + content.decode(errors="replace"), add_special_tokens=False)["input_ids"]):
        at -= len(student.token_bytes(index))
        found[at] = index
        if at <= 0:
            break
    if at == 0 and all(content[a:].startswith(student.token_bytes(i)) for a, i in found.items()):
        return found
    words = {
        student.token_bytes(i): i for kind in (1, 0) for i in range(len(student))[::-1] if student.kinds[i] == kind
    }
    found, at = {}, 0
    while at < len(content):
        end = next(n for n in range(len(content), at, -1) if content[at:n] in words)
        found[at], at = words[content[at:end]], end
    return found


def by_bytes(pair, cuts, ours, theirs, place, p):
    """P of the student's next token, from the definition; None at specials."""
    student, teacher = pair.student, pair.teacher
    ours_said, theirs_said = spellings(student, ours, teacher), spellings(teacher, theirs, student)
    own, begin = ours_said[place], len(b"".join(ours_said[:place]))
    if not own:
        return None
    at = next(i for i in range(len(theirs)) if theirs_said[i] and begin < len(b"".join(theirs_said[: i + 1])))
    made_up = len(teacher.token_bytes(int(theirs[at]))) - len(
        theirs_said[at]
    )  # a prefix without bytes counts as written
    written = teacher.token_bytes(int(theirs[at]))[: begin - len(b"".join(theirs_said[:at])) + made_up]
    pairs = dict(zip(pair.map.teacher.tolist(), pair.map.student.tolist(), strict=True))
    mass = torch.zeros(len(student), dtype=torch.float64)
    spans = False
    for y in range(len(teacher)):
        content = teacher.token_bytes(y) if teacher.kinds[y] < 2 else b""
        probability = p[at - 1, y].item()
        if y == int(theirs[at]):
            further, end = at + 1, begin + len(own)
            certain = probability
            while len(b"".join(theirs_said[:further])) < end:
                certain *= p[further - 1, int(theirs[further])].item()
                further, spans = further + 1, True
            mass[int(ours[place])] += certain
            probability -= certain
        if content.startswith(written) and len(content) > len(written):
            whole = {0: pairs[y]} if y in pairs else cuts[y]
            if len(written) in whole:
                mass[whole[len(written)]] += probability
        elif not written and y in pairs:  # specials, by role
            mass[pairs[y]] += probability
    return mass / mass.sum(), bool(written) and not made_up, spans


def test_rows_in_no_chunk_say_nothing():
    """A tokenizer that changes the text: where it does, the teacher is not heard."""
    student = tiny(0)
    teacher = tiny(1)
    pair = TokenizerPair(student.tokenizer, teacher.tokenizer, CrossTokenizerConfig(method="prefix_marginal"))
    encode = Encoder(student.tokenizer, max_length=100, append_eos=True)
    (example,) = [e.example for e in encode([Example("0" * 32, "The people, and the peace of the nations.")])]
    (other,) = [e.example for e in encode([Example("0" * 32, "The people, or  the peace of the nations.")])]
    object.__setattr__(other, "text", example.text)
    found = PrefixMarginalView(pair).plan(batch_of(example), [other])
    assert found.known is not None and 0 < (~found.known).sum() < 5 and (found.answer[1:] >= found.answer[:-1]).all()
    assert len(pair.prefix_table.first) == len(pair.teacher)


def test_a_step_where_some_rows_are_not_heard_is_that_of_the_others():
    """Rows without weight take no part, whatever stands there."""
    hidden, head, labels, target = random_prefix_marginal(3)
    share = torch.ones(len(labels), dtype=torch.float64)
    share[[2, 5]] = 0.0
    keep = share.nonzero().squeeze(-1)
    ours = fused_linear_kd(hidden, head, [(share, target)], labels=labels)
    alone = fused_linear_kd(hidden[keep], head, target.select(keep), labels=labels[keep])
    torch.testing.assert_close(ours.loss, alone.loss)


def test_statistics_compare_with_the_spelled_teacher():
    """The log has KL and agreement with a teacher of another tokenizer."""
    student, teacher = (
        tiny(0),
        load_student(StudentConfig(config=LLAMA, tokenizer="shipped:tokenizers/pieces-1k"), CPU, 1),
    )
    aligned = cross_teacher(student, teacher, CrossTokenizerConfig())
    encode = Encoder(student.tokenizer, max_length=100, append_eos=True)
    batch = batch_of(*(e.example for e in encode([Example(f"{i:032x}", text) for i, text in enumerate(TEXTS)])))
    target = aligned.targets(batch, aligned.prepare(batch))
    _, sums = StudentLoss(student)(batch, [(1.0, target)], 1.0, KD, stat_rows=1000)
    assert sums["stat_rows"] == len(batch.rows)
    torch.testing.assert_close(sums["kl"], sums["kd"], rtol=1e-4, atol=1e-4)  # KL at T = 1 over all rows is the loss


@pytest.mark.parametrize("k", [8, 64, 512])
def test_few_entries_say_what_the_whole_does(k):
    """Both sum to one; no entry has much more than the whole distribution says, and with more entries they agree more."""
    student, teacher = (
        load_student(StudentConfig(config=LLAMA, tokenizer=f"shipped:tokenizers/{name}"), CPU, number)
        for number, name in enumerate(("pieces-1k", "bytes-2k"))
    )
    pair = TokenizerPair(student.tokenizer, teacher.tokenizer, CrossTokenizerConfig())
    encode, read = Encoder(student.tokenizer, max_length=100, append_eos=True), TeacherText(teacher.tokenizer, None)
    pieces = [Example(f"{i:032x}", text) for i, text in enumerate(TEXTS)]
    batch = batch_of(*(e.example for e in encode(pieces)))
    found = PrefixMarginalView(pair).plan(batch, read(pieces))
    logits = 3 * torch.randn(len(found.token), len(teacher.tokenizer), generator=torch.Generator().manual_seed(0))
    logp = logits.log_softmax(-1)
    whole = target_logits(found.dense(DenseTarget(logits=logits), CPU), slice(None)).softmax(-1)
    top = logp.topk(k)
    tail = logp.exp().scatter(-1, top.indices, 0.0).sum(-1).log()
    chosen = logp.gather(-1, torch.from_numpy(found.token)[:, None]).squeeze(-1)
    few, known = found.top_k(*(x.numpy() for x in (top.indices, top.values, tail, chosen)))
    assert known.all()
    masses = few.logprobs.exp().sum(-1) + few.tail.exp()
    torch.testing.assert_close(masses, torch.ones_like(masses), rtol=1e-5, atol=1e-5)
    ours = torch.zeros_like(whole).scatter_add(1, few.ids, few.logprobs.exp())
    fresh = torch.from_numpy(found.node == 0)
    if found.known is not None:
        fresh &= torch.from_numpy(found.known)
    assert (ours - whole)[fresh].max() < 1e-3  # what is left out is in the rest, not on the others
    assert few.absent is not None and few.logprobs[few.absent].max() == -torch.inf
    apart = (ours - whole).abs().sum(-1)[fresh].mean()
    assert apart < {8: 0.9, 64: 0.5, 512: 0.1}[k], float(apart)
