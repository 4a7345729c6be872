from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import CHATML, ids, tiny_tokenizer

from potstill.config import DataConfig, SourceConfig
from potstill.data.encoding import Encoder
from potstill.data.examples import example_maker, json_key
from potstill.text.chat import ChatRenderer, read_messages, read_tools, without_thinking
from potstill.types import Example, PotstillError

STRIPS_THINKING = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}" + CHATML
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_start|>\\n\\n' + m.content | trim"
    " + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\\n\\n' }}{% endif %}"
)
# Shows the tools before the last question, so that every later question moves them.
TOOLS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if tools and loop.index0 == ns.last %}{{ '[' + tools | tojson + ']' }}{% endif %}"
    "{% if m.tool_calls %}{{ '<|im_start|>assistant\\n' + m.tool_calls | tojson + '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The prompt to generate opens a thought that a turn without thinking does not show.
OPENS_THOUGHT = CHATML.replace("<|im_start|>assistant\\n' }}{% endif", "<|im_start|>assistant\\n<think>\\n' }}{% endif")
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LAST_ONLY_EOS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ eos_token if loop.last and m.role == 'assistant' else '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

# As DeepSeek-V3's: a call is shown where the content is none.
CALLS_WITHOUT_CONTENT = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m['content'] is none %}{{ '<|im_start|>assistant\\n' + m.tool_calls[0].function.name"
    " + m.tool_calls[0].function.arguments + '<|im_end|>\\n' }}{% else %}",
).replace("{% endfor %}", "{% endif %}{% endfor %}")
CALLS_AFTER_CONTENT = CHATML.replace(
    "m.content", "m.content + (m.tool_calls | map(attribute='function.name') | join if m.tool_calls else '')"
)
WRITES_NONE = CALLS_AFTER_CONTENT.replace("m.content +", "m.content | string +")
ASSETS = Path(os.environ.get("POTSTILL_ASSETS", Path(__file__).parents[4] / "shared" / "assets")) / "tokenizers"

U1, A1, U2, A2 = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>x</think>Hé!"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "<think>y</think>Bye"},
)


def examples(template: str, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> list[Example]:
    source = SourceConfig(files="x", messages="chat", tools="tools" if tools else None, chat_template_kwargs=kwargs)
    data = DataConfig(sources=[source], max_length=4096)
    tokenizer = tiny_tokenizer(chat_template=template)
    make = example_maker(data, source, "data.sources[0]", tokenizer)
    pieces = list(make({"chat": messages, "tools": tools}, "chats.jsonl, line 1"))
    encoded = Encoder(tokenizer, max_length=4096, append_eos=True)(pieces)
    return [e.example for e in encoded if e.example is not None]


def marked(text: str) -> tuple[list[int], list[bool]]:
    """Ids and mask of a text in which «…» is supervised."""
    all_ids: list[int] = []
    mask: list[bool] = []
    for number, part in enumerate(text.replace("»", "«").split("«")):
        all_ids += ids(part)
        mask += [number % 2 == 1] * len(ids(part))
    return all_ids, mask


def check(example: Example, text: str, supervised_bytes: int | None = None) -> None:
    expected, mask = marked(text)
    assert example.ids.tolist() == expected
    assert example.supervised.tolist() == mask
    assert example.text == text.replace("«", "").replace("»", "")
    if supervised_bytes is not None:
        assert example.supervised_bytes == supervised_bytes


def test_every_assistant_turn_of_chatml_is_supervised_with_its_end_but_not_the_line_break() -> None:
    (example,) = examples(CHATML, [U1, A1, U2, A2])
    check(
        example,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«<think>x</think>Hé!<|im_end|>»\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n«<think>y</think>Bye<|im_end|>»\n",
        supervised_bytes=len("<think>x</think>Hé!<think>y</think>Bye".encode()),
    )
    assert example.messages == [U1, A1, U2, A2]
    assert example.key == json_key({"messages": [U1, A1, U2, A2], "tools": None})
    assert example.key == "16d527e53ff199f9877945ed2e696a06"


def test_a_template_that_strips_earlier_thinking_gives_each_rewritten_turn_a_text_of_its_own() -> None:
    whole, first = examples(STRIPS_THINKING, [U1, A1, U2, A2])
    check(
        whole,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHé!<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n«<think>y</think>Bye<|im_end|>»\n",
    )
    check(first, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«<think>x</think>Hé!<|im_end|>»\n")
    assert first.messages == [U1, A1]
    (alone,) = examples(STRIPS_THINKING, [U1, A1])
    assert len({whole.key, first.key, alone.key}) == 3


def test_turns_without_thinking_stay_in_the_whole_when_others_are_split_off() -> None:
    plain = {"role": "assistant", "content": "Yes"}
    whole, split = examples(STRIPS_THINKING, [U1, plain, U2, A1, U1, A2])
    check(
        whole,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yes<|im_end|>»\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nHé!<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«<think>y</think>Bye<|im_end|>»\n",
    )
    check(
        split,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n«<think>x</think>Hé!<|im_end|>»\n",
    )


def test_a_default_system_prompt_is_not_supervised() -> None:
    (example,) = examples(DEFAULT_SYSTEM, [U1, {"role": "assistant", "content": "Yes"}])
    check(
        example,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n«Yes<|im_end|>»\n",
        supervised_bytes=3,
    )


def test_llama_3_has_one_bos_from_its_template() -> None:
    (example,) = examples(
        LLAMA_3, [U1, {"role": "assistant", "content": " Yes "}, U2, {"role": "assistant", "content": "No"}]
    )
    check(
        example,
        "<|bos|><|im_start|>user<|im_start|>\n\nHi<|im_end|><|im_start|>assistant<|im_start|>\n\n«Yes<|im_end|>»"
        "<|im_start|>user<|im_start|>\n\nAnd?<|im_end|><|im_start|>assistant<|im_start|>\n\n«No<|im_end|>»",
        supervised_bytes=5,
    )


def test_tool_calls_are_supervised_and_tools_that_move_are_noticed() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "refusal": None}
    result, answer = {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4"}
    shown = '[[{"type": "function", "function": {"name": "add"}}]]'
    first = f'{shown}<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n«[{{"name": "add"}}]<|im_end|>»'
    second = f"{first}<|im_start|>tool\n4<|im_end|><|im_start|>assistant\n«It is 4<|im_end|>»"
    (example,) = examples(TOOLS, [U1, call, result, answer], tools)
    check(example, second)
    # A second question moves the tools: both turns before it share one text, as they were given.
    whole, earlier = examples(TOOLS, [U1, call, result, answer, U2, answer], tools)
    check(
        whole,
        (second.replace(shown, "") + f"{shown}<|im_start|>user\nAnd?<|im_end|>").replace("«", "").replace("»", "")
        + "<|im_start|>assistant\n«It is 4<|im_end|>»",
    )
    check(earlier, second)


def called(content: str | None, arguments: Any = '{"city": "Paris", "unit": null}') -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [U1, {"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize("content", [None, ""])
def test_a_call_without_words_is_given_as_the_template_knows_it(content: str | None) -> None:
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (example,) = examples(CALLS_WITHOUT_CONTENT, called(content))
    check(example, asked + '«get_weather{"city": "Paris", "unit": null}<|im_end|>»\n')
    assert example.messages == called(content)
    for template in (CALLS_AFTER_CONTENT, WRITES_NONE):
        (example,) = examples(template, called(content))
        check(example, asked + "«get_weather<|im_end|>»\n")


@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_a_template_that_drops_a_call_is_an_error(content: str | None) -> None:
    message = r"line 1: .*the chat template drops the call of get_weather from message 2, so the student would not"
    with pytest.raises(PotstillError, match=message):
        examples(CHATML, called(content))
    if content:
        with pytest.raises(PotstillError, match=message):
            examples(CALLS_WITHOUT_CONTENT, called(content))


def test_a_template_that_drops_what_a_turn_says_is_an_error_unless_it_is_thinking() -> None:
    with pytest.raises(PotstillError, match=r'line 1: the chat template drops "It is 4" from message 2'):
        examples(TOOLS, [U1, {"role": "assistant", "content": " It is 4\n", "tool_calls": [{"name": "add"}]}])
    strips = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    for content in ("<think>x</think>Yes", "x</think>\n\nYes", "Yes"):
        (example,) = examples(strips, [U1, {"role": "assistant", "content": content}])
        assert example.text.endswith("Yes<|im_end|>\n")
    with pytest.raises(PotstillError, match=r'drops "Well." from message 2'):
        examples(strips, [U1, {"role": "assistant", "content": "Well. <think>x</think>Yes"}])


def real_spans(name: str, messages: list[dict[str, Any]]) -> list[str]:
    if not (ASSETS / name).exists():
        pytest.skip(f"{ASSETS / name} is not there")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS / name)
    texts = ChatRenderer(tokenizer).render(read_messages(messages, "f"), None, "f")
    return [text.text[begin:end] for text in texts for begin, end in text.spans]


def test_deepseek_v3_shows_its_calls() -> None:
    arguments = '{"city": "Paris", "unit": null}'
    for content in (None, ""):
        (span,) = real_spans("deepseek_v3", called(content))
        assert span == (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{arguments}\n```"
            "<｜tool▁call▁end｜>"
        )
    with pytest.raises(PotstillError, match=r"f: .*not .dict.*drops the call of get_weather from message 2"):
        real_spans("deepseek_v3", called(None, {"city": "Paris"}))


def test_qwen3_shows_its_calls_with_their_nulls_and_phi_4_has_none_to_show() -> None:
    (span,) = real_spans("qwen3", called(None, {"city": "Paris", "unit": None}))
    assert '{"name": "get_weather", "arguments": {"city": "Paris", "unit": null}}' in span
    assert len(real_spans("qwen3", [U1, A1, U2, A2])) == 2
    with pytest.raises(PotstillError, match="drops the call of get_weather from message 2"):
        real_spans("phi-4", called(None))
    assert real_spans("phi-4", [U1, A1]) == ["<think>x</think>Hé!<|im_end|>"]


def test_a_header_is_not_supervised_when_the_generation_prompt_says_more_than_the_turn() -> None:
    (example,) = examples(OPENS_THOUGHT, [U1, {"role": "assistant", "content": "<b>"}])
    check(example, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«<b><|im_end|>»\n")
    (example,) = examples(OPENS_THOUGHT, [U1, {"role": "assistant", "content": "<think>\nx</think>Yes"}])
    check(example, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n«x</think>Yes<|im_end|>»\n")


def test_without_special_tokens_the_line_break_is_how_a_turn_ends() -> None:
    (example,) = examples(
        PLAIN, [U1, {"role": "assistant", "content": "Yes"}, U2, {"role": "assistant", "content": "No"}]
    )
    check(example, "user: Hi\nassistant: «Yes\n»user: And?\nassistant: «No\n»")


def test_an_end_that_only_the_last_turn_has_makes_the_others_texts_of_their_own() -> None:
    whole, first = examples(
        LAST_ONLY_EOS, [U1, {"role": "assistant", "content": "Yes"}, U2, {"role": "assistant", "content": "No"}]
    )
    check(whole, "user: Hi\nassistant: Yes\nuser: And?\nassistant: «No<|eos|>»")
    check(first, "user: Hi\nassistant: «Yes<|eos|>»")


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM])
def test_an_assistant_may_open_the_conversation(template: str) -> None:
    (example,) = examples(template, [{"role": "assistant", "content": "Yes"}, U1])
    system = "<|im_start|>system\nBe kind.<|im_end|>\n" if template == DEFAULT_SYSTEM else ""
    check(example, f"{system}<|im_start|>assistant\n«Yes<|im_end|>»\n<|im_start|>user\nHi<|im_end|>\n")


def test_chat_template_kwargs_reach_the_template() -> None:
    template = "{{ mood | default('') }}" + CHATML
    (example,) = examples(template, [U1, {"role": "assistant", "content": "Yes"}], mood="glad")
    check(example, "glad<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yes<|im_end|>»\n")


def test_a_conversation_without_an_assistant_gives_no_example() -> None:
    assert examples(CHATML, [U1, U2]) == []


def test_a_turn_that_does_not_continue_what_came_before_is_an_error() -> None:
    backwards = "{% for m in messages | reverse %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(PotstillError, match=r"chats.jsonl, line 1: .* does not show turn 2 as a continuation"):
        examples(backwards, [U1, A1])


def test_what_a_template_refuses_is_said_in_its_own_words() -> None:
    with pytest.raises(
        PotstillError, match=r"line 1: the chat template refuses the first 2 messages: roles must alternate"
    ):
        examples("{{ raise_exception('roles must alternate.') }}", [U1, A1])


def test_a_tokenizer_without_a_template_is_an_error() -> None:
    with pytest.raises(PotstillError, match=r"data.sources\[0\].messages: the tokenizer .* has no chat template"):
        ChatRenderer(tiny_tokenizer())


def test_kwargs_that_potstill_sets_are_refused() -> None:
    with pytest.raises(PotstillError, match=r"chat_template_kwargs: tokenize is set by potstill"):
        ChatRenderer(tiny_tokenizer(chat_template=CHATML), {"tokenize": True})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Hi", "f, line 1 is not a list of messages"),
        ([], "f, line 1 is not a list of messages"),
        ([{"content": "Hi"}], "f, line 1: message 1 has no role"),
        ([U1, {"role": "assistant"}], r"f, line 1: message 2 \(assistant\) has no text as its content"),
        ([{"role": "user", "content": 3}], r"f, line 1: message 1 \(user\) has no text"),
        (["Hi"], "f, line 1: message 1 has no role"),
    ],
)
def test_malformed_messages_are_named(value: Any, message: str) -> None:
    with pytest.raises(PotstillError, match=message):
        read_messages(value, "f, line 1")


def test_messages_and_tools_may_be_json_in_a_string_and_only_a_messages_own_nulls_are_left_out() -> None:
    assert read_messages('[{"role": "user", "content": "Hi", "tool_calls": null}]', "f") == [U1]
    calls = called(None, {"city": "Paris", "unit": None})
    assert read_messages(calls, "f") == read_messages(json.dumps(calls), "f") == calls
    assert read_tools('[{"name": "add", "default": null}]', "f") == [{"name": "add", "default": None}]
    assert read_tools(None, "f") is None
    with pytest.raises(PotstillError, match="f is not a list of tools"):
        read_tools("add", "f")


# Hostile texts and templates


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", "<", "/think>"]), max_size=10).map("".join))
def test_what_is_no_thinking(text: str) -> None:
    """Beside its naive twin, which looks through all the rest at each open mark."""
    naive = re.compile(r"<think>.*?</think>|^(?:(?!<think>).)*</think>|<think>", re.DOTALL)
    assert without_thinking(text) == naive.split(text)


@pytest.mark.parametrize(
    "content",
    ["<think>" * 300_000, "<think>a" * 300_000, "<think>a</think>b" * 100_000, "</think>" * 300_000, "x" * 2_000_000],
    ids=["open", "parts", "whole", "closed", "long"],
)
def test_a_long_text_of_marks_takes_no_longer_than_another(content: str) -> None:
    """Two megabytes each; by the square of their length these would take an hour."""
    renderer = ChatRenderer(tiny_tokenizer(chat_template=CHATML))
    messages = [U1, {"role": "assistant", "content": content}]
    (text,) = renderer.render(messages, None, "line 1")
    ((begin, end),) = text.spans
    assert text.text[begin:end] == f"{content}<|im_end|>"
    assert renderer.without_end(text.text, begin, end) == end - len("<|im_end|>")


def test_a_long_row_of_special_tokens_is_taken_off_at_once() -> None:
    text = "word" + "<|im_end|>\n" * 200_000
    assert ChatRenderer(tiny_tokenizer(chat_template=CHATML)).without_end(text, 0, len(text)) == len("word")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDLESS = {
    "loops": (LOOP + "{% endfor %}{% endfor %}", "it takes more than 2,000,000 steps; it may be endless"),
    "lists": (
        "{% set many = range(99999) | list %}" + LOOP.replace("range(99999)", "many") + "{% endfor %}{% endfor %}",
        "it takes more than 2,000,000 steps",
    ),
    "output": (
        "{% set x = 'x' * 99999 %}" + LOOP + "{{ x }}{% endfor %}{% endfor %}",
        "it writes more than 100,000,000 characters",
    ),
    "times": ("{{ 'x' * 10 ** 12 }}", "it writes more than 100,000,000 characters"),
    "power": ("{{ 9 ** (9 ** 9) }}", "it writes more than 100,000,000 characters"),
    "plus": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "it writes more than 100,000,000 characters",
    ),
    "joined": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "it writes more than 100,000,000 characters",
    ),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template refuses the first 2 messages: "),
}


@pytest.mark.parametrize(("template", "words"), ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_refused(template: str, words: str) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(PotstillError) as caught:
        ChatRenderer(tokenizer).render([U1, A1], None, "chats.jsonl, line 1")
    assert words in str(caught.value) and str(caught.value).startswith("chats.jsonl, line 1: the chat template ")
    assert "refuses" in words or "the chat template of some/model is no good: it " in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        CHATML, STRIPS_THINKING, DEFAULT_SYSTEM, LLAMA_3, TOOLS, OPENS_THOUGHT, PLAIN, LAST_ONLY_EOS, CALLS_AFTER_CONTENT,
        "{%- for m in messages -%}\n  {% generation %}{{ m.content ~ 1 ~ none }}{% endgeneration %}\n{%- endfor %}",
        "{% macro f(x) %}{{ x.content * 2 }}{% endmacro %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{{ f(m) }}{% else %}none{% endfor %}{{ 2 ** 3 + 1 }}{{ [1] + [2] }}{% set y %}{{ bos_token }}{% endset %}{{ y }}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("tools", [None, [{"name": "f", "description": "<é>"}]])
def test_templates_are_rendered_as_transformers_does_it(template: str, tools: Any) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    messages = [U1, A1, U2]
    ours = ChatRenderer(tokenizer, {"extra": 1}).prompt(messages, tools, "line 1")
    kwargs = {"tokenize": False, "add_generation_prompt": True, "extra": 1}
    assert ours == tokenizer.apply_chat_template(messages, tools=tools, **kwargs)
