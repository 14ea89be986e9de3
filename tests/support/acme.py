"""A vendor's package, as one would write it from SGLang's documentation: everything is its own.

Pools take the arguments that SGLang gives, all of them required; the allocator hands high pages out first;
collectives and operators are the vendor's. Used parts are listed in the file ACME_USED.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.platforms import PlatformEnum, SRTPlatform
from sgl_aspects.platforms.cpu import CpuDeviceMixin
from sgl_aspects.runtime.attention.torch_native import TorchNativeBackend
from sgl_aspects.runtime.communicator import TorchCommunicator
from sgl_aspects.runtime.ops import FusedExperts, Operator, RMSNorm, SiluAndMul


@cache
def used(name: str) -> None:
    path = os.environ.get("ACME_USED")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")


# -- the cache --------------------------------------------------------------------------------------------


class MHATokenToKVPool:
    """One buffer for the keys and one for the values of each layer."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device,
        enable_memory_saver: bool,
        start_layer: int,
        end_layer: int,
    ) -> None:
        used("mha pool")
        assert end_layer - start_layer == layer_num - 1
        assert enable_memory_saver is False
        self.dtype, self.start_layer = dtype, start_layer
        shape = (size + page_size, head_num, head_dim)
        self.k_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self.v_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]

    def set_kv_buffer(self, layer: Any, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        self.k_buffer[layer.layer_id - self.start_layer][loc] = cache_k
        self.v_buffer[layer.layer_id - self.start_layer][loc] = cache_v

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k_buffer[layer_id - self.start_layer]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v_buffer[layer_id - self.start_layer]


class MLATokenToKVPool:
    """One compressed row a token."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: torch.device,
        enable_memory_saver: bool,
        start_layer: int,
        end_layer: int,
    ) -> None:
        used("mla pool")
        self.dtype, self.kv_lora_rank, self.start_layer = dtype, kv_lora_rank, start_layer
        shape = (size + page_size, 1, kv_lora_rank + qk_rope_head_dim)
        self.kv_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]

    def set_kv_buffer(self, layer: Any, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        self.kv_buffer[layer.layer_id - self.start_layer][loc] = cache_k

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.kv_buffer[layer_id - self.start_layer]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]


class DSATokenToKVPool(MLATokenToKVPool):
    """The same with the keys of an indexer. ``pool``: the arguments of that one."""

    def __init__(self, *, index_head_dim: int, kv_cache_dim: int, **pool: Any) -> None:
        used("dsa pool")
        assert kv_cache_dim == pool["kv_lora_rank"] + pool["qk_rope_head_dim"]
        super().__init__(**pool)
        self.index_buffer = [keys.new_zeros(len(keys), index_head_dim) for keys in self.kv_buffer]

    def set_index_key_buffer(self, layer: Any, loc: Tensor, index_key: Tensor) -> None:
        self.index_buffer[layer.layer_id - self.start_layer][loc] = index_key

    def get_index_key_buffer(self, layer_id: int) -> Tensor:
        return self.index_buffer[layer_id - self.start_layer]


class HighPagesFirst:
    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kvcache: Any,
        need_sort: bool,
    ) -> None:
        used("allocator")
        self.size, self.page_size, self.device = size, page_size, device
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.size // self.page_size + 1, device=self.device)

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size: int) -> Tensor | None:
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages = self.free_pages.sort(descending=True).values
        self.free_pages = pages[count:]
        first = pages[:count, None] * self.page_size
        return (first + torch.arange(self.page_size, device=self.device)).flatten()

    def free(self, free_index: Tensor) -> None:
        self.free_pages = torch.cat((self.free_pages, torch.unique(free_index // self.page_size)))


# -- execution --------------------------------------------------------------------------------------------


class AcmeCommunicator(TorchCommunicator):
    """Gathers the tensors and sums them."""

    def all_reduce(self, x: Tensor) -> Tensor:
        used("all_reduce")
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.stack(parts).sum(0)


# -- operators --------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
    used("rms_norm")
    total = x if residual is None else x + residual
    exact = total.float()
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype) if residual is None else (normed.to(x.dtype), total)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    used("linear")
    product = (weight @ x.T).T
    return product if bias is None else product + bias


def silu_and_mul(x: Tensor) -> Tensor:
    used("silu_and_mul")
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def fused_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
) -> Tensor:
    used("fused_moe")
    if activation != "silu":
        raise UnsupportedCallError(f"no activation {activation!r}")
    gate, up = torch.einsum("th,eih->tei", x, gate_up_weight).chunk(2, -1)
    each = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down_weight)
    shares = torch.zeros(len(x), len(down_weight)).scatter_(1, topk_ids, topk_weights)
    return torch.einsum("te,teh->th", shares, each.float()).to(x.dtype)


class Acme4:
    """A quantization of the vendor's own: sixteen steps for each row."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return Acme4Linear()


class Acme4Linear:
    def process_weights_after_loading(self, layer: Any) -> None:
        used("quantization acme4")
        largest = layer.weight.abs().amax(1, keepdim=True)
        layer.step = largest / 7
        layer.steps = (layer.weight / layer.step).round().clamp(-8, 7).to(torch.int8)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.steps * layer.step, bias)


# -- the platform -----------------------------------------------------------------------------------------


class AcmePlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "acme"
    device_type = "cpu"

    supported_quantization = ("acme4", "none4")

    def get_quantization_config(self, quantization: str) -> type | None:
        return Acme4 if quantization == "acme4" else None

    def init_backend(self) -> None:
        Operator.register_oot_forward(RMSNorm, rms_norm, "acme")
        Operator.register_oot_forward("linear", linear, "acme")
        Operator.register_oot_forward(SiluAndMul, silu_and_mul, "acme")
        Operator.register_oot_forward(FusedExperts, fused_moe, "acme")

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "acme"

    def get_kv_pool_cls(self, *, kind: str) -> type:
        return {"mha": MHATokenToKVPool, "mla": MLATokenToKVPool, "dsa": DSATokenToKVPool}[kind]

    def get_paged_allocator_cls(self) -> type:
        return HighPagesFirst

    def get_communicator_class(self) -> type:
        return AcmeCommunicator

    def get_compile_backend(self, mode: str | None = None) -> str:
        used(f"compile mode {mode}")
        return "eager"


class ShortAcmePlatform(AcmePlatform):
    """Sets the options that the user left open, like small devices."""

    def apply_server_args_defaults(self, server_args: Any) -> None:
        if server_args.context_length is None:
            server_args.context_length = 40


class FixedAcmePlatform(AcmePlatform):
    """Runs with pages of 8 tokens alone, and prefers short chunks."""

    def apply_server_args_defaults(self, server_args: Any) -> None:
        server_args.page_size = 8
        if "chunked_prefill_size" in server_args.open_fields:
            server_args.chunked_prefill_size = 48


class WrongAcmePlatform(AcmePlatform):
    def apply_server_args_defaults(self, server_args: Any) -> None:
        server_args.page_size = 0


class DyingAcmePlatform(AcmePlatform):
    """Its attention fails on long prompts."""

    def get_default_attention_backend(self) -> str:
        return "acme"

    def get_attention_backends(self) -> dict[str, type | str]:
        return {"acme": "tests.support.acme:ShortAttention"}


class ShortAttention(TorchNativeBackend):
    def init_forward_metadata(self, forward_batch: Any) -> None:
        if max(forward_batch.lengths) > 30:
            raise RuntimeError("no more than 30 tokens")
        super().init_forward_metadata(forward_batch)
