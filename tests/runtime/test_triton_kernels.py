"""The Triton kernels against plain PyTorch: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from sgl_aspects.runtime.attention.base import Attention, AttentionBackend
from sgl_aspects.runtime.attention.torch_native import TorchNativeBackend
from sgl_aspects.runtime.core import ForwardBatch, ForwardMode
from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.kv_cache import ReqToTokenPool
from sgl_aspects.runtime.kv_cache.pools import MHATokenPool, MLATokenPool

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAGE_SIZE, PAGES = 4, 64
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning"
)  # numpy's, of Triton


@pytest.fixture(scope="module", autouse=True)
def triton() -> None:
    module = pytest.importorskip("triton")
    if not ON_GPU and not module.knobs.runtime.interpret:
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 (and numpy before 2.4)")


def random(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("programs", [1, 1000], ids=["whole rows", "split rows"])
@pytest.mark.parametrize(("tokens", "outer", "inner"), [(1, 70, 96), (3, 70, 300), (16, 130, 600)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_of_few_tokens(
    tokens: int, outer: int, inner: int, has_bias: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl_aspects.runtime.dispatch.triton import linear as kernels

    monkeypatch.setattr(kernels, "_PROGRAMS", programs)
    kernels._arrivals.cache_clear()
    dtype = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter multiplies no bfloat16
    x, weight = random(tokens, inner, seed=1, dtype=dtype), random(outer, inner, seed=2, dtype=dtype)
    bias = random(outer, seed=3, dtype=dtype) if has_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for _ in range(2):  # what the last program counts is left as it was found
        assert error(kernels.skinny_linear(x, weight, bias), exact) < (5e-3 if ON_GPU else 1e-3)
    assert not kernels._arrivals(x.device).any()


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [(1, 8, 8, 32, 16), (3, 8, 2, 70, 40), (90, 2, 1, 64, 32)],
)
def test_experts(tokens: int, experts: int, chosen: int, hidden: int, inner: int) -> None:
    from sgl_aspects.runtime.dispatch.triton.fused_moe import fused_moe

    x = random(tokens, hidden, seed=1)
    gate_up, down = random(experts, 2 * inner, hidden, seed=2), random(experts, hidden, inner, seed=3)
    weights, ids = random(tokens, experts, seed=4).softmax(-1).topk(chosen)
    exact = OPERATORS["fused_moe"].reference(
        x.double(), gate_up.double(), down.double(), weights.double(), ids
    )
    assert error(fused_moe(x, gate_up, down, weights, ids), exact) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
def test_rotary_embedding(heads: int, kv_heads: int, dim: int) -> None:
    from sgl_aspects.runtime.dispatch.triton.rotary_embedding import rotary_embedding

    both = random(5, heads + kv_heads, dim, seed=1)
    query, key = both[:, :heads], both[:, heads:]
    cos, sin = random(40, dim // 2, seed=2), random(40, dim // 2, seed=3)
    positions = torch.tensor([3, 39, 0, 7, 7], device=DEVICE)
    found = rotary_embedding(query, key, cos, sin, positions)
    wanted = OPERATORS["rotary_embedding"].reference(query, key, cos, sin, positions)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("has_residual", [True, False])
def test_norm_and_activation(has_residual: bool) -> None:
    from sgl_aspects.runtime.dispatch.triton.rms_norm import rms_norm
    from sgl_aspects.runtime.dispatch.triton.silu_and_mul import silu_and_mul

    x, weight = random(5, 24, seed=1), random(24, seed=2)
    residual = random(5, 24, seed=3) if has_residual else None
    found, wanted = (
        function(x, weight, 1e-6, residual) for function in (rms_norm, OPERATORS["rms_norm"].reference)
    )
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(silu_and_mul(x), OPERATORS["silu_and_mul"].reference(x))


def both_backends(pool_class: Any, lengths: list[int], **row: int) -> Iterator[tuple[AttentionBackend, Any]]:
    """Reference and Triton, each with requests of these lengths on scattered pages of a pool of its own, and
    different values in the requests' slots. For Triton all other slots are NaN.
    """
    from sgl_aspects.runtime.attention.triton_backend import TritonBackend

    for backend in (TorchNativeBackend, TritonBackend):
        pool = pool_class(
            size=PAGES * PAGE_SIZE,
            page_size=PAGE_SIZE,
            dtype=torch.float32,
            layer_num=1,
            device=DEVICE,
            **row,
        )
        table = ReqToTokenPool(len(lengths), 96, PAGE_SIZE, DEVICE)
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)).add(1).tolist()
        slots = []
        for length in lengths:
            count = -(-length // PAGE_SIZE)
            at = table.add_row(pages[:count])
            positions = torch.arange(length, device=DEVICE)
            slots.append(table.slots(torch.full_like(positions, at), positions))
            del pages[:count]
        old, all_slots = torch.cat([each[:-1] for each in slots]), torch.cat(slots)
        (rows,) = pool.rows
        rows.fill_(float("nan") if backend is TritonBackend else 0.0)
        rows[old] = random(len(old), rows.shape[1], seed=9)
        yield (
            backend(SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=table)),
            partial(rows.index_select, 0, all_slots),
        )


def decode(backend: AttentionBackend, lengths: list[int]) -> ForwardBatch:
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        input_ids=torch.zeros(len(lengths), dtype=torch.int64, device=DEVICE),
        positions=torch.tensor(lengths, device=DEVICE) - 1,
        req_pool_indices=torch.arange(
            len(lengths) - 1, -1, -1, device=DEVICE
        ),  # rows are handed out from the last on
        num_decodes=len(lengths),
        num_new_tokens=[1] * len(lengths),
        lengths=lengths,
        attention_backend=backend,
        req_to_token_pool=backend.req_to_token_pool,
    )
    backend.init_forward_metadata(batch)
    return batch


LENGTHS = [1, 5, 16, 17, 61]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 24), (20, 1, 16), (3, 3, 64)])
def test_decoding_over_keys_and_values(heads: int, kv_heads: int, head_dim: int) -> None:
    lengths = list(reversed(LENGTHS))
    layer = Attention(0, heads, kv_heads, head_dim)
    found = []
    for backend, stored in both_backends(MHATokenPool, LENGTHS, head_num=kv_heads, head_dim=head_dim):
        query = random(len(lengths), heads, head_dim, seed=1)
        key, value = (random(len(lengths), kv_heads, head_dim, seed=seed) for seed in (2, 3))
        output = backend.forward(query.flatten(1), key, value, layer, decode(backend, lengths))
        found.append((output, stored()))
    assert error(found[1][0], found[0][0]) < 1e-5
    assert torch.equal(found[1][1], found[0][1])  # both stored the same


@pytest.mark.parametrize("heads", [4, 40])
def test_decoding_over_compressed_rows(heads: int) -> None:
    lengths = list(reversed(LENGTHS))
    layer = Attention(0, heads, 1, 48, v_head_dim=32)
    found = []
    for backend, stored in both_backends(MLATokenPool, LENGTHS, kv_lora_rank=32, qk_rope_head_dim=16):
        query, key = random(len(lengths), heads, 48, seed=1), random(len(lengths), 1, 48, seed=2)
        output = backend.forward(query.flatten(1), key, key[..., :32], layer, decode(backend, lengths))
        found.append((output, stored()))
    assert error(found[1][0], found[0][0]) < 1e-5
    assert torch.equal(found[1][1], found[0][1])
