"""Platforms: identity, capability data, the CPU's operations, conservative defaults, the lazy proxy."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sgl_aspects import platforms
from sgl_aspects.errors import ConfigError, PlatformError
from sgl_aspects.platforms import (
    ClockEvent,
    CpuArchEnum,
    DeviceCapability,
    PlatformCapabilities,
    PlatformEnum,
    SRTPlatform,
    bounded,
    current_platform,
    current_platform_choice,
    set_current_platform,
)
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.platforms.cuda import CudaPlatform, CudaSRTPlatform
from sgl_aspects.platforms.host_memory import cgroup_limits
from sgl_aspects.platforms.rocm import RocmPlatform, RocmSRTPlatform
from tests.support.torch_programs import run_with_torch

# -- exports and data -------------------------------------------------------------------------------------


def test_exports_equal_all() -> None:
    public = {
        name
        for name, value in vars(platforms).items()
        if not name.startswith("_") and type(value) is not type(os)
    }
    assert public == set(platforms.__all__)
    assert list(platforms.__all__) == sorted(platforms.__all__)


def test_device_capability_compares_and_prints() -> None:
    assert DeviceCapability(9, 0) > DeviceCapability(8, 9) > DeviceCapability(8, 0)
    assert DeviceCapability(9, 0).as_version_str() == "9.0"
    assert DeviceCapability(8, 9).to_int() == 89
    major, minor = DeviceCapability(8, 9)
    assert (major, minor) == DeviceCapability(8, 9) >= (8, 0)
    with pytest.raises(ValueError, match="minor is one digit"):
        DeviceCapability(8, 10).to_int()


def test_capabilities_are_frozen_and_nothing_is_assumed() -> None:
    assert not any(vars(PlatformCapabilities()).values())
    with pytest.raises(AttributeError):
        PlatformCapabilities().graph_capture = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("machine", "architecture"),
    [
        ("x86_64", CpuArchEnum.X86),
        ("AMD64", CpuArchEnum.X86),
        ("aarch64", CpuArchEnum.ARM),
        ("arm64", CpuArchEnum.ARM),
        ("riscv64", CpuArchEnum.RISCV),
        ("ppc64le", CpuArchEnum.POWERPC),
        ("sparc", CpuArchEnum.UNKNOWN),
    ],
)
def test_cpu_architecture(machine: str, architecture: CpuArchEnum) -> None:
    assert CpuArchEnum.from_machine(machine) is architecture


# -- identity -------------------------------------------------------------------------------------------

IDENTITY_QUERIES = {
    "is_cuda": PlatformEnum.CUDA,
    "is_rocm": PlatformEnum.ROCM,
    "is_cpu": PlatformEnum.CPU,
    "is_xpu": PlatformEnum.XPU,
    "is_musa": PlatformEnum.MUSA,
    "is_npu": PlatformEnum.NPU,
    "is_tpu": PlatformEnum.TPU,
    "is_mps": PlatformEnum.MPS,
    "is_hpu": PlatformEnum.HPU,
    "is_sail": PlatformEnum.SAIL,
    "is_out_of_tree": PlatformEnum.OOT,
}


@pytest.mark.parametrize("member", list(PlatformEnum))
def test_identity_queries_say_exactly_one_family(member: PlatformEnum) -> None:
    platform = type("Some", (SRTPlatform,), {"_enum": member})()
    set_current_platform(platform)
    for query, family in IDENTITY_QUERIES.items():
        assert getattr(platform, query)() is (family is member), query
        assert getattr(platforms, query)() is (family is member), query  # the thin helper of the same name
    alike = member in (PlatformEnum.CUDA, PlatformEnum.ROCM, PlatformEnum.MUSA, PlatformEnum.SAIL)
    assert platform.is_cuda_alike() is platforms.is_cuda_alike() is alike


# -- conservative defaults ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "device_count()",
        "get_device(0)",
        "set_device(None)",
        "get_device_name()",
        "get_device_uuid()",
        "get_device_total_memory()",
        "get_available_memory()",
        "get_current_memory_usage()",
        "empty_cache()",
        "synchronize()",
        "create_event()",
        "current_stream()",
        "get_torch_distributed_backend_str()",
        "create_graph()",
        "use_stream(object())",
        "get_default_attention_backend()",
        "get_graph_runner_cls()",
        "get_compile_backend()",
        "get_piecewise_backend_cls()",
        "get_speculative_worker_cls('eagle')",
        "get_speculative_graph_runner_cls('eagle', 'draft_decode')",
    ],
)
def test_what_is_not_written_names_class_device_and_method(call: str) -> None:
    class Acme(SRTPlatform):
        device_name = "acme"

    method = call.partition("(")[0]
    with pytest.raises(NotImplementedError) as caught:
        eval(f"platform.{call}", {"platform": Acme()})
    assert "Acme" in str(caught.value)
    assert "'acme'" in str(caught.value)
    assert f"{method}()" in str(caught.value)


def test_defaults_of_a_bare_platform_promise_nothing() -> None:
    bare = SRTPlatform()
    assert not bare.support_cuda_graph()
    assert not bare.support_piecewise_cuda_graph()
    assert not bare.supports_fp8()
    assert not bare.is_pin_memory_available()
    assert not bare.is_capturing()
    assert bare.get_device_capability() is None
    assert bare.get_attention_backends() == {}
    assert bare.get_dispatch_key_name() == "native"
    assert bare.create_stream() is None
    assert bare.get_communicator_class() is None
    assert bare.get_quantization_config("fp8") is None
    assert not bare.supports_speculative_algorithm("eagle")
    assert bare.needs_graph_recapture()
    assert bare.get_graph_label() == "unspecified graph"
    with bare.reindex_device_id(3) as device_id, bare.use_stream(None):
        assert device_id == 3
    with pytest.raises(ValueError, match="'fp8'"):
        bare.verify_quantization("fp8")


def test_declared_quantization_is_accepted_and_named() -> None:
    class Acme(SRTPlatform):
        device_name = "acme"
        supported_quantization = ("fp8", "awq")

    Acme().verify_quantization("awq")
    with pytest.raises(ValueError, match=r"'acme'.*fp8, awq.*'gptq'"):
        Acme().verify_quantization("gptq")


def test_kv_pool_by_kind_answers_through_the_named_methods() -> None:
    class Acme(SRTPlatform):
        def get_mla_kv_pool_cls(self) -> type | str:
            return dict

        def get_nsa_kv_pool_cls(self) -> type | str:
            return "acme.pools:Sparse"

    assert Acme().get_kv_pool_cls(kind="mha") == Acme().get_mha_kv_pool_cls()
    assert Acme().get_kv_pool_cls(kind="mla") is dict
    assert Acme().get_kv_pool_cls(kind="dsa") == Acme().get_kv_pool_cls(kind="nsa") == "acme.pools:Sparse"
    with pytest.raises(ValueError, match=r"kind='mamba': a KV pool is of kind"):
        Acme().get_kv_pool_cls(kind="mamba")


# -- the CPU --------------------------------------------------------------------------------------------


def test_cpu_operations() -> None:
    cpu = CpuPlatform()
    device = cpu.get_device(local_rank=3)
    assert device == torch.device("cpu")
    cpu.set_device(device)
    with pytest.raises(ValueError, match="cuda:0"):
        cpu.set_device(torch.device("cuda:0"))
    assert cpu.device_count() == 1
    assert cpu.get_device_name()
    assert cpu.get_device_uuid() == cpu.get_device_uuid()
    assert cpu.get_torch_distributed_backend_str() == "gloo"
    assert cpu.get_default_attention_backend() == "torch_native"
    assert cpu.current_stream() is None
    cpu.synchronize()
    cpu.empty_cache()
    with cpu.inference_mode():
        assert torch.is_inference_mode_enabled()


def test_cpu_seed_gives_the_same_numbers_again() -> None:
    import random

    import numpy

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    CpuPlatform().seed_everything(7)
    first = draw()
    CpuPlatform().seed_everything(7)
    assert draw() == first
    CpuPlatform().seed_everything(8)
    assert draw() != first


def test_without_a_seed_nothing_is_seeded() -> None:
    before = torch.get_rng_state()
    CpuPlatform().seed_everything(None)
    CpuPlatform().seed_everything()
    assert torch.equal(torch.get_rng_state(), before)


def test_cpu_memory_is_what_the_machine_has() -> None:
    free, total = CpuPlatform().get_available_memory()
    assert 0 < free <= total == CpuPlatform().get_device_total_memory()


def test_cpu_memory_follows_a_real_allocation(tmp_path: Path) -> None:
    code = """
import torch
from sgl_aspects.platforms.cpu import CpuPlatform
usage = CpuPlatform().get_current_memory_usage
before = usage()
block = torch.ones(256 * 2**20, dtype=torch.uint8)
peak = usage()
assert before + 250 * 2**20 <= peak <= before + 400 * 2**20, (before, peak)
del block
assert usage() >= peak - 8 * 2**20  # the kernel counts in batches of pages
"""
    status, _, errors = run_with_torch(code, os.environ, tmp_path)  # a process of its own: a peak never falls
    assert status == 0, errors


def test_cpu_events_measure_the_clock() -> None:
    cpu = CpuPlatform()
    start, end = cpu.create_event(), cpu.create_event()
    assert not start.query()
    with pytest.raises(RuntimeError, match="first event was never recorded"):
        start.elapsed_ms(end)
    before = time.perf_counter()
    start.record()
    assert start.query()
    with pytest.raises(RuntimeError, match="end event was never recorded"):
        start.elapsed_ms(end)
    time.sleep(0.02)
    end.record()
    longest_ms = (time.perf_counter() - before) * 1000
    assert 20 <= start.elapsed_ms(end) <= longest_ms
    assert start.elapsed_ms(start) == 0
    assert isinstance(start, ClockEvent)


# -- cgroup limits --------------------------------------------------------------------------------------


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_cgroup_version_2_takes_every_limit_above_the_process(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/pod/engine\n")
    root = tmp_path / "fs"
    stat = "anon 100\ninactive_file 300\nactive_file 5"
    write_group(root / "pod", memory__max="4000", memory__current="2000", memory__stat="inactive_file 0")
    write_group(root / "pod/engine", memory__max="1000", memory__current="700", memory__stat=stat)
    assert list(cgroup_limits(proc, root)) == [(1000, 400), (4000, 2000)]


def test_cgroup_version_2_without_a_limit(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/\n")
    write_group(tmp_path / "fs", memory__max="max", memory__current="700", memory__stat="inactive_file 0")
    assert list(cgroup_limits(proc, tmp_path / "fs")) == []


def test_cgroup_version_1_in_a_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("5:devices:/\n4:memory:/docker/abc\n2:cpu,cpuacct:/\n0::/\n")
    group = tmp_path / "fs/memory"
    write_group(
        group,
        memory__limit_in_bytes="9000",
        memory__usage_in_bytes="800",
        memory__stat="inactive_file 1\ntotal_inactive_file 100",
    )
    assert list(cgroup_limits(proc, tmp_path / "fs")) == [(9000, 700)]


def test_available_memory_is_the_tightest_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/a\n")
    limit, used = 50 * 2**20, 20 * 2**20
    write_group(tmp_path / "fs/a", memory__max=str(limit), memory__current=str(used), memory__stat="")
    monkeypatch.setattr("sgl_aspects.platforms.host_memory.PROC_CGROUP", proc)
    monkeypatch.setattr("sgl_aspects.platforms.host_memory.CGROUP_ROOT", tmp_path / "fs")
    assert CpuPlatform().get_available_memory() == (limit - used, limit)


def test_sglangs_names_for_the_same_things() -> None:
    assert CudaSRTPlatform is CudaPlatform
    assert RocmSRTPlatform is RocmPlatform
    assert CudaPlatform().support_device_graph() is CudaPlatform().support_cuda_graph()


@pytest.mark.parametrize(
    ("platform_class", "capability", "can"),
    [
        ("cuda:CudaPlatform", (8, 0), False),
        ("cuda:CudaPlatform", (8, 9), True),
        ("cuda:CudaPlatform", (9, 0), True),
        ("rocm:RocmPlatform", (9, 0), False),
        ("rocm:RocmPlatform", (9, 4), True),
        ("rocm:RocmPlatform", (11, 0), False),
        ("rocm:RocmPlatform", (12, 0), True),
    ],
)
def test_float8_is_what_the_device_can(
    platform_class: str, capability: tuple[int, int], can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device_id: capability)
    cls = platforms.resolve_qualified_name(f"sgl_aspects.platforms.{platform_class}")
    assert cls().supports_fp8() is can


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_cuda_without_a_gpu_is_reported() -> None:
    with pytest.raises(ValueError, match="sees 0 cuda device"):
        CudaPlatform().get_device(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_operations() -> None:
    cuda = CudaPlatform()
    device = cuda.get_device(0)
    cuda.set_device(device)
    assert cuda.device_count() >= 1
    assert cuda.get_device_name()
    assert cuda.get_device_uuid().startswith("GPU-")
    capability = cuda.get_device_capability()
    assert capability is not None
    assert capability.major >= 5
    free, total = cuda.get_available_memory()
    assert 0 < free <= total <= cuda.get_device_total_memory() * 1.1
    start, end = cuda.create_event(), cuda.create_event()
    assert not start.query()
    start.record()
    block = torch.ones(2048, 2048, device=device)
    for _ in range(20):
        block = block @ block / 2048
    end.record()
    end.synchronize()
    assert end.query()
    assert 0 < start.elapsed_ms(end) < 60_000
    cuda.synchronize()
    assert cuda.get_current_memory_usage() >= block.nbytes
    assert not cuda.is_capturing()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert cuda.is_capturing()
        block.add_(1)
    assert not cuda.is_capturing()
    del block, graph
    cuda.empty_cache()
    cuda.seed_everything(3)
    first = torch.rand((), device=device).item()
    cuda.seed_everything(3)
    assert torch.rand((), device=device).item() == first


# -- detection with a time limit -----------------------------------------------------------------------------


def test_a_slow_answer_is_announced_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bounded, "PATIENCE_SECONDS", 0.02)

    def answer_late() -> str:
        time.sleep(0.2)
        return "here"

    assert bounded.ask_within_bound("Platform plugin 'acme'", answer_late) == "here"
    assert "Platform plugin 'acme' is still looking for its hardware; it has 120 s" in caplog.text


@pytest.mark.parametrize("seconds", ["-1", "soon"])
def test_a_bound_that_is_none_is_refused(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_ASPECTS_DETECT_SECONDS", seconds)
    with pytest.raises(ConfigError, match="SGL_ASPECTS_DETECT_SECONDS"):
        bounded.ask_within_bound("x", lambda: None)


# -- the lazy proxy -------------------------------------------------------------------------------------


def test_nothing_is_detected_or_loaded_before_first_use() -> None:
    code = """
import sys, inspect, pickle, functools
import sgl_aspects.platforms as platforms
from sgl_aspects.platforms import current_platform
assert "torch" not in sys.modules and "psutil" not in sys.modules
assert "not chosen yet" in repr(current_platform)
isinstance(current_platform, functools.partial); inspect.unwrap(current_platform); callable(current_platform)
dir(current_platform); pickle.dumps(current_platform)
assert "torch" not in sys.modules and "not chosen yet" in repr(current_platform)
assert current_platform.device_name in ("cpu", "cuda")
assert "Platform" in repr(current_platform)
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_the_proxy_stands_for_one_object() -> None:
    chosen = current_platform_choice().platform
    assert current_platform_choice().platform is chosen
    assert current_platform.get_device == chosen.get_device
    assert pickle.loads(pickle.dumps(current_platform)) is current_platform
    with pytest.raises(AttributeError, match="no_such_thing"):
        current_platform.no_such_thing  # noqa: B018


def test_the_proxy_forwards_patches_to_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    set_current_platform(CpuPlatform())
    monkeypatch.setattr(current_platform, "get_dispatch_key_name", lambda: "patched")
    assert current_platform_choice().platform.get_dispatch_key_name() == "patched"
    monkeypatch.undo()
    assert current_platform.get_dispatch_key_name() == "cpu"


def test_a_failed_choice_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "nonesuch")
    for _ in range(2):
        with pytest.raises(PlatformError, match="nonesuch"):
            current_platform.get_dispatch_key_name()
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu")
    assert current_platform.is_cpu()


def test_usable_in_a_forked_child(tmp_path: Path) -> None:
    code = """
import os, threading
from sgl_aspects.platforms import current, current_platform
held = threading.Event(); release = threading.Event()
def hold():
    with current._lock:
        held.set(); release.wait()
holder = threading.Thread(target=hold); holder.start(); held.wait()
import warnings; warnings.simplefilter("ignore")
child = os.fork()
if child == 0:  # the lock was held by a thread that does not exist here
    os._exit(0 if current_platform.device_type in ("cpu", "cuda") else 1)
_, status = os.waitpid(child, 0)
release.set(); holder.join()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    status, _, errors = run_with_torch(code, os.environ, tmp_path)
    assert status == 0, errors
