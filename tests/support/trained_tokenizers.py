"""Small tokenizers of every family, trained on the shipped text in a second or so, real ones where they are, and nasty text."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pyarrow.parquet as parquet
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from potstill.shipped import FOLDER
from potstill.text import TokenTable

ASSETS = Path(os.environ.get("POTSTILL_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
REAL = ("deepseek_v3", "gpt2", "mistral_7b_v0_1", "phi-4", "qwen3", "smollm2")

NASTY = {
    "empty": "",
    "one letter": "a",
    "ascii": "The quick brown fox jumps over the lazy dog; 'tis 1,234.56 and can't be 0x7f.",
    "spaces": "  two   three    four\u00a0no-break\u2003em \n\n\n  \t\tend  ",
    "tabs": "def f(x):\n\tif x:\n\t\treturn x\n\n\treturn None\n",
    "crlf": "one\r\ntwo\r\n\r\nthree\rfour\n",
    "numbers": "201 2024 3.14159 1e-9 0001 ١٢٣ ४५६ 9999999999999",
    "nul": "a\x00b\x01c\x7fd\x1b[0m",
    "planes": "\u0100\u0950\u4e00\uac00\ue000\ufffd \U00010348\U0001d54f\U0001f600\U00020000\U0003134a\U000e0041\U0010fffd",
    "combining": "e\u0301 a\u030a\u0323 o\u0302\u0301 Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d n\u0303 caf\u00e9",
    "right to left": "\u200fמה שלומך؟ مرحبا بالعالم\u200e 12 abc שלום",
    "cjk": "日本語の文章です。中文字符測試，한국어 문장。ｆｕｌｌ ｗｉｄｔｈ",
    "devanagari": "सभी मनुष्यों को गौरव और अधिकारों के मामले में क़ ख़ ड़ ज़",
    "thai and tamil": "มนุษย์ทั้งหลาย எல்லா மனிதரும் སྐྱེས",
    "emoji": "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇨🇭🇯🇵 ☺️ 1️⃣",
    "code": "for (int i=0;i<n;++i){a[i]^=b[i]>>3;} // ünïcode\n_init = __init__ + ' init'\\n\n",
    "sentencepiece's own": "a literal ▁ and <0x0A> and Ġ and ## and </w>",
    "compatibility": "ﬁ Å ℃ Ⅳ ① ㎏ ½ ſ",
}  # fmt: skip


@cache
def shipped_text() -> tuple[str, ...]:
    texts = parquet.read_table(FOLDER / "corpus" / "heldout.parquet", columns=["text"])["text"].to_pylist()
    return tuple(text[at : at + 500] for text in texts for at in range(0, 12_000, 500))


def _train(tokenizer: tokenizers.Tokenizer, trainer: trainers.Trainer) -> tokenizers.Tokenizer:
    tokenizer.train_from_iterator([*shipped_text(), *list(NASTY.values())[:8]], trainer)
    return tokenizer


def _byte_level(
    normalizer: normalizers.Normalizer | None = None, prefix: bool = False, size: int = 700
) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _train(
        made,
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=specials, show_progress=False),
    )


def _pieces(dummy: bool) -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral (with a dummy prefix) and Gemma (without) are."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = [normalizers.Prepend("▁")] if dummy else []
    made.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if dummy else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("▁?[^▁]+|▁"), "isolated")
    _train(made, trainers.BpeTrainer(vocab_size=800, special_tokens=specials, limit_alphabet=90, show_progress=False))
    return _only_special(made, ("<unk>", "<s>", "</s>"), bos="<s>")


def _only_special(made: tokenizers.Tokenizer, names: tuple[str, ...], bos: str) -> tokenizers.Tokenizer:
    """Trainers make every token special that they are told to keep; the fallbacks for bytes are not."""
    import json

    spec = json.loads(made.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in names]
    spec["pre_tokenizer"] = None
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made


def _unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return _train(
        made,
        trainers.UnigramTrainer(
            vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )


def _word_piece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.BertNormalizer(strip_accents=False, lowercase=True)]
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    return _train(made, trainers.WordPieceTrainer(vocab_size=900, special_tokens=specials, show_progress=False))


MAKERS = {
    "bytes": lambda: _byte_level(),
    "more bytes": lambda: _byte_level(size=1500),
    "bytes, spaced": lambda: _byte_level(prefix=True),
    "bytes, NFC": lambda: _byte_level(normalizers.NFC()),
    "bytes, lower case": lambda: _byte_level(
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), size=1100
    ),
    "pieces": lambda: _pieces(dummy=True),
    "pieces, no prefix": lambda: _pieces(dummy=False),
    "unigram": _unigram,
    "word pieces": _word_piece,
}
KEEP_TEXT = ("bytes", "more bytes", "pieces", "pieces, no prefix")  # every text comes back as it was


@cache
def trained(name: str) -> tokenizers.Tokenizer:
    return MAKERS[name]()


@cache
def real(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizers" / name / "tokenizer.json"))


@cache
def table(name: str) -> TokenTable:
    return TokenTable.from_tokenizer(real(name) if name in REAL else trained(name), cache=None)


def tokenizer(name: str) -> tokenizers.Tokenizer:
    return real(name) if name in REAL else trained(name)
