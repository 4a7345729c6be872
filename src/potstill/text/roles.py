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
    said = (*declared.items(), *_around(post_processor))
    given = [(role, by_content[content]) for role, content in said if content in by_content]
    given += [(_BY_NAME[content], index) for index, content in sorted(specials.items()) if content in _BY_NAME]
    known = {index for _, index in given}
    given += [(content, index) for index, content in sorted(specials.items()) if index not in known]
    found: dict[str, dict[int, None]] = {role: {} for role in NAMES}  # in this order, each id once
    for role, index in given:
        found.setdefault(role, {})[index] = None
    return {role: tuple(ids) for role, ids in found.items() if ids}


def _around(processor: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The special tokens that a tokenizer puts directly before (bos) and after (eos) a text of its own accord."""
    if processor is None:
        return []
    if processor["type"] == "Sequence":
        return [said for each in processor["processors"] for said in _around(each)]
    if processor["type"] != "TemplateProcessing":
        return []
    names = [piece.get("SpecialToken", {}).get("id") for piece in processor["single"]]  # None: the text
    text = names.index(None) if None in names else len(names)
    said = [("bos", name) for name in names[:text][:1]] + [("eos", name) for name in names[text + 1 :][-1:]]
    return [(role, name) for role, name in said if name and _BY_NAME.get(name) not in ("cls", "sep")]


def pairing_roles(special: Mapping[str, tuple[int, ...]]) -> dict[int, set[str]]:
    """Id → the roles by which it may be paired with a token of another vocabulary."""
    roles: dict[int, set[str]] = {}
    for role, ids in special.items():
        for index in ids:
            roles.setdefault(index, set()).add(role)
    return {index: named.difference(SECONDARY) or named for index, named in roles.items()}
