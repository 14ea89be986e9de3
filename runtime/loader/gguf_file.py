"""A GGUF file as a Hugging Face checkpoint: config, tokenizer and weights rebuilt from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.loader.checkpoint import Checkpoint
from sgl_aspects.runtime.loader.gguf_reader import GGUFReader
from sgl_aspects.runtime.loader.gguf_tokenizer import build_tokenizer
from sgl_aspects.runtime.loader.hf_config import config_from_hugging_face
from sgl_aspects.runtime.loader.model_config import ModelConfig
from sgl_aspects.runtime.loader.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

#: llama.cpp's name of an architecture to the name in config.json.
ARCHITECTURES = {"llama": "LlamaForCausalLM"}

#: config.json's keys to llama.cpp's, after the architecture's name; the second are not in every file.
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_MORE_KEYS = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
#: llama.cpp's names to Hugging Face's. Both endings, .weight and .bias, stay as they are.
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Divisors of the rotary frequencies (Llama 3.1 and later): part of the config here.
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint(Checkpoint):
    @cached_property
    def reader(self) -> GGUFReader:
        return GGUFReader(self.path)

    @cached_property
    def config(self) -> ModelConfig:
        metadata = self.reader.metadata
        name = self._required("general.architecture", str)
        if name not in ARCHITECTURES:
            raise ModelLoadError(
                f"{self.path}: GGUF architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}"
            )
        if metadata.get(f"{name}.expert_count", 0):
            raise ModelLoadError(f"{self.path}: {name} with experts is not supported")
        scaling = metadata.get(f"{name}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelLoadError(
                f"{self.path}: rope scaling {scaling!r} is not supported in GGUF; known: none, linear"
            )
        tensors = self.reader.tensors
        ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        raw = {
            "architectures": [ARCHITECTURES[name]],
            "vocab_size": len(self._required("tokenizer.ggml.tokens", list)),
            **{key: self._required(f"{name}.{gguf_key}") for key, gguf_key in _KEYS.items()},
            **{key: metadata.get(f"{name}.{gguf_key}") for key, gguf_key in _MORE_KEYS.items()},
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "eos_token_id": [metadata[end] for end in ends if end in metadata],
        }
        if scaling == "linear":
            raw["rope_scaling"] = {"type": scaling, "factor": metadata.get(f"{name}.rope.scaling.factor")}
        config = config_from_hugging_face(raw, {}, str(self.path))
        rope = config.rope
        if _ROPE_FACTORS in tensors:
            rope = replace(rope, frequency_divisors=tuple(self.reader.read_tensor(_ROPE_FACTORS).tolist()))
        return replace(config, rope=rope, attention_output_bias="blk.0.attn_output.bias" in tensors)

    def load_tokenizer(self) -> Tokenizer:
        try:
            return build_tokenizer(self.reader.metadata, str(self.path))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelLoadError(
                f"{self.path}: the tokenizer cannot be made of the metadata: {error}"
            ) from error

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for name in self.reader.tensors:
            if name == _ROPE_FACTORS:
                continue
            array = self.reader.read_tensor(name)
            if ".attn_q." in name:
                array = _undo_row_permutation(array, self.config.num_heads)
            elif ".attn_k." in name:
                array = _undo_row_permutation(array, self.config.num_kv_heads)
            # Unquantized tensors are still the read-only file: torch needs memory of its own.
            yield hugging_face_name(name), torch.from_numpy(np.require(array, requirements=["C", "W"]))

    def _required(self, key: str, kind: type = object) -> Any:
        value = self.reader.metadata.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path}: the metadata lacks {key}")
        if not isinstance(value, kind):
            raise ModelLoadError(f"{self.path}: {key} is {value!r}, no {kind.__name__}")
        return value


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``; unknown names stay."""
    stem, _, ending = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{ending}"
    return f"{_TOP_NAMES[stem]}.{ending}" if stem in _TOP_NAMES else name


def _undo_row_permutation(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp rotates neighbouring rows of a head (0, 1), Hugging Face's layout the halves (0, d/2).

    Its converter interleaved the halves of each head's rows; this puts them back. Works on weights
    [rows, columns] and biases [rows].
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    undone: npt.NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(array.shape)
    return undone
