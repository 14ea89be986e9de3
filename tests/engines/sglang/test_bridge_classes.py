"""A vendor's classes in SGLang, against fakes of the base classes that it wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_aspects.engines.sglang.bridge import attention
from sgl_aspects.engines.sglang.bridge.kv_cache import allocator_class, pool_class
from sgl_aspects.engines.sglang.bridge.quantization import config_class
from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms import MMPlatform
from sgl_aspects.platforms.cpu import CpuDeviceMixin
from sgl_aspects.platforms.sglang_bridge import bridged
from tests.support.acme import Acme4, AcmePlatform, HighPagesFirst, MHATokenToKVPool
from tests.support.stand_ins import Engine

MEMORY_POOL = """
    class MHATokenToKVPool:
        def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver,
                     start_layer=None, end_layer=None, v_head_dim=None, enable_alt_stream=True):
            self.size, self.page_size, self.dtype, self.layer_num = size, page_size, dtype, layer_num
            self.device, self.head_num, self.head_dim = device, head_num, head_dim
            self.start_layer, self.end_layer = start_layer or 0, end_layer or layer_num - 1
            self._create_buffers_normal()
        def _create_buffers_normal(self):
            raise AssertionError("SGLang's memory")
        def get_key_buffer(self, layer_id):
            return self.k_buffer[layer_id - self.start_layer]
    """
ALLOCATOR = """
    class BaseTokenToKVPoolAllocator:
        def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
            self.size, self.free_group = size, None
        def free_group_begin(self):
            self.free_group = []
        def free_group_end(self):
            pending, self.free_group = self.free_group, None
            for each in pending:
                self.free(each)
    """
QUANTIZATION = """
    class QuantizationConfig:
        def __init__(self):
            self.packed_modules_mapping = {}
    """
LINEAR = "class LinearBase: ...\n"
PLAIN = "class UnquantizedLinearMethod: ...\n"
MULTIMODAL = """
    import enum
    PlatformEnum = enum.Enum("PlatformEnum", "CPU OOT")
    class Platform: ...
    """


def test_sglangs_pool_keeps_keys_and_values_in_the_vendors_memory(engine: Engine) -> None:
    engine.write("sglang/srt/mem_cache/memory_pool.py", MEMORY_POOL)
    made = pool_class(MHATokenToKVPool, "mha", AcmePlatform().get_kv_pool_cls)
    rows = {"head_num": 2, "head_dim": 4, "layer_num": 2, "start_layer": 3, "end_layer": 5}
    pool: Any = made(
        16, page_size=4, dtype=torch.float32, device="cpu", enable_memory_saver=False, v_head_dim=4, **rows
    )
    key, value = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    pool.set_kv_buffer(SimpleNamespace(layer_id=4), SimpleNamespace(loc=torch.tensor([5, 9])), key, value)
    assert torch.equal(pool.get_key_buffer(4)[[5, 9]], key)
    assert torch.equal(pool.v_buffer[1][[5, 9]], value)  # of the vendor, whose attribute it is, too
    half = key.half()
    pool.set_kv_buffer(None, torch.tensor([6, 7]), half, half, layer_id_override=3)
    assert torch.equal(pool.get_key_buffer(3)[[6, 7]], half.float())


def make_allocator(engine: Engine, pages: int = 8) -> Any:
    engine.write("sglang/srt/mem_cache/allocator.py", ALLOCATOR)
    made = allocator_class(HighPagesFirst, AcmePlatform().get_paged_allocator_cls)
    given = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    return made(4 * pages, page_size=4, **given)


def test_prompts_continue_their_last_page_and_decodes_begin_new_ones(engine: Engine) -> None:
    allocator = make_allocator(engine)
    before, after, last = torch.tensor([0, 6, 4]), torch.tensor([5, 7, 9]), torch.tensor([-1, 13, 19])
    slots = allocator.alloc_extend(before, before, after, after, last, 11).tolist()
    # The vendor's allocator hands out high pages first. Request 1 has room in its page; request 2 has none.
    assert slots == [*range(32, 36), 28, 14, *range(24, 28), 20]
    assert allocator.available_size() == 16
    after = torch.tensor([6, 8, 9]) + 1
    newest = torch.tensor([29, 15, 20])
    assert allocator.alloc_decode(after, after, newest).tolist() == [30, 16, 21]


def test_a_step_that_needs_no_page_needs_none(engine: Engine) -> None:
    allocator = make_allocator(engine, pages=1)
    allocator.alloc(4)
    lengths = torch.tensor([3])
    assert allocator.alloc_decode(lengths, lengths, torch.tensor([5])).tolist() == [6]
    assert allocator.alloc_decode(lengths + 2, lengths + 2, torch.tensor([7])) is None


def test_slots_that_are_freed_in_a_group_come_back_at_its_end(engine: Engine) -> None:
    allocator = make_allocator(engine)
    slots = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free(slots)
    assert allocator.available_size() == 24
    allocator.free_group_end()
    assert allocator.available_size() == 32
    allocator.alloc(8)
    allocator.clear()
    assert allocator.available_size() == 32


def test_linears_get_the_vendors_quantization_and_other_layers_none(engine: Engine) -> None:
    package = "sglang/srt/layers/quantization"
    engine.write(f"{package}/base_config.py", QUANTIZATION)
    engine.write(f"{package}/unquant.py", PLAIN)
    engine.write("sglang/srt/layers/linear.py", LINEAR)
    made: Any = config_class(Acme4, AcmePlatform().get_quantization_config)
    config = made.from_config({})
    assert isinstance(config, engine.load("sglang.srt.layers.quantization.base_config").QuantizationConfig)
    assert config.get_quant_method(object(), "embed_tokens") is None
    layer = engine.load("sglang.srt.layers.linear").LinearBase()
    layer.weight = torch.tensor([[7.0, -3.0], [1.4, 0.2]])
    method = config.get_quant_method(layer, "q_proj")
    method.process_weights_after_loading(layer)
    assert torch.allclose(method.apply(layer, torch.eye(2)).T, layer.weight)
    with pytest.raises(
        PlatformError, match=r"get_quantization_config\(\) names builtins:dict, which has no get_q"
    ):
        config_class(dict, AcmePlatform().get_quantization_config)


class AcmeImages(CpuDeviceMixin, MMPlatform):
    def get_compile_options(self, module: object) -> dict[str, object]:
        return {"of": type(module).__name__}

    @classmethod
    def enable_dit_layerwise_offload_by_default(cls) -> bool:
        return True


def test_what_a_vendor_wrote_for_the_multimodal_engine_alone_goes_over(engine: Engine) -> None:
    engine.write("sglang/multimodal_gen/runtime/platforms/interface.py", MULTIMODAL)
    made: Any = bridged(AcmeImages)
    assert made.enable_dit_layerwise_offload_by_default()
    assert made().get_compile_options(3) == {"of": "int"}


ATTENTION = """
    class AttentionBackend:
        def forward(self, *args): return self.forward_extend(*args)
    """
HANDLERS = """
    import enum
    AttnForwardMethod = enum.Enum("AttnForwardMethod", "MHA MLA")
    class AttentionBackendRegistry:
        handlers = {}
        @classmethod
        def register(cls, name, handler):
            cls.handlers[name] = handler
    """


class Rows:
    """A vendor's attention backend."""

    def __init__(self, model_runner: Any) -> None:
        self.sizes: list[int] = []

    def init_forward_metadata(self, forward_batch: Any) -> None: ...

    def forward_decode(self, *args: Any) -> Any: ...

    def forward_extend(self, *args: Any) -> Any:
        return args[0]


class LatentRows(Rows):
    kinds = frozenset({"mha", "mla"})


class WithAttention(AcmePlatform):
    def get_attention_backends(self) -> dict[str, type | str]:
        return {"rows": Rows, "latent rows": LatentRows}


def registries(engine: Engine) -> tuple[Any, Any]:
    """SGLang's tables with a vendor's backends: those that make them, and how latent rows are computed."""
    engine.write("sglang/srt/layers/attention/attention_registry.py", "ATTENTION_BACKENDS = {}")
    engine.write("sglang/srt/layers/attention/base_attn_backend.py", ATTENTION)
    handlers = "sglang.srt.models.deepseek_common.attention_backend_handler"
    engine.write(f"{handlers.replace('.', '/')}.py", HANDLERS)
    attention.register_when_loaded(WithAttention())
    backends = engine.load("sglang.srt.layers.attention.attention_registry").ATTENTION_BACKENDS
    return backends, engine.load(handlers)


def test_an_attention_backend_has_the_pools_that_sglangs_models_take_from_it(engine: Engine) -> None:
    backends, _ = registries(engine)
    runner = SimpleNamespace(token_to_kv_pool="pool", req_to_token_pool="table", use_mla_backend=False)
    made = backends["rows"](runner)
    assert (made.token_to_kv_pool, made.req_to_token_pool, made.forward("q")) == ("pool", "table", "q")
    runner.use_mla_backend = True
    assert backends["latent rows"](runner).token_to_kv_pool == "pool"
    with pytest.raises(
        PlatformError, match=r"get_attention_backends\(\) names .*:Rows, whose kinds are mha, and .* kind mla"
    ):
        backends["rows"](runner)


def test_prompts_of_a_model_with_latent_rows_are_not_expanded_for_a_vendors_backend(engine: Engine) -> None:
    _, module = registries(engine)
    handlers = module.AttentionBackendRegistry.handlers
    chosen = {name: handler(object(), object()) for name, handler in handlers.items()}
    latent = module.AttnForwardMethod.MLA
    assert chosen == {"rows": latent, "latent rows": latent}
