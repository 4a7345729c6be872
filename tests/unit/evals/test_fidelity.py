"""Evaluation numbers against numbers worked out another way."""

import json
import math
import threading

import pytest
import tokenizers
import torch
from tiny import CPU, LLAMA, batch_of, examples, tiny
from tiny_tokenizer import CHATML
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from potstill.config import DataConfig, StudentConfig
from potstill.data import Encoder, StoppedWaiting
from potstill.evals.fidelity import (
    Sums,
    _binned,
    _expected_calibration_error,
    evaluate,
    evaluation_batches,
    greedy_completions,
)
from potstill.evals.reference import Reference, measured_against
from potstill.models import load_student
from potstill.teachers.live import LiveModel, live_teacher
from potstill.teachers.same_tokenizer import SameTokenizerView
from potstill.teachers.teacher import Teacher
from potstill.types import Example, PotstillError

TEXT = "The state of the Union is strong — très forte 💪, as ever.\n" * 7


@pytest.mark.parametrize("packing", [True, False])
def test_bits_per_byte_counts_every_byte_once(tmp_path, packing):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_text("Fellow citizens", encoding="utf-8")
    data = DataConfig.model_validate(
        {"sources": [{"files": str(tmp_path / "*.txt")}], "max_length": 64, "piece_bytes": 90, "packing": packing}
    )
    student = tiny(0)
    result = evaluate(student, None, evaluation_batches(data, student, 2, None), CPU)
    assert result["bytes"] == len(TEXT.encode()) + len("Fellow citizens")
    # Another way: document pieces one by one through the whole model, its own logits, bos in front.
    nats = tokens = 0.0
    for batch in evaluation_batches(data, student, 1, None):
        for example in batch.examples:
            ids = student.tokenizer(example.text, return_tensors="pt").input_ids
            assert ids[0, 0] == student.tokenizer.bos_token_id
            with torch.no_grad():
                logp = student.model.eval()(ids).logits[0, :-1].log_softmax(-1)
            nats -= logp.gather(-1, ids[0, 1:, None]).sum().item()
            tokens += ids.shape[1] - 1
    assert result["tokens"] == tokens
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / result["bytes"], rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert result["kl"] is None and result["agreement"] is None


def with_tokenizer(name, template=None):
    student = load_student(StudentConfig(config=LLAMA, tokenizer=f"shipped:tokenizers/{name}"), CPU, 0)
    student.tokenizer.chat_template = template
    return student


def data_of(path, **keys):
    return DataConfig.model_validate({"sources": [{"files": str(path), **keys.pop("columns", {})}], **keys})


@pytest.mark.parametrize(
    ("max_length", "piece_bytes", "packing"), [(24, None, True), (16, 350, False), (2, None, True)]
)
def test_two_tokenizers_are_scored_on_the_same_bytes_and_these_are_the_files(
    tmp_path, max_length, piece_bytes, packing
):
    path = tmp_path / "a.jsonl"
    texts = [TEXT, "Fellow citizens", "<|endoftext|> is a mark of one of them, and </s> one of others: 日本語 💪"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = data_of(path, max_length=max_length, piece_bytes=piece_bytes, packing=packing)
    for name in ("bytes-2k", "pieces-1k"):
        student = with_tokenizer(name)
        result = evaluate(student, live_teacher(student, 100, "it"), evaluation_batches(data, student, 3, None), CPU)
        assert result["bytes"] == sum(len(text.encode()) for text in texts)
        # Every token that the text's pieces have, once, with a teacher too.
        whole = data.model_copy(update={"max_length": 4096})
        assert result["tokens"] == sum(len(batch.rows) for batch in evaluation_batches(whole, student, 3, None))
        assert result["agreement"] == 1 and result["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_windows_of_a_long_text_are_worked_out_token_by_token(tmp_path, packing):
    """A token sees the text from the beginning, or from half a window before the first that its window scores."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    student = tiny(0)
    data = data_of(tmp_path / "a.txt", max_length=17, piece_bytes=2000, packing=packing)
    result = evaluate(student, None, evaluation_batches(data, student, 2, None), CPU)
    bos, *ids = student.tokenizer(TEXT).input_ids
    nats = 0.0
    for place, token in enumerate(ids):
        seen = ids[:place] if place < 16 else ids[place - 8 - place % 8 : place]
        with torch.no_grad():
            nats -= student.model.eval()(torch.tensor([[bos, *seen]])).logits[0, -1].log_softmax(-1)[token].item()
    assert (result["tokens"], result["bytes"]) == (len(ids), len(TEXT.encode()))
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)


def test_a_long_chat_is_scored_whole_and_its_prompts_are_not(tmp_path):
    turns = [("user", "Why? " * 30), ("assistant", "Because. " * 20), ("user", "Oh."), ("assistant", "Yes — " * 9)]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    answers = sum(len(content.encode()) for role, content in turns if role == "assistant")
    for name in ("bytes-2k", "pieces-1k"):
        student = with_tokenizer(name, CHATML)
        tokens, sizes = set(), set()
        for max_length in (12, 9, 4096):
            data = data_of(tmp_path / "chat.jsonl", columns={"messages": "messages"}, max_length=max_length)
            batches = list(evaluation_batches(data, student, 4, None))
            sizes.add(sum(example.supervised_bytes for batch in batches for example in batch.examples))
            assert max(batch.input_ids.shape[1] for batch in batches) <= max_length
            tokens.add(sum(len(batch.rows) for batch in batches))
        marks = 0 if name == "bytes-2k" else 2 * len("<|im_end|>\n")  # text to a tokenizer that does not know them
        assert sizes == {answers + marks} and len(tokens) == 1


@pytest.mark.parametrize("max_length", [6, 64])
def test_an_answer_has_the_same_bytes_whatever_token_begins_in_its_prompt(tmp_path, max_length):
    records = [{"q": "The people ", "a": "of the United States"}, {"q": "We are", "a": " the people.\n"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    columns = {"prompt": "q", "completion": "a"}
    for name in ("bytes-2k", "pieces-1k"):
        student = with_tokenizer(name)
        data = data_of(tmp_path / "pairs.jsonl", columns=columns, max_length=max_length)
        result = evaluate(student, None, evaluation_batches(data, student, 4, None), CPU)
        assert result["bytes"] == sum(len(record["a"]) for record in records)


@pytest.mark.parametrize("packing", [True, False])
def test_the_number_of_examples_is_of_pieces_not_of_windows(tmp_path, packing):
    (tmp_path / "a.txt").write_text("".join(f"{i}. {line}\n" for i, line in enumerate(TEXT.split("\n"))))
    student = tiny(0)
    data = data_of(tmp_path / "a.txt", max_length=9, piece_bytes=100, packing=packing)
    batches = list(evaluation_batches(data, student, 2, 3))
    texts = {example.text for batch in batches for example in batch.examples}
    assert len(texts) == 3
    scored = sum(example.supervised_bytes for batch in batches for example in batch.examples)
    assert scored == sum(len(text.encode()) for text in texts)


def test_a_window_without_room_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    student = tiny(0)
    with pytest.raises(PotstillError, match=r"^eval.data.max_length: 1 leaves no room for a token and one before it"):
        list(evaluation_batches(data_of(tmp_path / "a.txt", max_length=1), student, 2, None))


def test_the_teacher_against_itself_and_another():
    a, b = tiny(0), tiny(1)
    batches = [batch_of(*examples([9, 17, 4]))]
    itself = evaluate(a, live_teacher(a, 2048, "a"), batches, CPU)
    assert itself["kl"] == pytest.approx(0, abs=1e-6) and itself["agreement"] == 1.0
    other = evaluate(a, live_teacher(b, 2048, "b"), batches, CPU)
    batch = batches[0]
    with torch.no_grad():
        q, p = (
            m.model.eval()(batch.input_ids).logits.flatten(0, 1)[batch.rows.student].log_softmax(-1) for m in (a, b)
        )
    assert other["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert other["agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    assert other["accuracy"] == pytest.approx((q.argmax(-1) == batch.rows.labels).float().mean().item())


def test_calibration_error_by_hand():
    """Bins of 1/15: 0.95 three times with two right, 0.30 twice with none right."""
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.30, 0.30])
    correct = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    expected = (3 * abs(0.95 - 2 / 3) + 2 * 0.30) / 5
    assert _expected_calibration_error(_binned(confidence, correct)) == pytest.approx(expected, rel=1e-6)


def test_completions_are_the_models_own_greedy_text():
    student = tiny(0)
    samples = greedy_completions(student, ["The people", "We"], 5)
    for sample in samples:
        ids = student.tokenizer(sample["prompt"], return_tensors="pt").input_ids
        for _ in range(5):
            with torch.no_grad():
                ids = torch.cat([ids, student.model.eval()(ids).logits[:, -1:].argmax(-1)], 1)
        assert student.tokenizer.decode(ids[0], skip_special_tokens=True) == sample["prompt"] + sample["text"]


def lossy(normalizer, pre_tokenizer, *, special):
    """A tokenizer that changes the text, or leaves some of it out. With `special`, one of its tokens is one."""
    words = [
        "[PAD]",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
        "é",
        "##é",
        "[UNK]",
    ]
    model = tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, **({"pad_token": "[PAD]"} if special else {}))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("max_length", [5, 512])
def test_every_byte_is_scored_whatever_a_tokenizer_leaves_out(max_length, special):
    text = "  The  people\u0301 of café\t№ 9 were, as ever,   WE THE people.\n\n"
    for normalizer in (normalizers.NFC(), normalizers.NFKC(), normalizers.BertNormalizer()):
        tokenizer = lossy(normalizer, pre_tokenizers.BertPreTokenizer(), special=special)
        encode = Encoder(tokenizer, max_length=max_length, append_eos=True, evaluation=True)
        (encoded,) = encode([Example("key", text)])
        windows = [window.example for window in (encoded, *encoded.further)]
        assert sum(example.supervised_bytes for example in windows) == len(text.encode())
        tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
        assert (
            sum(example.supervised_tokens for example in windows) == tokens
        )  # the first too, after what stands for bos


def test_examples_are_of_the_same_text_whatever_a_model_reads(tmp_path):
    (tmp_path / "a.txt").write_text(20 * TEXT, encoding="utf-8")
    student = tiny(0)
    sizes = set()
    for max_length in (32, 64, 512):
        batches = evaluation_batches(data_of(tmp_path / "a.txt", max_length=max_length), student, 4, 2)
        sizes.add(sum(example.supervised_bytes for batch in batches for example in batch.examples))
    assert len(sizes) == 1 and sizes.pop() <= 2 * 4096


def test_a_value_that_is_not_known_for_all_rows_has_no_mean():
    sums = Sums()
    sums.add(2, {"kl": torch.ones(2), "nll": torch.full((2,), 3.0)})
    sums.add(2, {"kl": None, "nll": torch.full((2,), 5.0)})
    assert sums.mean("nll") == 4.0 and sums.mean("kl") is None and sums.rows == 4


def test_the_student_trains_on_after_an_evaluation_that_failed():
    student = tiny(0)
    student.model.train()

    class Gone(Teacher):
        def prepare(self, batch):
            raise PotstillError("the server is away")

    gone = Reference(Gone(LiveModel(student, 2048), SameTokenizerView(), "gone"), away=True)
    batches = [batch_of(*examples([9, 17, 4]))]
    result = measured_against(gone, student, batches, CPU)
    assert result["kl"] is None and result["tokens"] == len(batches[0].rows)
    assert student.model.training


def test_an_evaluation_that_waits_for_a_server_can_be_interrupted():
    student = tiny(0)
    student.model.train()
    waiting, ended = threading.Event(), threading.Event()

    class Away(Teacher):
        def prepare(self, batch):
            waiting.set()
            ended.wait()

    def interrupted():
        if waiting.is_set():
            ended.set()
        return ended.is_set()

    away = Reference(Away(LiveModel(student, 2048), SameTokenizerView(), "away"), away=True)
    with pytest.raises(StoppedWaiting):
        measured_against(away, student, [batch_of(*examples([9, 17, 4]))], CPU, interrupted)
    assert student.model.training
