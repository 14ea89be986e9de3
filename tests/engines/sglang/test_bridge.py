"""Bridged platform classes under SGLang's names, against fakes of the interfaces of its versions."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms import CpuArchEnum, DeviceCapability, PlatformCapabilities, SRTPlatform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.platforms.cuda import CudaPlatform
from sgl_aspects.platforms.rocm import RocmPlatform
from sgl_aspects.platforms.sglang_bridge import activate_cpu, bridged
from tests.support.sglang_interfaces import NEW, OLD, bridge
from tests.support.stand_ins import Engine


class Acme(CpuPlatform):
    """A vendor's platform with a pool, a runner and a capability of its own."""

    device_name = "acme"
    capabilities = PlatformCapabilities(graph_capture=True, supports_fp8=True)

    def get_mha_kv_pool_cls(self) -> type | str:
        return "collections:OrderedDict"

    def get_graph_runner_cls(self) -> type | str:
        return "collections:Counter"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(9, 1)


@pytest.mark.parametrize("interface", [OLD, NEW], ids=["old", "new"])
def test_a_bridge_is_sglangs_subclass_with_our_devices(engine: Engine, interface: str) -> None:
    platform = bridge(engine, interface, CpuPlatform)
    assert isinstance(platform, engine.load("sglang.srt.platforms.interface").SRTPlatform)
    assert platform.is_out_of_tree()
    assert (platform.device_name, platform.device_type) == ("cpu", "cpu")
    assert str(platform.get_device(0)) == "cpu"
    assert platform.get_default_attention_backend() == "torch_native"
    assert not platform.is_pin_memory_available("cpu")
    assert platform.get_torch_profiler_activity_str() == "CPU"


def test_plugins_run_with_a_platform_that_is_chosen_by_name(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang itself leaves out those of packages with another platform, which this one is."""
    runs: list[bool] = []
    monkeypatch.setattr(f"{bridged.__module__}.load_plugins", lambda: runs.append(True))
    bridge(engine, NEW, Acme)
    assert runs == []
    monkeypatch.setenv("SGLANG_PLATFORM", "acme")
    bridge(engine, NEW, Acme)
    assert runs == [True]


@pytest.mark.parametrize("interface", [OLD, NEW], ids=["old", "new"])
def test_memory_in_use_is_what_leaves_the_free_memory(engine: Engine, interface: str) -> None:
    platform = bridge(engine, interface, CpuPlatform)
    free = platform.get_device_total_memory() - platform.get_current_memory_usage()
    assert 0 < free <= platform.get_device_total_memory()


def test_an_older_sglang_gets_its_own_classes_where_the_platform_has_none(engine: Engine) -> None:
    platform = bridge(engine, OLD, CpuPlatform)
    pools = engine.load("sglang.srt.mem_cache.memory_pool")
    assert platform.get_mha_kv_pool_cls() is pools.MHATokenToKVPool
    assert platform.get_mla_kv_pool_cls() is pools.MLATokenToKVPool
    assert platform.get_dsa_kv_pool_cls() is pools.DSATokenToKVPool
    allocator = engine.load("sglang.srt.mem_cache.allocator").PagedTokenToKVPoolAllocator
    assert platform.get_paged_allocator_cls() is allocator


def test_a_newer_sglang_uses_its_own(engine: Engine) -> None:
    platform = bridge(engine, NEW, CpuPlatform)
    assert [platform.get_kv_pool_cls(kind=kind) for kind in ("mha", "mla", "dsa")] == [None] * 3
    assert platform.get_graph_runner_cls() is None
    assert platform.get_paged_allocator_cls() is None
    # Where these were found, SGLang would warn that they are old.
    assert not hasattr(platform, "get_mha_kv_pool_cls")


class OneKind(CpuPlatform):
    """A vendor's platform whose pools are of one kind."""

    def get_kv_pool_cls(self, *, kind: str) -> type | str:
        if kind != "mha":
            raise NotImplementedError(kind)
        return "collections:OrderedDict"


def test_kinds_of_pool_that_a_vendor_has_not_are_sglangs_own(engine: Engine) -> None:
    platform = bridge(engine, NEW, OneKind)
    assert platform.get_kv_pool_cls(kind="mha") is not None
    assert platform.get_kv_pool_cls(kind="mla") is None


def test_what_a_vendor_wrote_goes_over_under_both_names(engine: Engine) -> None:
    import collections

    platform = bridge(engine, NEW, Acme)
    pool = platform.get_kv_pool_cls(kind="mha")
    assert issubclass(pool, engine.load("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool)
    assert pool.vendors is collections.OrderedDict
    assert platform.get_kv_pool_cls(kind="mla") is None
    assert platform.get_graph_runner_cls() is collections.Counter
    given = {"graph_capture": True, "piecewise_graph": False, "supports_triton": False}
    assert platform.capabilities.given == given
    mixin = engine.load("sglang.srt.platforms.device_mixin")
    capability = platform.get_device_capability()
    assert type(capability) is mixin.DeviceCapability
    assert capability == (9, 1)


def test_a_vendors_pool_goes_over_to_an_older_sglang(engine: Engine) -> None:
    import collections

    platform = bridge(engine, OLD, Acme)
    assert platform.get_mha_kv_pool_cls().vendors is collections.OrderedDict
    assert platform.support_cuda_graph()
    assert isinstance(platform.platform.get_cpu_architecture(), CpuArchEnum)


# -- CUDA, and what a vendor makes of it -------------------------------------------------------------------

RUNNERS = {
    "new": ("model_executor/runner/decode_cuda_graph_runner.py", "DecodeCudaGraphRunner"),
    "old": ("model_executor/cuda_graph_runner.py", "CudaGraphRunner"),
}


class Embedded(CudaPlatform):
    """A vendor's, with the embedded runtime's runner by its own word."""

    def get_graph_runner_cls(self) -> type | str:
        return "sgl_aspects.runtime.execution.graph_runner:GraphRunner"


class VendorOfCuda(CudaPlatform):
    def get_graph_runner_cls(self) -> type | str:
        return "collections:Counter"


@pytest.mark.parametrize("version", ["new", "old"])
@pytest.mark.parametrize("platform_class", [CudaPlatform, Embedded])
def test_graphs_on_cuda_are_those_of_sglangs_own_runner(
    engine: Engine, version: str, platform_class: type[SRTPlatform]
) -> None:
    path, name = RUNNERS[version]
    engine.write(f"sglang/srt/{path}", f"class {name}: ...")
    engine.write("sglang/srt/compilation/cuda_piecewise_backend.py", "class CUDAPiecewiseBackend: ...")
    platform = bridge(engine, NEW if version == "new" else OLD, platform_class)
    # SGLang makes its platform while it is half imported: no more of it may be imported for that.
    assert not any("model_executor" in module or "compilation" in module for module in engine.modules())
    runner = platform.get_graph_runner_cls()
    assert runner is getattr(engine.load(f"sglang.srt.{path[:-3].replace('/', '.')}"), name)
    backend = engine.load("sglang.srt.compilation.cuda_piecewise_backend").CUDAPiecewiseBackend
    assert platform.get_piecewise_backend_cls() is backend
    assert platform.support_cuda_graph()
    if version == "new":
        assert platform.capabilities.given["graph_capture"]
        assert platform.capabilities.given["piecewise_graph"]


def test_a_vendor_who_derives_from_cuda_keeps_a_runner_of_its_own(engine: Engine) -> None:
    import collections

    assert bridge(engine, NEW, VendorOfCuda).get_graph_runner_cls() is collections.Counter


def test_a_pool_derived_from_sglangs_goes_over_as_it_is(engine: Engine) -> None:
    class Derived(Acme):
        def get_mha_kv_pool_cls(self) -> type | str:
            base: Any = engine.load("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool
            return type("Pool", (base,), {})

    assert "vendors" not in vars(bridge(engine, NEW, Derived).get_kv_pool_cls(kind="mha"))


def test_a_pool_of_a_kind_that_can_only_be_derived_is_refused_with_what_to_do(engine: Engine) -> None:
    class Sparse(Acme):
        def get_nsa_kv_pool_cls(self) -> type | str:
            return "collections:OrderedDict"

    # SGLang queries all kinds, whatever the model: only one that is made is an error.
    pool = bridge(engine, NEW, Sparse).get_kv_pool_cls(kind="dsa")
    with pytest.raises(PlatformError, match=r"get_nsa_kv_pool_cls\(\) names collections:OrderedDict.*derive"):
        pool(size=16, index_head_dim=6)


def test_classes_of_the_embedded_runtime_are_never_handed_over(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    class Loopback(Acme):
        def get_graph_runner_cls(self) -> type | str:
            return "sgl_aspects.runtime.execution.graph_runner:GraphRunner"

        def get_mha_kv_pool_cls(self) -> type | str:
            return "sgl_aspects.runtime.kv_cache:MHATokenPool"

    platform = bridge(engine, NEW, Loopback)
    assert platform.get_kv_pool_cls(kind="mha") is None
    assert platform.get_graph_runner_cls() is None
    assert not platform.capabilities.given["graph_capture"]
    assert "captures no graphs on platform 'acme'" in caplog.text
    assert "sgl_aspects.runtime.execution.graph_runner:GraphRunner" in caplog.text


def test_what_has_not_run_on_rocm_is_not_claimed_to_sglang(engine: Engine) -> None:
    given = bridge(engine, NEW, RocmPlatform).capabilities.given
    assert not any(given.values())


def test_a_capability_without_a_class_for_it_is_not_claimed(engine: Engine) -> None:
    class Bare(CpuPlatform):
        capabilities = PlatformCapabilities(graph_capture=True)

    assert not bridge(engine, NEW, Bare).capabilities.given["graph_capture"]


def test_the_bridges_class_is_named_as_the_platforms_is(engine: Engine) -> None:
    bridge_class = type(bridge(engine, NEW, Acme))
    assert f"{bridge_class.__module__}.{bridge_class.__qualname__}" == f"{__name__}.Acme"


def test_a_class_that_cannot_be_loaded_is_reported_with_the_method_that_names_it(engine: Engine) -> None:
    class Wrong(Acme):
        def get_graph_runner_cls(self) -> type | str:
            return "no_such_module:Runner"

    with pytest.raises(PlatformError, match=r"Wrong\.get_graph_runner_cls\(\): 'no_such_module:Runner'"):
        bridge(engine, NEW, Wrong).get_graph_runner_cls()


@pytest.mark.parametrize("platform_class", [CpuPlatform, CudaPlatform, Acme])
def test_without_a_chosen_device_sglang_gets_the_name_of_the_devices_type(
    engine: Engine, platform_class: type[SRTPlatform]
) -> None:
    assert bridge(engine, NEW, platform_class).get_device(None) == platform_class.device_type


@pytest.mark.parametrize("given", [dict, CpuPlatform(), "acme:Platform"])
def test_what_is_not_a_platform_class_is_refused(given: Any) -> None:
    with pytest.raises(PlatformError, match=r"give a subclass of sgl_aspects.platforms.SRTPlatform"):
        bridged(given)


def test_a_newer_sglang_may_pass_more_than_a_vendor_takes(engine: Engine) -> None:
    class Drafting(Acme):
        def get_speculative_graph_runner_cls(self, algorithm: str, phase: str) -> type | str:
            return "collections:Counter"

    platform = bridge(engine, NEW, Drafting)
    given = {"algorithm": "EAGLE", "phase": "draft_decode", "depth": 2}
    found = platform.get_speculative_graph_runner_cls(**given)
    assert found.__name__ == "Counter"


@pytest.mark.parametrize("chosen", [None, "cuda", "acme", "sgl_aspects_cpu_2"])
def test_the_cpu_platform_is_never_chosen_by_itself(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if chosen is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", chosen)
    assert activate_cpu() is None


def test_the_cpu_platform_is_there_by_name(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "sgl_aspects_cpu")
    name = activate_cpu()
    assert name is not None
    bridge(engine, NEW, CpuPlatform)
    module, _, cls = name.rpartition(".")
    platform = getattr(engine.load(module), cls)()
    assert platform.get_dispatch_key_name() == "native"
    del sys.modules[module]


# The methods of SGLang's interface (0.5.12, 0.5.16, 0.5.20, 0.5.23) that a device has an answer to. What is
# not here are factories: there SGLang's own answer stands where a platform has none.
DEVICE = """
    apply_server_args_defaults empty_cache get_available_memory get_cpu_architecture get_current_memory_usage
    get_default_attention_backend get_device get_device_capability get_device_name get_device_total_memory
    get_device_uuid get_dispatch_key_name get_group_coordinator_device get_torch_distributed_backend_str
    get_torch_profiler_activity get_torch_profiler_activity_str inference_mode init_backend
    is_pin_memory_available post_load_model reindex_device_id seed_everything set_device support_cuda_graph
    support_piecewise_cuda_graph supports_fp8 synchronize
"""


@pytest.mark.parametrize("interface", [OLD, NEW], ids=["old", "new"])
def test_every_question_about_the_device_reaches_our_platform(engine: Engine, interface: str) -> None:
    bridge_class = type(bridge(engine, interface, CpuPlatform))
    assert [name for name in DEVICE.split() if name not in vars(bridge_class)] == []


def test_answers_are_in_sglangs_own_types(engine: Engine) -> None:
    platform = bridge(engine, NEW, CpuPlatform)
    mixin = engine.load("sglang.srt.platforms.device_mixin")
    assert isinstance(platform.get_cpu_architecture(), mixin.CpuArchEnum)
    with platform.reindex_device_id(3) as device_id:
        assert isinstance(device_id, int)
    platform.seed_everything(None)
    with platform.inference_mode():
        pass


def test_methods_of_sglangs_interface_alone_are_passed_on_where_overridden(engine: Engine) -> None:
    interface = NEW.replace("def get_graph_runner_cls", "def get_secret")

    class Secretive(CpuPlatform):
        def get_secret(self) -> str:
            return "42"

    assert bridge(engine, interface, Secretive).get_secret() == "42"
    assert bridge(engine, interface, CpuPlatform).get_secret() is None
