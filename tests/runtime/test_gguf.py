"""GGUF files: written with the gguf package, read back as the Hugging Face folder they came from."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.loader.checkpoint import Checkpoint, open_checkpoint
from sgl_aspects.runtime.loader.gguf_reader import GGUFReader
from sgl_aspects.runtime.loader.model_config import RopeConfig
from sgl_aspects.runtime.ops.rotary import inverse_frequencies
from tests.support.tiny_models import CHAT_TEMPLATE, make_llama, make_tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, number, inner = stem.split(".", 3)
        return f"blk.{number}.{NAMES[inner]}.{ending}"
    return f"{NAMES[stem]}.{ending}"


def permuted(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Like llama.cpp's converter: the two halves of each head's rows interleaved."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.asarray(halves.swapaxes(1, 2).reshape(array.shape))


def write_gguf(
    path: Path,
    model: Any,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    changes: dict[str, Any] | None = None,
    rope_factors: list[float] | None = None,
) -> None:
    config, tokenizer = model.config, make_tokenizer()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    values: dict[str, Any] = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **(changes or {}),
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if ".q_proj." in name:
            array = permuted(array, config.num_attention_heads)
        elif ".k_proj." in name:
            array = permuted(array, config.num_key_value_heads)
        kind = quantization if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(llama_cpp_name(name), gguf.quantize(array, kind), raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_llama(tmp_path_factory.mktemp("llama"), head_dim=32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_a_gguf_file_is_the_folder_it_came_from(tmp_path: Path, kind: str) -> None:
    # Quantized types need rows of whole blocks of 32 numbers.
    model = make_llama(tmp_path / "hf", attention_bias=True, head_dim=32, intermediate_size=128)
    write_gguf(tmp_path / "m.gguf", model, quantization=gguf.GGMLQuantizationType[kind])
    ours, theirs = open_checkpoint(str(tmp_path / "m.gguf")), open_checkpoint(str(tmp_path / "hf"))
    # The file holds this number as float32.
    eps = theirs.config.rms_norm_eps
    assert ours.config.rms_norm_eps == pytest.approx(eps)
    assert dataclasses.replace(ours.config, rms_norm_eps=eps) == theirs.config
    weights = dict(ours.weights())
    expected = dict(theirs.weights())
    assert weights.keys() == expected.keys()
    tolerance = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2, "Q4_1": 0.15}[kind]
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance, msg=name)
    text = "the lazy Füchse\n12 <|start|>x<|end|> 🙂🚀"
    assert ours.load_tokenizer().encode(text) == theirs.load_tokenizer().encode(text)
    assert ours.load_tokenizer().chat_template == CHAT_TEMPLATE


def test_rope_factors_and_begin_token_are_taken_over(model: Any, tmp_path: Path) -> None:
    factors = [1.0 + i for i in range(16)]
    write_gguf(
        tmp_path / "m.gguf",
        model,
        rope_factors=factors,
        changes={
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eot_token_id": 1,
        },
    )
    checkpoint = open_checkpoint(str(tmp_path))  # a folder with one GGUF file
    plain = inverse_frequencies(RopeConfig(theta=10000.0), 32)
    assert torch.allclose(inverse_frequencies(checkpoint.config.rope, 32), plain / torch.tensor(factors))
    assert "rope_freqs.weight" not in dict(checkpoint.weights())
    assert checkpoint.config.eos_token_ids == (2, 1)
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer.encode("x")[0] == 0
    assert tokenizer.encode("x", add_special_tokens=False)[0] != 0


def read_all(checkpoint: Checkpoint) -> None:
    assert checkpoint.config
    checkpoint.load_tokenizer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.embedding_length": None}, "metadata lacks llama.embedding_length"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported; known: gpt2"),
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon' is not known; known: default, gpt-2, smollm"),
        ({"llama.block_count": "three"}, "num_hidden_layers='three': a whole number is needed"),
        ({"llama.attention.head_count": 0}, "wrong type|at least 1 is needed"),
        ({"general.alignment": 0}, "damaged or cut short in its header"),
        ({"general.alignment": "wide"}, "damaged or cut short in its header"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "tokenizer cannot be made"),
        ({"tokenizer.ggml.unknown_token_id": "<unk>"}, "tokenizer cannot be made"),
    ],
)
def test_metadata_that_cannot_be_served(
    model: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", model, changes=changes)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_all(checkpoint)
    assert "m.gguf" in str(caught.value)


def test_another_architecture_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="'mamba' is not supported; known: llama"):
        assert open_checkpoint(str(tmp_path)).config


def test_a_file_cut_anywhere_is_a_load_error(model: Any, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, model)
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 2000, 37), *range(2000, len(data) - 1, len(data) // 23)]:
        cut.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            assert open_checkpoint(str(cut)).config


def test_arrays_in_arrays_without_end_are_a_load_error(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 9)
    file.write_bytes(header + struct.pack("<IQ", 9, 1) * 100_000)
    with pytest.raises(ModelLoadError, match=r"m\.gguf is damaged"):
        assert open_checkpoint(str(file)).config


def test_a_tensor_with_part_of_a_block_is_a_load_error(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    kind = gguf.GGMLQuantizationType.Q4_1  # in blocks of 32 numbers
    tensor = struct.pack("<Q1sIQQIQ", 1, b"t", 2, 5, 3, kind, 0)
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + tensor + bytes(200))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 't' of type Q4_1 and shape \[3, 5\]"):
        GGUFReader(file).read_tensor("t")
