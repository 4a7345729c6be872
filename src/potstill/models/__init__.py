"""Causal language models: hidden states and a head, loaded, probed, and with tokenizers that were checked."""

from potstill.models.language_model import LanguageModel, backbone, compile_layers, evaluating, hidden_states
from potstill.models.libraries import quiet
from potstill.models.loading import check_fit, keep_layers, load_student, load_student_tokenizer, load_teacher
from potstill.models.tokenizer import difference, load_tokenizer, same_tokenizer, shared_ids

__all__ = [
    "LanguageModel",
    "backbone",
    "check_fit",
    "compile_layers",
    "difference",
    "evaluating",
    "hidden_states",
    "keep_layers",
    "load_student",
    "load_student_tokenizer",
    "load_teacher",
    "load_tokenizer",
    "quiet",
    "same_tokenizer",
    "shared_ids",
]
