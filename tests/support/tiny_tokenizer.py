"""A tokenizer whose ids a test can write down: byte b is id FIRST + b, unless merges are given."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, START, END = range(4)
FIRST = 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + rest.index(b)) for b in range(256)]


def tiny_tokenizer(
    *,
    bos: bool = True,
    eos: bool = False,
    pad: str | None = None,
    merges: Sequence[tuple[str, str]] = (),
    trim_offsets: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerFast:
    letters = byte_letters()
    tokens = [*SPECIALS, *letters, *(a + b for a, b in merges)]
    core = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    around = f"{'<|bos|> ' if bos else ''}$A{' <|eos|>' if eos else ''}"
    template = processors.TemplateProcessing(single=around, special_tokens=[("<|bos|>", BOS), ("<|eos|>", EOS)])
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim_offsets), template])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token=pad,
        additional_special_tokens=SPECIALS[2:],
        chat_template=chat_template,
    )


def ids(text: str) -> list[int]:
    """What a tokenizer without merges makes of text in which the specials stand by name."""
    for number, special in enumerate(SPECIALS):
        text = text.replace(special, chr(0xE000 + number))
    found: list[int] = []
    for character in text:
        found.extend(
            [ord(character) - 0xE000] if "\ue000" <= character <= "\ue003" else [FIRST + b for b in character.encode()]
        )
    return found
