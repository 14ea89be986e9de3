"""Real SGLang with our operators attached: the same answers, a vendor's kernel, and shadow mode, live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPTS = [f"the quick brown fox number {number}" for number in range(4)]
#: A vendor whose rms_norm counts its calls in a file, and is wrong where the weight is that of one layer.
VENDOR = """
import os, torch
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl
seen = []
def rms_norm(x, weight, eps=1e-6, residual=None):
    if not any(weight is other for other in seen):
        seen.append(weight)
    total = x if residual is None else x + residual
    normed = torch.nn.functional.rms_norm(total, weight.shape, weight, eps)
    if len(seen) > 4 and weight is seen[4]:
        normed = normed * 1.05
    return normed if residual is None else (normed, total)
def register(registry):
    registry.register(OpImpl("rms_norm", "vendor.acme.rms_norm", ImplKind.VENDOR, rms_norm, vendor="acme"))
"""


def ops(*words: str) -> tuple[int, Any]:
    command = [sys.executable, "-m", "sgl_aspects", "ops", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def test_operators_attached_to_sglang_answer_as_its_own(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_mini(model)
    run = (sys.executable, "-m", "sgl_aspects", "run", "--file", str(tmp_path / "spans.jsonl"), "--")
    with serve(model, tmp_path / "plain.log") as server:
        plain = [server.chat(prompt).text for prompt in PROMPTS]
    control = tmp_path / "control"
    (tmp_path / "vendors" / "acme").mkdir(parents=True)
    (tmp_path / "vendors" / "acme" / "__init__.py").write_text(VENDOR)
    environment = {
        "SGL_ASPECTS_OP_ATTACH": "1",
        "SGL_ASPECTS_OP_CONTROL": str(control),
        "SGL_ASPECTS_OP_VENDOR_PATH": str(tmp_path / "vendors"),
        "SGL_ASPECTS_OP_DENY_VENDORS": "acme",
    }
    with serve(model, tmp_path / "attached.log", prefix=run, environment=environment) as server:
        assert [server.chat(prompt).text for prompt in PROMPTS] == plain
        status, states = ops("--control", str(control), "--live")
        assert status == 0
        assert any(row == ["rms_norm", "any", "reference.rms_norm"] for row in states[0]["resolved"])
        # Now the vendor's, and a second look at each of its calls.
        words = ("--set", "deny_vendors=", "--shadow", "rms_norm=reference", "--rate", "1", "--wait", "20")
        assert ops("--control", str(control), *words)[0] == 0
        server.chat("hello")
        deadline = time.monotonic() + 20
        while True:
            status, states = ops("--control", str(control), "--live")
            if status == 1 or time.monotonic() > deadline:
                break
        # The other processes import the layers, too, and compute nothing.
        (first,) = filter(None, (state["watch"]["first_difference"] for state in states))
        assert first["impl"] == "vendor.acme.rms_norm"
        assert first["layer"] == "layers.2.input_layernorm"  # the fifth of two a layer
        assert 0.04 < first["worst"] < 0.06
