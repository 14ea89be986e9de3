"""A GGUF file as a Hugging Face checkpoint: config, tokenizer and weights rebuilt from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.loader.checkpoint import Checkpoint
from sgl_aspects.runtime.loader.gguf_reader import GGUFReader
from sgl_aspects.runtime.loader.gguf_tokenizer import build_tokenizer
from sgl_aspects.runtime.loader.model_config import ModelConfig, RopeConfig
from sgl_aspects.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

#: llama.cpp's name of an architecture to the name in config.json.
ARCHITECTURES = {"llama": "LlamaForCausalLM"}

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

    def read_config(self) -> ModelConfig:
        metadata = self.reader.metadata
        name = self._required("general.architecture")
        if name not in ARCHITECTURES:
            raise ModelLoadError(
                f"{self.path}: GGUF architecture {name!r} is not known to this engine; "
                f"it knows {', '.join(ARCHITECTURES)}"
            )
        if metadata.get(f"{name}.expert_count", 0):
            raise ModelLoadError(f"{self.path}: {name} with experts is not supported")
        hidden_size = self._required(f"{name}.embedding_length")
        heads = self._required(f"{name}.attention.head_count")
        context_length = self._required(f"{name}.context_length")
        tensors = self.reader.tensors
        return ModelConfig(
            architecture=ARCHITECTURES[name],
            vocab_size=len(self._required("tokenizer.ggml.tokens")),
            hidden_size=hidden_size,
            intermediate_size=self._required(f"{name}.feed_forward_length"),
            num_layers=self._required(f"{name}.block_count"),
            num_heads=heads,
            num_kv_heads=metadata.get(f"{name}.attention.head_count_kv", heads),
            head_dim=metadata.get(f"{name}.attention.key_length", hidden_size // heads),
            context_length=context_length,
            rms_norm_eps=self._required(f"{name}.attention.layer_norm_rms_epsilon"),
            dtype="float32",
            rope=self._rope(name, context_length),
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            attention_output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            eos_token_ids=tuple(
                dict.fromkeys(  # in order, each once
                    metadata[key]
                    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
                    if key in metadata
                )
            ),
        )

    def load_tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.reader.metadata, str(self.path))

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
            # Unquantized tensors are still the read-only file: torch wants memory of its own.
            yield hugging_face_name(name), torch.from_numpy(np.require(array, requirements=["C", "W"]))

    def _rope(self, name: str, context_length: int) -> RopeConfig:
        metadata = self.reader.metadata
        scaling = metadata.get(f"{name}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelLoadError(
                f"{self.path}: rope scaling {scaling!r} is not supported in GGUF; known: none, linear"
            )
        factors: tuple[float, ...] = ()
        if _ROPE_FACTORS in self.reader.tensors:
            factors = tuple(self.reader.read_tensor(_ROPE_FACTORS).tolist())
        return RopeConfig(
            theta=metadata.get(f"{name}.rope.freq_base", 10000.0),
            scaling="linear" if scaling == "linear" else "default",
            factor=metadata.get(f"{name}.rope.scaling.factor", 1.0),
            original_context_length=context_length,
            frequency_divisors=factors,
        )

    def _required(self, key: str) -> Any:
        try:
            return self.reader.metadata[key]
        except KeyError:
            raise ModelLoadError(f"{self.path}: the metadata lacks {key}") from None


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
