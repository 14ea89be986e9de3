"""The engine's parts, one by one."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_aspects.errors import ConfigError, InvalidRequestError, ModelLoadError
from sgl_aspects.runtime import SamplingParams, ServerArgs
from sgl_aspects.runtime.frontend.text_stream import IncrementalDecoder, StopTexts
from sgl_aspects.runtime.kv_cache import (
    MLATokenPool,
    NSATokenPool,
    PagedAllocator,
    ReqToTokenPool,
    token_bytes,
)
from sgl_aspects.runtime.loader.hf_config import config_from_hugging_face
from sgl_aspects.runtime.loader.hf_folder import HuggingFaceCheckpoint
from sgl_aspects.runtime.loader.model_config import RopeConfig
from sgl_aspects.runtime.loader.tokenizer import Tokenizer
from sgl_aspects.runtime.sampling.sampler import Sampler
from tests.support.tiny_models import make_tokenizer

CPU = torch.device("cpu")
TOKENIZER = Tokenizer(make_tokenizer())


# -- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_path": ""}, "model_path=''"),
        ({"model_path": None}, "model_path=None"),
        ({"dtype": "int8"}, "dtype='int8': choose one of auto, float32, bfloat16, float16"),
        ({"page_size": 0}, "page_size=0: write a whole number of at least 1"),
        ({"chunked_prefill_size": 1.5}, "chunked_prefill_size=1.5"),
        ({"max_running_requests": True}, "max_running_requests=True"),
        ({"context_length": -1}, "context_length=-1"),
        ({"max_total_tokens": 8}, "max_total_tokens=8 is less than one page of 16 tokens"),
        ({"mem_fraction": 1.0}, "mem_fraction=1.0: write a share between 0 and 1"),
        ({"startup_timeout": 0}, "startup_timeout=0"),
        ({"startup_timeout": float("nan")}, "startup_timeout=nan"),
        ({"compile": "no"}, "compile='no': write True or False"),
        ({"random_seed": "x"}, "random_seed='x'"),
        (
            {"random_seed": 2**64},
            "random_seed=18446744073709551616: write a whole number of 64 bits, or None",
        ),
    ],
)
def test_settings_out_of_range_are_config_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerArgs(**{"model_path": "somewhere", **fields})


def test_a_model_is_served_under_its_folders_name_by_default() -> None:
    assert ServerArgs("/models/tiny/").served_model_name == "tiny"
    assert ServerArgs("/models/tiny", served_model_name="mine").served_model_name == "mine"


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
DEEPSEEK_V3 = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}


def test_keys_that_are_null_are_as_if_they_were_not_there() -> None:
    names = ["num_key_value_heads", "head_dim", "rope_scaling", "dtype", "hidden_act", "eos_token_id"]
    config = config_from_hugging_face(LLAMA | dict.fromkeys(names), {"eos_token_id": None}, "config.json")
    assert config == config_from_hugging_face(LLAMA, {}, "config.json")
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.rope == RopeConfig(original_context_length=2048)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: more than 4096"),
        (DEEPSEEK_V3, {"num_hidden_layers": 10**400}, "num_hidden_layers=10+: more than 4096"),
        (LLAMA, {"num_hidden_layers": 2.5}, "num_hidden_layers=2.5: a whole number is needed"),
        (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings=0: at least 1 is needed"),
        (LLAMA, {"rms_norm_eps": "small"}, "rms_norm_eps='small': a number is needed"),
        (LLAMA, {"rms_norm_eps": 10**400}, "a number is needed"),
        (LLAMA, {"rope_theta": 0}, "rope_theta=0.0, factor=1.0: both must be above 0"),
        (LLAMA, {"rope_theta": float("nan")}, "both must be above 0"),
        (LLAMA, {"rope_scaling": ["yarn"]}, "a value of the wrong type"),
        (LLAMA, {"num_attention_heads": 0}, "a value of the wrong type|at least 1"),
        (QWEN3_MOE, {"mlp_layer_types": ["dense"]}, "a value of the wrong type"),
        (QWEN3_MOE, {"num_experts_per_tok": 7}, "7 of 6 experts cannot be chosen"),
        (QWEN3_MOE, {"num_experts": None}, "lacks the key 'num_experts'"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "a value of the wrong type"),
        (DEEPSEEK_V3, {"n_group": 3}, "8 experts cannot be put into 3 groups"),
        (DEEPSEEK_V3, {"kv_lora_rank": 0}, "kv_lora_rank=0: at least 1 is needed"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 5}, "5 rotated numbers of a head: there must be pairs"),
        (DEEPSEEK_V3, {"architectures": ["DeepseekV32ForCausalLM"]}, "lacks the key 'index_n_heads'"),
    ],
)
def test_configs_that_make_no_sense_are_load_errors(
    model: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    assert config_from_hugging_face(model, {}, "config.json")
    with pytest.raises(ModelLoadError, match=message) as caught:
        config_from_hugging_face(model | changes, {}, "folder/config.json")
    assert "folder/config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b'{"eos_token": {"text": "x"}}'),
        ("tokenizer_config.json", b'{"chat_template": [{"template": "x"}]}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_settings_of_a_tokenizer_that_make_no_sense_are_load_errors(
    tmp_path: Path, file: str, content: bytes
) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match="is invalid"):
        HuggingFaceCheckpoint(tmp_path).load_tokenizer()


# -- text --------------------------------------------------------------------------------------------


def streamed(token_ids: list[int], at_once: int = 1) -> list[str]:
    decoder = IncrementalDecoder(TOKENIZER)
    pieces = [decoder.add(token_ids[i : i + at_once]) for i in range(0, len(token_ids), at_once)]
    return [*pieces, decoder.flush()]


def test_a_character_comes_with_the_last_of_its_tokens() -> None:
    letters = TOKENIZER.backend.get_vocab()
    byte_tokens = [TOKENIZER.encode("aé🙃b")]
    assert "".join(streamed(byte_tokens[0])) == "aé🙃b"
    # The tokenizer has 🙃; an unknown one is cut into its bytes.
    unknown = TOKENIZER.encode("🚀")
    assert len(unknown) > 1
    assert streamed([letters["a"], *unknown, letters["b"]]) == [
        "a",
        *[""] * (len(unknown) - 1),
        "🚀",
        "b",
        "",
    ]


def test_invalid_bytes_do_not_hold_up_the_text_after_them() -> None:
    half = TOKENIZER.encode("🚀")[:1]
    assert streamed([*half, *TOKENIZER.encode("b")]) == ["", "\ufffdb", ""]
    assert streamed([*half, *half]) == ["", "\ufffd", "\ufffd"]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(3, TOKENIZER.backend.get_vocab_size() - 1), max_size=120), st.integers(1, 5))
def test_the_pieces_are_the_text_of_any_tokens(token_ids: list[int], at_once: int) -> None:
    assert "".join(streamed(token_ids, at_once)) == TOKENIZER.decode(token_ids)


@settings(max_examples=80, deadline=None)
@given(st.text("ab<>", max_size=40), st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_texts_cut_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    watch = StopTexts(stops)
    given_out, rest = "", text
    while rest and not watch.found:
        size = data.draw(st.integers(1, len(rest)))
        given_out += watch.add(rest[:size])
        rest = rest[size:]
    if not watch.found:
        assert given_out + watch.flush() == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(given_out)
        assert any(text.startswith(stop, len(given_out)) for stop in stops)
        # Nothing that was given out holds a stop text.
        assert not any(stop in given_out for stop in stops)


def test_a_long_text_becomes_tokens_while_other_threads_go_on() -> None:
    done, turns = threading.Event(), 0

    def encode() -> None:
        TOKENIZER.encode("ab " * 200_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.002):
        turns += 1
    thread.join()
    assert turns > 5


def test_templates_see_their_tokens_and_may_refuse() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.role + ': ' + m.content }}{% if loop.index > 5 %}{% break %}{% endif %}"
        "\n{% endfor %}"
    )
    tokenizer = Tokenizer(make_tokenizer(), chat_template=template, template_tokens={"bos_token": "<|text|>"})
    assert tokenizer.render_chat([{"role": "user", "content": "<b>"}]) == "<|text|>user: <b>"
    with pytest.raises(InvalidRequestError, match="refuses these messages: no tools"):
        tokenizer.render_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        tokenizer.render_chat([{"role": "user", "content": None}])
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        tokenizer.render_chat([{"role": "user"}])
    with pytest.raises(InvalidRequestError, match="no chat template"):
        TOKENIZER.render_chat([{"role": "user", "content": "x"}])
    broken = Tokenizer(make_tokenizer(), chat_template="{% for %}")
    with pytest.raises(InvalidRequestError, match="not valid"):
        broken.render_chat([{"role": "user", "content": "x"}])
    escaping = Tokenizer(make_tokenizer(), chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError, match="refuses"):  # the sandbox
        escaping.render_chat([{"role": "user", "content": "x"}])


# -- sampling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": t, "top_p": p} for t in (1e-30, 1e-46, 1e-300) for p in (1.0, 0.9)),
        {"temperature": 1.0, "top_p": 5e-324, "top_k": 2},
    ],
)
def test_the_smallest_numbers_take_the_likeliest_token(fields: dict[str, Any]) -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(1)) * 0.1
    params = [SamplingParams(**fields)] * 4
    assert Sampler()(logits, params, [0.1, 0.5, 0.9, 0.99]).tolist() == logits.argmax(dim=-1).tolist()


def test_rows_of_one_batch_keep_to_their_own_settings() -> None:
    draw = random.Random(5)
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)) * 3
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.5, 1.0, 2.0]),
            top_k=draw.choice([None, 1, 3, 200]),
            top_p=draw.choice([0.1, 0.5, 0.99, 1.0]),
        )
        for _ in range(40)
    ]
    uniforms = [draw.random() for _ in range(40)]
    together = Sampler()(logits, params, uniforms).tolist()
    alone = [Sampler()(logits[i : i + 1], [params[i]], [uniforms[i]]).item() for i in range(40)]
    assert together == alone
    for i, p in enumerate(params):
        if p.is_greedy:
            assert together[i] == logits[i].argmax()


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
@pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 1e-30}])
def test_the_ends_of_chance_give_possible_tokens(uniform: float, fields: dict[str, Any]) -> None:
    logits = torch.tensor([[float("-inf"), 1.0, 2.0, 3.0, float("-inf")]])
    token = Sampler()(logits, [SamplingParams(**{"temperature": 1.0, **fields})], [uniform])
    assert token.item() in (1, 2, 3)


# -- cache -------------------------------------------------------------------------------------------


def test_a_pool_of_odd_size_has_whole_pages() -> None:
    allocator = PagedAllocator(39, 4)
    assert allocator.available_size() == 36
    assert allocator.alloc(40) is None


def test_the_table_finds_every_token() -> None:
    table = ReqToTokenPool(rows=2, max_tokens=10, page_size=4, device=CPU)
    row = table.add_row([3, 5])
    assert table.slots(torch.tensor([row] * 4), torch.tensor([0, 3, 4, 5])).tolist() == [12, 15, 20, 21]
    assert table.pages(torch.tensor([row]), 2).tolist() == [[3, 5]]
    table.remove_row(row)
    assert not table.req_to_token.any()


@pytest.mark.parametrize("kv_cache_dim", [None, 16])
@pytest.mark.parametrize("pool_class", [MLATokenPool, NSATokenPool])
def test_compressed_rows_are_found_by_slot_and_by_page(pool_class: Any, kv_cache_dim: int | None) -> None:
    index = {"index_head_dim": 6} if pool_class is NSATokenPool else {}
    pages = {"size": 16, "page_size": 4, "dtype": torch.float32, "layer_num": 2, "device": CPU}
    pool = pool_class(**pages, kv_lora_rank=8, qk_rope_head_dim=3, kv_cache_dim=kv_cache_dim, **index)
    pool.clear([1, 2])
    slots, key = torch.tensor([6, 9]), torch.randn(2, 1, 11)
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, key, key[..., :8])
    assert torch.equal(pool.get_key_buffer(1)[slots], key)
    assert torch.equal(pool.get_value_buffer(1)[slots], key[..., :8])
    keys, values = pool.split_pages(pool.get_page_buffer(1)[[1, 2]], requests=2)
    assert torch.equal(keys[0, 2], key[0])
    assert torch.equal(values[1, 1], key[1, :, :8])
    assert not pool.get_key_buffer(1)[[0, 4, 5, 7, 8, 10, 11]].any()
    if index:
        index_key = torch.randn(2, 6)
        pool.set_index_key_buffer(SimpleNamespace(layer_id=1), slots, index_key)
        assert torch.equal(pool.get_index_key_buffer(1)[slots], index_key)
    pool.clear([1])
    assert not pool.get_key_buffer(1)[6].any()
    assert not index or not pool.get_index_key_buffer(1)[6].any()


def test_the_bytes_of_a_token_are_those_of_its_rows() -> None:
    assert token_bytes("mha", torch.bfloat16, 2, head_num=3, head_dim=5) == 2 * 2 * 3 * 5 * 2
    assert token_bytes("mla", torch.float32, 2, kv_lora_rank=8, qk_rope_head_dim=3) == 2 * 11 * 4
    sizes = {"kv_lora_rank": 8, "qk_rope_head_dim": 3, "index_head_dim": 6}
    assert token_bytes("dsa", torch.float32, 2, **sizes) == 2 * 17 * 4
