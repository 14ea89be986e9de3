"""Real SGLang on platforms of ours, started without ``--device``: the platform names its device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import output_of, python

pytest.importorskip("sglang")

from tests.support.distributions import install
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
VENDOR = Path(__file__).resolve().parents[3] / "examples" / "vendor_platform"


def vendor_package(folder: Path) -> dict[str, str]:
    """Entry points of the vendor's package and of a bridge to CUDA, as their installation writes them."""
    install(
        folder,
        "vendors",
        "[sglang.srt.platforms]\n"
        "loopback = loopback_platform:activate_for_sglang\n"
        "oot_cuda = vendors:activate\n"
        "pages32 = vendors:activate_pages\n",
    )
    (folder / "vendors.py").write_text(
        "def activate():\n    return 'vendors_cuda.Cuda'\n"
        "def activate_pages():\n    return 'vendors_pages.Pages'\n"
    )
    (folder / "vendors_pages.py").write_text(
        "from sgl_aspects.platforms.cpu import CpuPlatform\n"
        "from sgl_aspects.platforms.sglang_bridge import bridged\n"
        "class Pages32(CpuPlatform):\n"
        "    def apply_server_args_defaults(self, server_args):\n"
        "        server_args.page_size = 32\n"
        "        if 'chunked_prefill_size' in server_args.open_fields:\n"
        "            server_args.chunked_prefill_size = 96\n"
        "Pages = bridged(Pages32)\n"
    )
    (folder / "vendors_cuda.py").write_text(
        "from sgl_aspects.platforms.cuda import CudaPlatform\n"
        "from sgl_aspects.platforms.sglang_bridge import bridged\n"
        "Cuda = bridged(CudaPlatform)\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(VENDOR), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("name", ["sgl_aspects_cpu", "loopback"])
def test_a_server_starts_without_a_device_named(name: str, tmp_path: Path) -> None:
    environment = {"SGLANG_PLATFORM": name, **vendor_package(tmp_path / "site")}
    model = make_mini(tmp_path / "model")
    spans, log = tmp_path / "spans.jsonl", tmp_path / "log"
    run = [sys.executable, "-m", "sgl_aspects", "run", "--level", "3", "--file", str(spans), "--"]
    with serve(model, log, prefix=run, without=["--device"], environment=environment) as server:
        answer = server.chat("the quick brown fox")
    assert answer.usage["completion_tokens"] == 8
    assert "chat mini" in spans.read_text()
    assert "ASPECTS" not in log.read_text()  # SGLang warns of each variable that begins with SGL_


def test_a_live_server_on_a_vendors_platform_names_its_calls_of_cuda(tmp_path: Path) -> None:
    model, log = make_mini(tmp_path / "model"), tmp_path / "log"
    doctor = [sys.executable, "-m", "sgl_aspects", "doctor", "--json", "--platform", "loopback", "--"]
    environment = vendor_package(tmp_path / "site")
    with serve(model, log, prefix=doctor, without=["--device"], environment=environment) as server:
        assert server.chat("the quick brown fox").usage["completion_tokens"] == 8
        os.killpg(server.process.pid, signal.SIGINT)
        server.process.wait(120)
    text = log.read_text()
    calls = json.loads(text[text.index("[\n") : text.rindex("]") + 1])
    assert len({each["process_id"] for each in calls}) > 1
    # At work, not while a module is imported.
    called = {each["call"] for each in calls if "<module>" not in each["caller"]}
    assert "torch.cuda.is_available" in called


DEVICE = """
from sglang.srt.platforms import current_platform
from sglang.srt.utils.common import get_device
print(get_device(), current_platform.get_graph_runner_cls().__name__)
"""


def test_a_bridge_to_cuda_names_the_device_and_sglangs_own_runner(tmp_path: Path) -> None:
    variables = {"SGLANG_PLATFORM": "oot_cuda", **vendor_package(tmp_path)}
    printed = output_of(python("-W", "ignore", "-c", DEVICE, variables=variables))
    assert printed.split() == ["cuda", "DecodeCudaGraphRunner"]


SETTINGS = """
import sys
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(["--model-path", *sys.argv[1:]])
args.resolve_once()
print(args.resolved_dict()["page_size"], args.resolved_dict()["chunked_prefill_size"])
"""


def test_what_a_user_set_is_not_changed_by_a_platform_in_silence(tmp_path: Path) -> None:
    environment = {"SGLANG_PLATFORM": "pages32", **vendor_package(tmp_path / "site")}
    model = make_mini(tmp_path / "model")

    def settings(*words: str) -> subprocess.CompletedProcess[str]:
        return python("-W", "ignore", "-c", SETTINGS, model, *words, seconds=300, **environment)

    found = settings("--chunked-prefill-size", "64")
    assert found.stdout.split()[-2:] == ["32", "64"], found.stderr
    refused = settings("--page-size", "16")
    assert refused.returncode != 0
    assert "page_size=16: platform 'cpu' sets page_size=32" in refused.stderr
