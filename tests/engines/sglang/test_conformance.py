"""``sgl-aspects conformance --engine sglang``: real SGLang on platforms of ours, each part checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_aspects.platforms.device_mixin import DeviceMixin
from sgl_aspects.platforms.identity import PlatformEnum
from tests.support.distributions import install
from tests.support.page_package import write_package

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[3]
VENDOR = ROOT / "examples" / "vendor_platform"


def run_kit(tmp_path: Path, platform: str, *only: str) -> dict[str, Any]:
    """The loopback vendor's entry points are there as its installation writes them."""
    install(
        tmp_path / "site",
        "loopback-platform",
        "[sgl_aspects.platforms]\nloopback = loopback_platform:activate\n"
        "[sglang.srt.platforms]\nloopback = loopback_platform:activate_for_sglang\n"
        "[sglang.multimodal_gen.platforms]\nloopback = loopback_platform:activate_for_multimodal\n",
        version="0.1.0",
    )
    paths = [str(tmp_path / "site"), str(VENDOR), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "sgl_aspects", "conformance", "--engine", "sglang"]
    command += ["--platform", platform, "--json", str(results)]
    command += ["--only", ",".join(f"sglang.{name}" for name in only)] if only else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert results.read_text(), done.stderr
    found: list[dict[str, Any]] = json.loads(results.read_text())["results"]
    assert done.returncode == (1 if any(each["status"] == "failed" for each in found) else 0)
    return {each["name"]: each for each in found}


def test_a_vendor_whose_one_device_serves_text_and_images_passes(tmp_path: Path) -> None:
    found = run_kit(tmp_path, "loopback")
    # Its attention backend serves no latent rows.
    assert [name for name, each in found.items() if each["status"] != "passed"] == ["sglang.latent"], found
    assert found["sglang.latent"]["status"] == "skipped"
    assert "5 prompts" in found["sglang.greedy"]["detail"]
    assert "LoopbackPlatform" in found["sglang.chosen"]["detail"]
    assert "mha: LoopbackTokenPool" in found["sglang.pools"]["detail"]
    assert "questions" in found["sglang.multimodal"]["detail"]


def test_pools_that_sglang_cannot_use_are_found_and_others_run_with_the_vendors_allocator(
    tmp_path: Path,
) -> None:
    checks = "pools", "allocator", "greedy", "multimodal"
    found = run_kit(tmp_path, "acme=tests.support.acme:AcmePlatform", *checks)
    assert found["sglang.pools"]["status"] == "failed"
    assert found["sglang.pools"]["write"] == "get_kv_pool_cls"
    assert "for SGLang derive it from" in found["sglang.pools"]["detail"]
    assert "DSATokenToKVPool" in found["sglang.pools"]["detail"]
    assert found["sglang.allocator"]["detail"] == "HighPagesFirst"
    assert found["sglang.greedy"]["status"] == "passed", found["sglang.greedy"]
    assert found["sglang.multimodal"]["status"] == "skipped"


def test_a_package_written_from_the_page_passes(tmp_path: Path) -> None:
    write_package(tmp_path / "site")
    found = run_kit(tmp_path, "acme", "questions", "pools", "allocator", "greedy", "latent")
    assert [name for name, each in found.items() if each["status"] != "passed"] == [], found
    assert "mha: AcmePool" in found["sglang.pools"]["detail"]
    assert found["sglang.allocator"]["detail"] == "AcmeAllocator"


def test_which_devices_are_alike_is_the_same_in_all_three_interfaces() -> None:
    """MUSA's answers follow torch.cuda's: SGLang's text engine, its multimodal engine and ours agree."""
    from sglang.multimodal_gen.runtime.platforms import interface as multimodal
    from sglang.srt.platforms import device_mixin as text

    def alike(base: Any, member: Any) -> bool:
        return bool(type("Device", (base,), {"_enum": member})().is_cuda_alike())

    for name, member in PlatformEnum.__members__.items():
        ours = alike(DeviceMixin, member)
        assert ours == (name in ("CUDA", "ROCM", "MUSA", "SAIL"))
        for base, members in (
            (text.DeviceMixin, text.PlatformEnum.__members__),
            (multimodal.Platform, multimodal.PlatformEnum.__members__),
        ):
            if name in members:
                assert alike(base, members[name]) == ours, (name, base)
