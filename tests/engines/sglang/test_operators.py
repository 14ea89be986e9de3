"""Real SGLang with our operators attached: the same answers, a vendor's kernel, and another policy, live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPTS = [f"the quick brown fox number {number}" for number in range(4)]
#: A vendor whose rms_norm is wrong.
VENDOR = """
import torch
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl
def rms_norm(x, weight, eps=1e-6, residual=None):
    total = x if residual is None else x + residual
    normed = torch.nn.functional.rms_norm(total, weight.shape, weight, eps)
    normed = normed * torch.linspace(0, 1, len(weight))
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
        # Now the vendor's, in the one process that computes.
        assert ops("--control", str(control), "--set", "deny_vendors=", "--wait", "20")[0] == 0
        assert [server.chat(prompt).text for prompt in PROMPTS] != plain, "its norm is wrong"
        _, states = ops("--control", str(control), "--live")
        assert any(row == ["rms_norm", "any", "vendor.acme.rms_norm"] for row in states[0]["resolved"])
