"""The conformance kit's engine side: a failed check of real SGLang has the reason why it did not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sgl_aspects.conformance import generation
from sgl_aspects.conformance.check import Bench, BrokenPromiseError
from sgl_aspects.conformance.in_process import generating
from sgl_aspects.conformance.tiny_model import largest_gap, right_tokens, write_tiny_model
from sgl_aspects.engines.sglang import conformance
from sgl_aspects.platforms import current_platform
from tests.support.answers import MARGIN, greedy, margin

_DIES = """#!/bin/sh
cat >&2 <<END
[2026-01-01] Scheduler hit an exception: Traceback (most recent call last):
  File "model_runner.py", line 1, in init
torch.OutOfMemoryError: the device has no room for the pool
Traceback (most recent call last):
RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).
END
exit 3
"""


def test_a_failure_names_the_first_error_and_the_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "python"
    engine.write_text(_DIES)
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))
    bench = Bench(current_platform, current_platform.get_device(0), tmp_path)
    with pytest.raises(BrokenPromiseError) as caught:
        conformance.run_child(bench, "greedy")
    assert "exit code 3: torch.OutOfMemoryError: the device has no room for the pool" in caught.value.found
    assert "Rank 0 scheduler died" in caught.value.found


def test_no_rounding_decides_what_the_kit_generates(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with generating(tmp_path) as engine:
        asked = [*generation.prompts(), *engine.prompts()]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    answers = greedy(model, asked, 24, ignore_eos=True)
    assert min(margin(model, *pair) for pair in zip(asked, answers)) > MARGIN


def test_a_token_that_is_not_the_best_has_a_gap(tmp_path: Path) -> None:
    """In half precision other tokens may come first, but none far from the best."""
    weights, prompts = write_tiny_model(tmp_path), [[1, 2, 3], [4]]
    best = right_tokens("float64", tmp_path, weights, prompts, 3)
    assert largest_gap(weights, prompts, best) == 0
    assert largest_gap(weights, prompts, [best[0], [*best[1][:2], (best[1][2] + 1) % 256]]) > 1
