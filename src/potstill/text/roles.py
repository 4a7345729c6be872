"""What special tokens are for, by the names that published vocabularies give them and by what a tokenizer says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A role's place is its turn when two vocabularies are paired: what ends a text matters most, and in some it begins one too.
NAMES: dict[str, tuple[str, ...]] = {
    "eos": ("</s>", "<eos>", "<|eos|>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|END_OF_TEXT_TOKEN|>"),
    "end_of_turn": (
        "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|EOT|>", "<end_of_turn>", "<|end|>", "<|END_OF_TURN_TOKEN|>", "<turn|>",
    ),
    "bos": ("<s>", "<bos>", "<|bos|>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "<BOS_TOKEN>"),
    "start_of_turn": (
        "<|im_start|>", "<|start_header_id|>", "<|header_start|>", "<start_of_turn>", "<|start|>",
        "<|START_OF_TURN_TOKEN|>", "<|turn>",
    ),
    "end_of_header": ("<|end_header_id|>", "<|header_end|>", "<|im_sep|>", "<|message|>"),
    "user": ("<|user|>", "<｜User｜>", "<|USER_TOKEN|>", "<|im_user|>"),
    "assistant": ("<|assistant|>", "<｜Assistant｜>", "<|CHATBOT_TOKEN|>", "<|im_assistant|>"),
    "system": ("<|system|>", "<|SYSTEM_TOKEN|>", "<|im_system|>", "[SYSTEM_PROMPT]"),
    "end_of_message": ("<|eom_id|>", "<|eom|>"),
    "start_of_instruction": ("[INST]",),
    "end_of_instruction": ("[/INST]",),
    "image": ("<image>", "<|image|>", "<|image_pad|>", "<image_soft_token>", "[IMG]"),
    "image_start": ("<|vision_start|>", "<start_of_image>", "<|image_start|>"),
    "image_end": ("<|vision_end|>", "<end_of_image>", "<|image_end|>", "[IMG_END]"),
    "video": ("<video>", "<|video|>", "<|video_pad|>"),
    "audio": ("<audio>", "<|audio|>", "<|audio_pad|>", "<audio_soft_token>", "[AUDIO]"),
    "fim_prefix": ("<|fim_prefix|>", "<fim_prefix>", "<｜fim▁begin｜>", "<|fim_begin|>", "[PREFIX]"),
    "fim_middle": ("<|fim_middle|>", "<fim_middle>", "<｜fim▁hole｜>", "<|fim_hole|>", "[MIDDLE]"),
    "fim_suffix": ("<|fim_suffix|>", "<fim_suffix>", "<｜fim▁end｜>", "<|fim_end|>", "[SUFFIX]"),
    "repository": ("<|repo_name|>", "<repo_name>", "<reponame>"),
    "file": ("<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    "tool_call": ("<tool_call>", "<|tool_call|>", "<｜tool▁call▁begin｜>", "[TOOL_CALLS]", "<|python_tag|>"),
    "thought": ("<think>", "<|think|>", "[THINK]"),
    "end_of_thought": ("</think>", "<|/think|>", "[/THINK]"),
    "cls": ("[CLS]", "<cls>"),
    "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<｜▁pad▁｜>", "<|finetune_right_pad_id|>", "<|PAD_TOKEN|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>", "<UNK>"),
}  # fmt: skip
_BY_NAME = {name: role for role, names in NAMES.items() for name in names}

# Often given to a token that has another task already (pad = eos): no reason to pair it with another tokenizer's pad.
SECONDARY = ("pad", "unk")


def roles_of(
    specials: Mapping[int, str], declared: Mapping[str, str], post_processor: Mapping[str, Any] | None
) -> dict[str, tuple[int, ...]]:
    """Role → ids: what the tokenizer declares (`bos` …) before what names suggest. A special that nobody knows has its own
    content as its role, so that the same token of another vocabulary is found."""
    by_content = {content: index for index, content in sorted(specials.items(), reverse=True)}
    found: dict[str, list[int]] = {}

    def give(role: str, index: int) -> None:
        ids = found.setdefault(role, [])
        if index not in ids:
            ids.append(index)

    for role, content in declared.items():
        if content in by_content:
            give(role, by_content[content])
    before, after = _around(post_processor)
    for role, contents in (("bos", before), ("eos", after)):
        for content in contents:
            if content in by_content and _BY_NAME.get(content) not in ("cls", "sep"):
                give(role, by_content[content])
    for index, content in sorted(specials.items()):
        if content in _BY_NAME:
            give(_BY_NAME[content], index)
    known = {index for ids in found.values() for index in ids}
    for index, content in sorted(specials.items()):
        if index not in known:
            give(content, index)
    order = [*(role for role in NAMES if role in found), *(role for role in found if role not in NAMES)]
    return {role: tuple(found[role]) for role in order}


def _around(processor: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """The special tokens that a tokenizer puts directly before and after a text of its own accord."""
    if processor is None:
        return [], []
    if processor["type"] == "Sequence":
        inner = [_around(each) for each in processor["processors"]]
        return [c for before, _ in inner for c in before], [c for _, after in inner for c in after]
    if processor["type"] != "TemplateProcessing":
        return [], []
    single = processor["single"]
    text = next((at for at, piece in enumerate(single) if "Sequence" in piece), len(single))
    names = [piece["SpecialToken"]["id"] if "SpecialToken" in piece else None for piece in single]
    return [n for n in names[:text][:1] if n], [n for n in names[text + 1 :][-1:] if n]


def pairing_roles(special: Mapping[str, tuple[int, ...]]) -> dict[int, set[str]]:
    """Id → the roles by which it may be paired with a token of another vocabulary."""
    roles: dict[int, set[str]] = {}
    for role, ids in special.items():
        for index in ids:
            roles.setdefault(index, set()).add(role)
    return {index: named.difference(SECONDARY) or named for index, named in roles.items()}
