"""An engine's calls of torch.cuda: reported with their callers, and passed to the platform on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
VENDOR = ROOT / "examples" / "vendor_platform"
PLATFORM = "loopback=loopback_platform.platform:LoopbackPlatform"
PROGRAM = """
    import json
    import multiprocessing
    import torch
    from sglang.srt.model import uses_cuda

    def work():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            inside = torch.cuda.current_stream() is stream
        return torch.cuda.get_device_name(0), total, type(stream).__name__, inside, uses_cuda

    if __name__ == "__main__":
        print(json.dumps(work()))
        torch.manual_seed(1)
        child = multiprocessing.get_context("spawn").Process(target=work)
        child.start()
        child.join()
    """
COMMON = """
    from functools import lru_cache

    @lru_cache(maxsize=1)
    def is_cuda():
        return True
    """
MODEL = """
    from sglang.srt.utils.common import is_cuda

    _is_cuda = is_cuda()
    uses_cuda = _is_cuda
    """


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake SGLang whose model copies a helper's result, and a program that is written for CUDA."""
    for name, source in {
        "sglang/__init__.py": "",
        "sglang/srt/__init__.py": "",
        "sglang/srt/utils/__init__.py": "from sglang.srt.utils.common import is_cuda\n",
        "sglang/srt/utils/common.py": COMMON,
        "sglang/srt/model.py": MODEL,
        "program.py": PROGRAM,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    paths = [str(tmp_path), str(VENDOR), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path / "program.py"


def test_calls_go_to_the_platform_on_request(program: Path) -> None:
    command = [sys.executable, "-m", "sgl_aspects", "run", "--level", "0", "--", sys.executable, str(program)]
    environment = {**os.environ, "SGLANG_PLATFORM": PLATFORM, "ASPECTS_DEVICE_CALLS": "platform"}
    environment["LOOPBACK_MEMORY_MIB"] = "1000"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[0])
    assert answers == ["Loopback L100", 1000 << 20, "LoopbackStream", True, False]


def test_the_doctor_names_each_call_with_its_caller(
    program: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASPECTS_DEVICE_CALLS", "platform")
    words = ["doctor", "--json", "--platform", PLATFORM, "--", sys.executable, str(program)]
    assert main(words) == 0
    printed = capfd.readouterr().out
    found: list[dict[str, Any]] = json.loads(printed[printed.index("[\n") :])
    callers = {each["call"]: each["caller"].rpartition("/")[2] for each in found}
    assert callers["torch.cuda.synchronize"] == "program.py:8 in work"
    assert callers["sglang.srt.utils.common.is_cuda"] == "model.py:4 in <module>"
    assert {each["answered_by"] for each in found} == {"platform"}
    assert len({each["process_id"] for each in found}) == 2
    assert "torch.cuda.random.manual_seed_all" not in callers  # torch's own


def test_the_doctor_lists_calls_that_the_platform_implements(
    program: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unanswered, the program fails on a machine without CUDA; the calls until then are reported."""
    assert main(["doctor", "--platform", PLATFORM, "--", sys.executable, str(program)]) != 0
    printed = capfd.readouterr().out
    assert "2 calls for CUDA were reached on platform 'loopback=" in printed
    assert "torch.cuda.synchronize: SGL_ASPECTS_DEVICE_CALLS=platform passes it to the platform" in printed
    assert "program.py:8 in work" in printed


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--platform", "cpu"]) == 2
    assert "write the command after --" in capsys.readouterr().err


def test_an_unknown_platform_is_an_error_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ran"
    assert main(["doctor", "--platform", "zzz", "--", "touch", str(file)]) == 2
    errors = capsys.readouterr().err
    assert "Platform 'zzz': no platform has this name" in errors
    assert "cpu" in errors.partition("Built-in:")[2]
    assert not file.exists()
