"""Text written token by token with transformers, against the same model read all at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import CPU, LLAMA, TOKENIZER, tiny
from transformers import LlamaModel

from potstill.config import SamplingConfig, StudentConfig
from potstill.losses.dense import target_logits
from potstill.models import load_student
from potstill.rollouts.engine import GenerationRequest
from potstill.rollouts.sampling import drawn_from
from potstill.rollouts.transformers import TransformersEngine
from potstill.types import PotstillError

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}  # learnt positions
SLIDING = {"model_type": "mistral", "sliding_window": 6}
PROMPTS = [np.arange(5, 5 + n, dtype=np.int32) * 3 for n in (3, 9, 1, 9, 14)]


def asks(*numbers: int, seed: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(PROMPTS[i], seed * 100 + place) for place, i in enumerate(numbers)]


def engine(model, sampling=None, stop_ids=(), **keys) -> TransformersEngine:
    keys_of = {"max_new_tokens": 12} | (sampling or {})
    return TransformersEngine(model, SamplingConfig(**keys_of), stop_ids=stop_ids, **keys)


@torch.no_grad()
def logits_after(model, prompt, ids) -> torch.Tensor:
    """[C, V]: what the model says at each token of an answer, from one pass over the whole text."""
    whole = torch.from_numpy(np.concatenate([prompt, ids])[None].astype(np.int64))
    model.model.eval()
    hidden = model.model.base_model(input_ids=whole, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    return target_logits(model.at_rows(hidden, len(model.tokenizer)), slice(None))


@pytest.mark.parametrize(
    "changes", [{}, SLIDING, {"num_key_value_heads": 1}, GPT2], ids=["llama", "sliding", "gqa", "gpt2"]
)
def test_greedy_text_is_the_models_own(changes) -> None:
    config = changes if changes is GPT2 else {**LLAMA, **changes}
    model = load_student(StudentConfig(config=config, tokenizer=TOKENIZER), CPU, 0)
    written = engine(model, {"temperature": 0.0}).generate(asks(0, 1, 2, 3, 4))
    for ask, text in zip(asks(0, 1, 2, 3, 4), written, strict=True):
        expected = logits_after(model, ask.ids, text.ids).argmax(-1)
        assert text.ids.tolist() == expected.tolist() and len(text.ids) == 12 and text.end == "length"
        assert not text.logprobs.any()


@pytest.mark.parametrize(
    "keys", [{}, {"temperature": 0.6}, {"top_k": 20}, {"top_p": 0.5, "min_p": 0.05, "temperature": 1.3}], ids=str
)
def test_the_log_probabilities_are_those_the_tokens_were_drawn_with(keys) -> None:
    model = tiny()
    sampling = SamplingConfig(max_new_tokens=12, **keys)
    for ask, text in zip(asks(0, 1, 3), engine(model, keys).generate(asks(0, 1, 3)), strict=True):
        logp = drawn_from(logits_after(model, ask.ids, text.ids), sampling)
        expected = logp.gather(-1, torch.from_numpy(text.ids.astype(np.int64))[:, None]).squeeze(-1)
        np.testing.assert_allclose(text.logprobs, expected, atol=1e-5)


def test_a_text_depends_on_its_prompt_and_seed_not_on_its_neighbours() -> None:
    model = tiny()
    together = engine(model).generate(asks(4, 0, 1, 3, 1))
    for place, i in enumerate((4, 0, 1, 3, 1)):
        (alone,) = engine(model).generate([GenerationRequest(PROMPTS[i], place)])
        assert alone.ids.tolist() == together[place].ids.tolist()
    turns = engine(model, batch_size=2).generate(asks(4, 0, 1, 3, 1))
    assert [t.ids.tolist() for t in turns] == [t.ids.tolist() for t in together]
    assert together[2].ids.tolist() != together[4].ids.tolist()  # one prompt, two seeds


def test_several_ids_end_a_text_and_the_first_one_is_its_last() -> None:
    model = tiny()
    free = engine(model, {"max_new_tokens": 30}).generate(asks(0, 1, 3, 4))
    stops = (int(free[0].ids[4]), int(free[1].ids[9]))
    ended = engine(model, {"max_new_tokens": 30}, stop_ids=stops).generate(asks(0, 1, 3, 4))
    for before, after in zip(free, ended, strict=True):
        hits = np.flatnonzero(np.isin(before.ids, stops))
        length = int(hits[0]) + 1 if len(hits) else 30
        assert after.ids.tolist() == before.ids[:length].tolist()
        assert after.end == ("eos" if len(hits) else "length")
        np.testing.assert_allclose(after.logprobs, before.logprobs[:length], atol=1e-5)
    assert len(ended[0].ids) <= 5 and len(ended[1].ids) <= 10


def test_a_text_that_stops_another_ends_it_at_the_token_that_completes_it() -> None:
    model = tiny()
    (free,) = engine(model, {"max_new_tokens": 20}).generate(asks(1))
    decode = model.tokenizer.decode
    stop = next(decode(free.ids[i : i + 2]) for i in range(3, 18) if len(decode(free.ids[i : i + 2]).strip("�")) > 3)
    length = next(n for n in range(1, 21) if stop in decode(free.ids[:n]))
    (text,) = engine(model, {"max_new_tokens": 20, "stop": ["not there", stop]}).generate(asks(1))
    assert text.end == "stop" and text.ids.tolist() == free.ids[:length].tolist()


def test_padding_ids_of_the_head_are_never_written() -> None:
    model = tiny(vocab_size=4096)
    with torch.no_grad():  # the ids that no token has are the likeliest by far
        model.model.get_input_embeddings().weight[len(model.tokenizer) :] *= 50
    assert all(text.ids.max() < len(model.tokenizer) for text in engine(model).generate(asks(0, 1, 4)))


def test_a_copy_writes_with_the_weights_of_its_last_update_and_the_model_itself_with_the_newest() -> None:
    model = tiny(attention_dropout=0.5)
    model.model.train()
    own, copied = engine(model), engine(model, copies=True)
    before = [t.ids.tolist() for t in own.generate(asks(0, 1))]
    assert [t.ids.tolist() for t in copied.generate(asks(0, 1))] == before
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    after = [t.ids.tolist() for t in own.generate(asks(0, 1))]
    assert after != before
    assert [t.ids.tolist() for t in copied.generate(asks(0, 1))] == before
    copied.update(3)
    assert [t.ids.tolist() for t in copied.generate(asks(0, 1))] == after and copied.version == 3
    assert model.model.training  # dropout was off while it wrote, and is on again


def test_a_model_that_forgets_what_it_read_reads_it_again_for_every_token(monkeypatch) -> None:
    forward = LlamaModel.forward

    def forgetful(self, *args, past_key_values=None, attention_mask=None, **keys):
        return forward(self, *args, **keys)

    model = tiny()
    before = engine(model).generate(asks(0, 1, 1))
    monkeypatch.setattr(LlamaModel, "forward", forgetful)
    slow = engine(model)
    assert slow.notes == [
        "rollouts.engine: the student (llama) writes more slowly than others: the whole text is read again for every token"
    ]
    for text, expected in zip(slow.generate(asks(0, 1, 1)), before, strict=True):
        assert text.ids.tolist() == expected.ids.tolist()
        np.testing.assert_allclose(text.logprobs, expected.logprobs, atol=1e-5)


def test_a_model_whose_rows_see_each_other_is_refused(monkeypatch) -> None:
    forward = LlamaModel.forward

    def mixing(self, *args, **keys):
        out = forward(self, *args, **keys)
        out.last_hidden_state = out.last_hidden_state + 0.2 * out.last_hidden_state.mean(0)
        return out

    model = tiny()
    monkeypatch.setattr(LlamaModel, "forward", mixing)
    with pytest.raises(
        PotstillError,
        match=r"the student \(llama\) cannot write text with transformers here \(what it writes token by token is not what it "
        r"says of the whole text, by 0\.\d+ nats\): choose rollouts.engine.kind: vllm",
    ):
        engine(model)


def test_a_special_token_can_be_a_stop_text() -> None:
    model = tiny()
    mark = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():  # the likeliest of all, after a while
        model.model.get_output_embeddings().weight[mark] *= 40
    written = engine(model, {"max_new_tokens": 40, "stop": ["<|im_end|>"]}).generate(asks(0, 1, 3, 4))
    hit = [text for text in written if mark in text.ids.tolist()]
    assert hit and all(text.end == "stop" and text.ids.tolist().index(mark) == len(text.ids) - 1 for text in hit)
