"""From records to prompts and from answers to Examples, on ids: what is read, and what is supervised."""

from __future__ import annotations

import numpy as np
from tiny import tiny

from potstill.config import DataConfig, SourceConfig
from potstill.data import Encoder, collate, example_maker
from potstill.models import load_tokenizer
from potstill.rollouts.engine import Completion
from potstill.rollouts.prompts import Answers, Prompter, stop_ids

MODEL = tiny()
TOKENIZER = MODEL.tokenizer  # pad is eos
EOS = TOKENIZER.eos_token_id
CHAT = [
    {"role": "user", "content": "How many legs?"},
    {"role": "assistant", "content": "Eight."},
    {"role": "user", "content": "And wings?"},
    {"role": "assistant", "content": "None."},
]


def pieces(record, tokenizer=TOKENIZER, **columns):
    source = SourceConfig(files="x", **columns)
    data = DataConfig(sources=[source], max_length=64)
    return list(example_maker(data, source, "data.sources[0]", tokenizer)(record, "x:1"))


def prompter(tokenizer=TOKENIZER, most=48, prompt_tokens=6) -> Prompter:
    return Prompter(tokenizer, most=most, prompt_tokens=prompt_tokens, kwargs={})


def answers(model=MODEL, teacher=None) -> Answers:
    return Answers(model, Encoder(model.tokenizer, max_length=64, append_eos=True), {}, teacher)


def written(text: str, *more: int, tokenizer=TOKENIZER, end="eos") -> Completion:
    ids = np.array([*tokenizer(text, add_special_tokens=False).input_ids, *more], dtype=np.int32)
    return Completion(ids, -np.arange(1, len(ids) + 1, dtype=np.float32), end)


def test_of_a_plain_text_the_first_tokens_are_the_prompt() -> None:
    (piece,) = pieces({"text": "The people of the United States and their Congress"})
    prompt = prompter()(piece)
    ids = TOKENIZER(piece.text).input_ids
    assert prompt.ids.tolist() == ids[:7] and prompt.cut == 0  # bos comes besides
    assert piece.text.startswith(prompt.text) and TOKENIZER(prompt.text).input_ids == ids[:7]


def test_the_beginning_of_a_text_that_finds_no_room_is_cut_and_counted() -> None:
    (piece,) = pieces({"text": "The people of the United States and their Congress"})
    ids = TOKENIZER(piece.text).input_ids
    prompt = prompter(most=4, prompt_tokens=6)(piece)
    assert prompt.ids.tolist() == ids[:4] and prompt.cut == 3  # of bos and 6 tokens
    assert prompter(most=7, prompt_tokens=6)(piece).cut == 0
    assert prompter(most=48, prompt_tokens=1000)(piece).cut == 0  # there is no more text


def test_a_prompt_never_ends_within_a_character() -> None:
    (piece,) = pieces({"text": "日本語のテキスト"})  # several byte tokens each
    whole = TOKENIZER(piece.text).input_ids
    assert len(whole) > 12
    for n in range(1, 12):
        prompt = prompter(prompt_tokens=n)(piece)
        if prompt is not None:
            assert TOKENIZER.decode(prompt.ids[1:]) == prompt.text and "�" not in prompt.text


def test_a_prompt_column_is_read_whole_and_its_completion_not_at_all() -> None:
    (piece,) = pieces({"q": "Two and two is ", "a": "four."}, prompt="q", completion="a")
    prompt = prompter(prompt_tokens=1)(piece)
    assert prompt.text == "Two and two is " and prompt.ids.tolist() == TOKENIZER(prompt.text).input_ids
    (alone,) = pieces({"q": "Two and two is "}, prompt="q")
    assert prompter()(alone).ids.tolist() == prompt.ids.tolist()


def test_a_chat_is_answered_at_its_last_assistant_turn() -> None:
    (piece,) = pieces({"m": CHAT}, messages="m")
    prompt = prompter()(piece)
    expected = TOKENIZER.apply_chat_template(CHAT[:3], tokenize=False, add_generation_prompt=True)
    assert prompt.text == expected and prompt.messages == CHAT[:3]
    assert prompt.ids.tolist() == TOKENIZER(expected, add_special_tokens=False).input_ids
    (open_one,) = pieces({"m": CHAT[:1]}, messages="m")  # nothing to learn from, but something to answer
    assert open_one.text == ""
    assert prompter()(open_one).text == TOKENIZER.apply_chat_template(
        CHAT[:1], tokenize=False, add_generation_prompt=True
    )


def test_a_prompt_beyond_the_limit_is_cut_on_the_left_and_counted() -> None:
    (piece,) = pieces({"q": "one two three four five six seven eight nine ten", "a": "x"}, prompt="q", completion="a")
    whole = prompter()(piece)
    cut = prompter(most=5)(piece)
    # What the tokenizer itself puts before every text stays.
    assert cut.ids.tolist() == [TOKENIZER.bos_token_id, *whole.ids[-4:]] and cut.cut == len(whole.ids) - 5
    assert whole.text.endswith(cut.text) and TOKENIZER.decode(cut.ids[1:]) == cut.text
    (chat,) = pieces({"m": CHAT}, messages="m")
    cut, whole = prompter(most=8)(chat), prompter()(chat)
    assert cut.ids.tolist() == [TOKENIZER.bos_token_id, *whole.ids[-7:]]  # which its template writes


def test_only_the_answer_is_supervised_with_the_eos_that_ends_it() -> None:
    (piece,) = pieces({"q": "Two and two is ", "a": "x"}, prompt="q", completion="a")
    prompt, text = prompter()(piece), written("four.", EOS)
    example = answers().own(prompt, text, "student", 7)
    n = len(prompt.ids)
    assert example.ids.tolist() == [*prompt.ids, *text.ids]
    assert example.supervised.tolist() == [False] * n + [True] * len(text.ids)
    assert example.behaviour.tolist() == [0.0] * n + text.logprobs.tolist()
    assert example.text == "Two and two is four." and example.supervised_bytes == len("four.")
    assert (example.writer, example.version) == ("student", 7)
    batch = collate([[example]], pad_id=EOS)
    assert batch.rows.labels.tolist() == text.ids.tolist()
    assert batch.rows.student.tolist() == list(range(n - 1, n - 1 + len(text.ids)))
    assert batch.rows.behaviour.tolist() == text.logprobs.tolist()


def test_padding_with_eos_and_an_eos_inside_a_prompt_change_nothing() -> None:
    """The second row is shorter and padded with the id that ends the first; the prompt of the first holds that id too."""
    (chat,) = pieces({"m": CHAT}, messages="m")
    prompt = prompter()(chat)
    inside = np.insert(prompt.ids, 2, EOS).astype(np.int32)
    long = answers().own(
        type(prompt)(chat, prompt.text, inside, 0, prompt.messages), written("None.", EOS), "student", 0
    )
    (piece,) = pieces({"q": "a", "a": "x"}, prompt="q", completion="a")
    short = answers().own(prompter()(piece), written("b", EOS), "student", 0)
    batch = collate([[long], [short]], pad_id=EOS)
    assert batch.input_ids[0, 2] == EOS and batch.document[0, 2] == 1  # attended to
    assert batch.supervised_tokens == long.supervised_tokens + short.supervised_tokens
    assert (batch.rows.labels == EOS).sum() == 2  # one each, the padding none
    assert not batch.document[1, len(short.ids) :].any()


def test_an_answer_cut_at_the_limit_has_no_eos_and_an_empty_one_nothing_to_learn() -> None:
    (piece,) = pieces({"q": "Two", "a": "x"}, prompt="q", completion="a")
    prompt = prompter()(piece)
    cut = answers().own(prompt, written(" and so", end="length"), "student", 0)
    assert cut.supervised[-1] and cut.ids[-1] != EOS
    empty = answers().own(prompt, written("", end="length"), "student", 0)
    assert not empty.supervised.any() and empty.ids.tolist() == prompt.ids.tolist()
    batch = collate([[cut], [empty]], pad_id=0)
    assert batch.supervised_tokens == cut.supervised_tokens


def test_an_answer_in_a_chat_becomes_its_last_turn() -> None:
    (piece,) = pieces({"m": CHAT}, messages="m")
    example = answers().own(prompter()(piece), written("Two.", EOS), "student", 0)
    assert example.messages == [*CHAT[:3], {"role": "assistant", "content": "Two."}]
    assert example.text.endswith("Two.") and example.spans[0][0] == len(example.text) - 4
    assert example.supervised_tokens == len(written("Two.", EOS).ids)  # no earlier turn


def test_bytes_that_are_no_character_are_kept_as_ids_and_shown_as_such() -> None:
    (piece,) = pieces({"q": "a ", "a": "x"}, prompt="q", completion="a")
    half = np.array(TOKENIZER("é", add_special_tokens=False).input_ids[:1], dtype=np.int32)
    ids = TOKENIZER("日", add_special_tokens=False).input_ids
    text = Completion(np.array(ids[:1], dtype=np.int32), np.zeros(1, dtype=np.float32), "length")
    example = answers().own(prompter()(piece), text, "student", 0)
    assert example.ids[-1] == ids[0] and example.text == "a �" and len(half)


def test_what_a_teacher_with_other_tokens_wrote_is_read_by_the_student() -> None:
    other = load_tokenizer("shipped:tokenizers/pieces-1k", "test")
    (piece,) = pieces({"q": "Two and two is", "a": "x"}, prompt="q", completion="a")
    prompt = prompter(other)(piece)
    assert prompt.ids.tolist() == other(prompt.text).input_ids[: len(prompt.ids)]
    answer = np.array(other("Two and two is four, said she.").input_ids, dtype=np.int32)
    answer = answer[answer != other.eos_token_id][len(prompt.ids) :]
    for end, last in (("eos", True), ("length", False)):
        example = answers(teacher=other).translated(prompt, Completion(answer, np.zeros(len(answer), np.float32), end))
        text = "Two and two is four, said she."
        expected = [*TOKENIZER(text).input_ids, *([EOS] if last else [])]
        assert example.text == text and example.ids.tolist() == expected and example.writer == "teacher"
        begin = len(TOKENIZER("Two and two is").input_ids)
        assert example.supervised.tolist() == [i >= begin for i in range(len(expected))]
        assert example.behaviour is None
    (chat,) = pieces({"m": CHAT}, messages="m")
    model = tiny()
    reply = answers(model, TOKENIZER).translated(prompter()(chat), written("Two.", EOS))
    text = TOKENIZER.apply_chat_template([*CHAT[:3], {"role": "assistant", "content": "Two."}], tokenize=False)
    assert reply.text == text
    ends = [i for i in np.flatnonzero(reply.supervised)]
    assert TOKENIZER.decode(reply.ids[ends]).startswith("Two.")


def test_every_eos_of_the_model_ends_a_text_and_in_chats_the_end_of_a_turn() -> None:
    model = tiny()
    model.model.generation_config.eos_token_id = [11, 12]
    turn = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert stop_ids(model, chats=False) == tuple(sorted({11, 12, EOS}))
    assert stop_ids(model, chats=True) == tuple(sorted({11, 12, EOS, turn}))


def test_a_prompt_is_never_cut_within_a_character() -> None:
    (piece,) = pieces({"q": "語のテキスト 日本 and so on", "a": "x"}, prompt="q", completion="a")
    whole = prompter()(piece)
    for most in range(2, len(whole.ids)):
        cut = prompter(most=most)(piece)
        assert TOKENIZER.decode(cut.ids[1:]) == cut.text and len(cut.ids) == len(whole.ids) - cut.cut <= most


def test_ids_that_no_token_has_end_an_answer_and_are_counted() -> None:
    (piece,) = pieces({"q": "Two", "a": "x"}, prompt="q", completion="a")
    made, prompt = answers(), prompter()(piece)
    example = made.own(prompt, written(" and", len(TOKENIZER) + 3, 7), "student", 0)
    assert example.ids.tolist() == [*prompt.ids, *written(" and").ids] and made.counts["unknown_ids"] == 1


def test_of_a_teachers_answer_that_was_cut_the_end_of_the_turn_is_not_learnt() -> None:
    (chat,) = pieces({"m": CHAT}, messages="m")
    made = answers(tiny(), TOKENIZER)
    whole = made.translated(prompter()(chat), written("Six legs", EOS))
    cut = made.translated(prompter()(chat), written("Six legs", end="length"))
    learnt = [TOKENIZER.decode(e.ids[e.supervised]) for e in (whole, cut)]
    assert learnt[0].startswith("Six legs<|") and learnt[1] == "Six legs"
    half = TOKENIZER("日", add_special_tokens=False).input_ids[:1]
    broken = made.translated(prompter()(chat), written("Six ", *half, end="length"))
    assert TOKENIZER.decode(broken.ids[broken.supervised]).strip() == "Six"  # no � is taught


def test_an_answer_that_no_template_shows_keeps_its_place_and_teaches_nothing() -> None:
    model = tiny()
    model.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    (chat,) = pieces({"m": CHAT}, messages="m")
    example = answers(model, TOKENIZER).translated(prompter()(chat), written("Two.", EOS))
    assert len(example.ids) == 1 and not example.supervised.any()
    assert collate([[example]], pad_id=0).supervised_tokens == 0
