"""Every built-in device, on fakes that record the calls and return what its own torch module would."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms import DeviceCapability, DeviceMixin, PlatformEnum, SRTPlatform
from sgl_aspects.platforms.builtins import BUILTIN_PLATFORMS
from sgl_aspects.platforms.cuda import CudaDeviceMixin
from sgl_aspects.platforms.discovery import resolve_qualified_name
from tests.support.torch_programs import run_with_torch

GIB = 2**30


class RecordingEvent:
    """Reached at its second query, at a time that grows by 5 ms an event."""

    clock = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.queries = 0
        self.time = 0.0

    def record(self, *stream: Any) -> None:
        RecordingEvent.clock += 5.0
        self.time = RecordingEvent.clock

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 1

    def synchronize(self) -> None:
        self.queries = 1

    def elapsed_time(self, end: RecordingEvent) -> float:
        return end.time - self.time


class StandIn(ModuleType):
    """``torch.<name>`` with two devices; every call is in ``calls``."""

    Event = RecordingEvent

    def __init__(self, name: str, **answers: Any) -> None:
        super().__init__(f"torch.{name}")
        self.calls: list[tuple[Any, ...]] = []
        defaults: dict[str, Any] = {
            "is_available": True,
            "device_count": 2,
            "set_device": None,
            "get_device_name": "Stand-in 9000",
            "get_device_properties": SimpleNamespace(total_memory=8 * GIB, uuid="12-34"),
            "get_device_capability": (9, 4),
            "mem_get_info": (6 * GIB, 8 * GIB),
            "max_memory_allocated": 123,
            "empty_cache": None,
            "synchronize": None,
            "current_stream": "stream 0",
            "stream": nullcontext(),
            "is_current_stream_capturing": True,
            "manual_seed_all": None,
            "_is_in_bad_fork": False,
        }
        for method, answer in {**defaults, **answers}.items():
            setattr(self, method, self._recorder(method, answer))
        self.Stream = lambda: "stream 1"

    def _recorder(self, method: str, answer: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append((method, *args))
            return answer

        return call


def make(name: str) -> SRTPlatform:
    (row,) = [row for row in BUILTIN_PLATFORMS if row.name == name]
    platform = resolve_qualified_name(row.class_name)()
    assert isinstance(platform, SRTPlatform)
    return platform


def detect(name: str) -> str | None:
    (row,) = [row for row in BUILTIN_PLATFORMS if row.name == name]
    return row.detect()


#: name: (module of torch, variable, distributed backend)
TORCH_DEVICES = {
    "cuda": ("cuda", "CUDA_VISIBLE_DEVICES", "nccl"),
    "rocm": ("cuda", "HIP_VISIBLE_DEVICES", "nccl"),
    "xpu": ("xpu", "ZE_AFFINITY_MASK", "xccl"),
    "npu": ("npu", "ASCEND_RT_VISIBLE_DEVICES", "hccl"),
    "musa": ("musa", "MUSA_VISIBLE_DEVICES", "mccl"),
    "hpu": ("hpu", "HABANA_VISIBLE_MODULES", "hccl"),
}


@pytest.mark.parametrize("name", TORCH_DEVICES)
def test_operations_are_those_of_the_torch_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, variable, backend = TORCH_DEVICES[name]
    stand_in = StandIn(module)
    monkeypatch.setattr(torch, module, stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    platform = make(name)
    assert (platform.device_name, platform.device_type) == (name, module)
    assert platform._enum is PlatformEnum(name)
    assert platform.get_torch_distributed_backend_str() == backend
    assert platform.get_default_attention_backend() == "torch_native"

    def was_called(*call: Any) -> bool:
        return call in stand_in.calls

    assert platform.device_count() == 2
    platform.set_device(torch.device("cpu"))
    assert was_called("set_device", torch.device("cpu"))
    assert platform.get_device_name(1) == "Stand-in 9000"
    assert was_called("get_device_name", 1)
    assert platform.get_device_uuid(1) == ("GPU-12-34" if module == "cuda" else "12-34")
    assert platform.get_device_total_memory(1) == 8 * GIB
    assert platform.get_available_memory(1) == (6 * GIB, 8 * GIB)
    assert was_called("mem_get_info", 1)
    assert platform.get_current_memory_usage() == 123
    assert was_called("max_memory_allocated", None)
    platform.synchronize()
    assert was_called("synchronize")
    platform.empty_cache()
    assert was_called("empty_cache") is (name != "hpu")  # Gaudi has no such call
    assert platform.is_pin_memory_available()
    assert platform.current_stream() == "stream 0"
    assert platform.create_stream() == "stream 1"
    with platform.use_stream("stream 1"):
        assert was_called("stream", "stream 1")
    assert not platform.shares_host_memory()
    assert platform.is_capturing()
    del stand_in.is_current_stream_capturing
    assert not platform.is_capturing()
    numbered = name in ("cuda", "rocm", "musa")
    assert platform.get_device_capability() == (DeviceCapability(9, 4) if numbered else None)
    assert platform.visible_devices_variable == variable
    with pytest.raises(ValueError, match=rf"sees 2 {name} device.*{variable}"):
        platform.get_device(2)


@pytest.mark.parametrize("name", TORCH_DEVICES)
def test_events_are_read_without_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = TORCH_DEVICES[name][0]
    monkeypatch.setattr(torch, module, StandIn(module), raising=False)
    start, end = make(name).create_event(), make(name).create_event()
    assert not start.query()
    with pytest.raises(RuntimeError, match="first event was never recorded"):
        start.elapsed_ms(end)
    start.record()
    end.record("stream 1")
    assert [end.query(), end.query()] == [False, True]
    assert start.elapsed_ms(end) == 5.0


def test_hpu_is_seeded_by_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn("hpu")
    monkeypatch.setattr(torch, "hpu", stand_in, raising=False)
    make("hpu").seed_everything(5)
    assert ("manual_seed_all", 5) in stand_in.calls


def test_npu_takes_the_activities_of_its_own_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(make("npu").get_profiler_activities()) == 1
    activities = SimpleNamespace(CPU="cpu", NPU="npu")
    extension = ModuleType("torch_npu")
    extension.__dict__["profiler"] = SimpleNamespace(ProfilerActivity=activities)
    monkeypatch.setitem(sys.modules, "torch_npu", extension)
    assert make("npu").get_profiler_activities() == ["cpu", "npu"]


@pytest.mark.parametrize(("name", "activity"), [("cuda", "CUDA"), ("xpu", "XPU"), ("hpu", "HPU")])
def test_the_profiler_sees_host_and_device(name: str, activity: str) -> None:
    from torch.profiler import ProfilerActivity

    assert make(name).get_profiler_activities() == [ProfilerActivity.CPU, getattr(ProfilerActivity, activity)]


def test_rocm_is_cuda_under_another_name() -> None:
    rocm = make("rocm")
    assert not rocm.is_cuda()
    assert rocm.is_cuda_alike()
    assert isinstance(rocm, CudaDeviceMixin)
    assert rocm.get_graph_label() == "rocm graph"


@pytest.mark.parametrize("name", ["npu", "musa"])
def test_tensors_of_devices_that_an_extension_adds(name: str, tmp_path: Path) -> None:
    """Like torch_npu: torch's spare device type gets the name, and torch.<name> the module."""
    code = f"""
import sys, types, torch
torch.utils.rename_privateuse1_backend({name!r})
extension = types.ModuleType("torch_{name}")
module = types.ModuleType("torch.{name}")
module.is_available = lambda: True
module.device_count = lambda: 2
sys.modules["torch_{name}"] = extension
torch._register_device_module({name!r}, module)
from sgl_aspects.platforms import current_platform
assert current_platform.is_{name}() and current_platform.device_name == {name!r}
assert current_platform.get_device(1) == torch.device("{name}:1")
assert current_platform.get_group_coordinator_device(0) == torch.device("{name}:0")
assert current_platform.get_dispatch_key_name() == {name!r}
"""
    env = {**os.environ, "SGLANG_PLATFORM": "", "CUDA_VISIBLE_DEVICES": ""}
    status, _, errors = run_with_torch(code, env, tmp_path)
    assert status == 0, errors


def test_a_torch_without_the_module_names_the_package_to_install() -> None:
    with pytest.raises(PlatformError, match=r"no module torch\.npu: install torch_npu"):
        make("npu").device_count()


# -- detection ------------------------------------------------------------------------------------------


def test_detection_queries_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("npu", "musa", "hpu", "xpu"):
        monkeypatch.setattr(torch, name, StandIn(name), raising=False)
        assert detect(name) is None
        monkeypatch.setattr(torch, name, StandIn(name, is_available=False), raising=False)
        assert detect(name) == f"torch.{name}.is_available() is False"


def test_cuda_and_rocm_are_distinguished_by_torchs_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", StandIn("cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    assert detect("cuda") is None
    assert "not built for ROCm" in str(detect("rocm"))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "built for ROCm" in str(detect("cuda"))
    assert detect("rocm") is None
    monkeypatch.setattr(torch, "cuda", StandIn("cuda", is_available=False))
    assert detect("rocm") == "torch.cuda.is_available() is False"


# -- MPS ------------------------------------------------------------------------------------------------


def test_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(
        "mps",
        device_count=1,
        recommended_max_memory=10 * GIB,
        driver_allocated_memory=3 * GIB,
        current_allocated_memory=2 * GIB,
    )
    monkeypatch.setattr(torch, "mps", stand_in)
    mps = make("mps")
    assert mps.is_mps()
    assert not mps.is_cuda_alike()
    assert mps.get_device(0) == torch.device("mps", 0)
    assert mps.get_available_memory() == (7 * GIB, 10 * GIB)
    assert mps.get_device_total_memory() == 10 * GIB
    assert mps.get_current_memory_usage() == 2 * GIB
    assert mps.get_device_name().startswith("Apple")
    assert not mps.is_pin_memory_available()
    assert mps.shares_host_memory()
    assert mps.current_stream() is mps.create_stream() is None
    assert mps.get_torch_distributed_backend_str() == "gloo"
    assert mps.get_group_coordinator_device(0) == torch.device("cpu")
    event = mps.create_event()
    event.record()
    with pytest.raises(ValueError, match="cuda"):
        mps.set_device(torch.device("cuda"))
    with pytest.raises(NotImplementedError, match="get_device_uuid"):
        mps.get_device_uuid()


# -- TPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The used part of torch_xla, with a record of its calls."""
    calls: list[Any] = []
    info = {"bytes_used": 1 * GIB, "bytes_limit": 16 * GIB, "peak_bytes_used": 3 * GIB}

    def get_memory_info(device: torch.device) -> dict[str, int]:
        calls.append(device)
        return info

    top, runtime, model = (ModuleType(name) for name in ("torch_xla", "runtime", "xla_model"))
    top.__dict__.update(
        device=lambda index: torch.device("xla", index), sync=lambda wait: calls.append(("sync", wait))
    )
    runtime.__dict__.update(addressable_device_count=lambda: 4, device_type=lambda: "TPU")
    model.__dict__.update(
        xla_device_hw=lambda device: f"TPU of {device}",
        get_memory_info=get_memory_info,
        set_rng_state=lambda seed: calls.append(("seed", seed)),
    )
    monkeypatch.setitem(sys.modules, "torch_xla", top)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    monkeypatch.setitem(sys.modules, "torch_xla.core", ModuleType("core"))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    return calls


def test_tpu(xla: list[Any]) -> None:
    tpu = make("tpu")
    assert tpu.is_tpu()
    assert tpu.device_count() == 4
    assert tpu.get_device(3) == torch.device("xla", 3)
    tpu.set_device(tpu.get_device(3))
    with pytest.raises(ValueError, match="TPU_VISIBLE_CHIPS"):
        tpu.get_device(4)
    assert tpu.get_device_name(1) == "TPU of xla:1"
    assert tpu.get_available_memory(2) == (15 * GIB, 16 * GIB)
    assert xla[-1] == torch.device("xla", 2)
    assert tpu.get_device_total_memory() == 16 * GIB
    assert tpu.get_current_memory_usage() == 3 * GIB
    tpu.synchronize()
    assert xla[-1] == ("sync", True)
    tpu.seed_everything(9)
    assert xla[-1] == ("seed", 9)
    tpu.empty_cache()
    assert tpu.get_torch_distributed_backend_str() == "xla"
    with tpu.inference_mode():
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    with pytest.raises(NotImplementedError, match="create_event"):
        tpu.create_event()


def test_tpu_detection(xla: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert detect("tpu") is None
    sys.modules["torch_xla.runtime"].__dict__["device_type"] = lambda: "CPU"
    assert detect("tpu") == "torch_xla found a device of type CPU"


# -- several devices ------------------------------------------------------------------------------------


def test_a_worker_sees_one_device_as_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = make("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-5")
    with cuda.reindex_device_id(1) as device_id:
        assert device_id == 0
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2, GPU-5"
    with pytest.raises(ValueError, match=r"reindex_device_id\(2\).*CUDA_VISIBLE_DEVICES=2,GPU-5"):
        cuda.reindex_device_id(2).__enter__()


@pytest.mark.parametrize("before", [None, "0,1"])
def test_the_variable_is_restored_after_an_error(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", before)

    def start_a_worker_that_fails() -> None:
        with make("rocm").reindex_device_id(1):
            assert os.environ["HIP_VISIBLE_DEVICES"] == "1"
            raise KeyError

    with pytest.raises(KeyError):
        start_a_worker_that_fails()
    assert os.environ.get("HIP_VISIBLE_DEVICES") == before


def test_without_a_variable_the_worker_sees_all_and_the_id_stays() -> None:
    with make("cpu").reindex_device_id(3) as device_id:
        assert device_id == 3


# -- graphs ---------------------------------------------------------------------------------------------


def test_a_cuda_graph_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn("cuda")
    graphs: list[SimpleNamespace] = []

    def new_graph() -> SimpleNamespace:
        graphs.append(SimpleNamespace(replay=lambda: stand_in.calls.append(("replay",))))
        return graphs[-1]

    @contextmanager
    def capturing(graph: Any) -> Any:
        stand_in.calls.append(("capture", graph))
        yield

    stand_in.__dict__.update(CUDAGraph=new_graph, graph=capturing)
    monkeypatch.setattr(torch, "cuda", stand_in)
    graph = make("cuda").create_graph()
    assert graph.capture(lambda: "output") == "output"
    graph.replay()
    assert stand_in.calls == [("capture", graphs[0]), ("replay",)]


# -- the multimodal side --------------------------------------------------------------------------------


def test_one_device_mixin_serves_both_engines() -> None:
    from sgl_aspects.platforms import MMPlatform
    from sgl_aspects.platforms.cpu import CpuDeviceMixin

    class AcmeDevice(CpuDeviceMixin):
        _enum = PlatformEnum.OOT
        device_name = "acme"

    class AcmeMM(AcmeDevice, MMPlatform):
        pass

    class AcmeSRT(AcmeDevice, SRTPlatform):
        pass

    platform = AcmeMM()
    for cls in (AcmeMM, AcmeSRT):
        assert cls.__mro__.count(DeviceMixin) == 1
    assert platform.get_available_memory()[0] > 0
    assert platform.get_torch_distributed_backend_str() == "gloo"
    assert not platform.is_amp_supported()
    assert not platform.is_float64_supported()
    vae = torch.nn.Identity()
    assert platform.optimize_vae(vae) is vae
    with pytest.raises(NotImplementedError, match=r"AcmeMM.*'acme'.*get_attn_backend_cls_str\(\)"):
        platform.get_attn_backend_cls_str(None, 64, torch.float32)
