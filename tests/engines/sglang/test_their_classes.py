"""SGLang's own classes in the embedded engine, as they are: so those of vendors derived from them run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.support.distributions import install

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[3]
PLATFORM = """
from sgl_aspects.platforms import PlatformEnum, SRTPlatform
from sgl_aspects.platforms.cpu import CpuDeviceMixin


class Theirs(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "theirs"

    def get_default_attention_backend(self):
        return "theirs"

    def get_attention_backends(self):
        return {"theirs": "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend"}

    def get_mha_kv_pool_cls(self):
        return "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool"

    def get_paged_allocator_cls(self):
        return "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator"
"""
PACKAGE = """
def activate():
    return "their_platform:Theirs"

def activate_for_sglang():  # SGLang's modules want to know the platform that is named
    return "their_bridge.Theirs"
"""
BRIDGE = """
import their_platform
from sgl_aspects.platforms.sglang_bridge import bridged
Theirs = bridged(their_platform.Theirs)
"""


def test_pool_allocator_and_attention_of_sglang_pass_the_embedded_engines_kit(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(
        site,
        "theirs",
        "[sgl_aspects.platforms]\ntheirs = their_package:activate\n"
        "[sglang.srt.platforms]\ntheirs = their_package:activate_for_sglang\n",
        version="1.0",
    )
    texts = {"their_platform": PLATFORM, "their_package": PACKAGE, "their_bridge": BRIDGE}
    for name, text in texts.items():
        (site / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "-W", "ignore", "-m", "sgl_aspects", "conformance", "--platform", "theirs"]
    command += ["--only", "kv_pools,attention,generation", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["name"]: each for each in json.loads((tmp_path / "found.json").read_text())["results"]}
    assert "equal to" in found["generation.greedy"]["detail"]
