"""The byte-level BPE tokenizer that a GGUF file describes in its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.loader.tokenizer import Tokenizer

# The kinds of token, as the format numbers them.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """Split each digit off as a word; the rest like GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


#: How text is cut into words before merging, by the name in ``tokenizer.ggml.pre``.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "llama-bpe": _llama3,
}


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Rebuild the tokenizer; ModelLoadError for a kind that is not byte-level BPE, naming the known ones."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelLoadError(
            f"{source}: tokenizer model {kind!r} is not supported; known: gpt2 (byte-level BPE). "
            "Use the model's Hugging Face folder with its tokenizer.json."
        )
    cut = metadata.get("tokenizer.ggml.pre", "default")
    if cut not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{source}: pre-tokenizer {cut!r} is not known; known: {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder with its tokenizer.json."
        )
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    except KeyError as missing:
        raise ModelLoadError(f"{source}: the metadata lacks {missing}") from missing
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            # Llama 3 encodes a word of the vocabulary as one token, even if the merges do not lead to it.
            ignore_merges=cut == "llama-bpe",
        )
    )
    backend.pre_tokenizer = PRE_TOKENIZERS[cut]()
    backend.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    backend.add_special_tokens(_added(tokens, kinds, _CONTROL))
    backend.add_tokens(_added(tokens, kinds, _USER_DEFINED))
    named = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    if metadata.get("tokenizer.ggml.add_bos_token", cut == "llama-bpe") and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])],
        )
    return Tokenizer(backend, chat_template=metadata.get("tokenizer.chat_template"), template_tokens=named)


def _added(tokens: list[str], kinds: list[int], kind: int) -> list[tokenizers.AddedToken]:
    """Tokens that are found in the text before anything else is cut; in the order of their ids."""
    return [
        tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, its_kind in zip(tokens, kinds)
        if its_kind == kind
    ]
