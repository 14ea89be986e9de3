"""The conformance kit's engine side: a check of real SGLang that fails says why SGLang did not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sgl_aspects.conformance.check import Bench, BrokenPromiseError
from sgl_aspects.engines.sglang import conformance
from sgl_aspects.platforms import current_platform

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


def test_the_first_error_is_told_besides_what_the_parent_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "python"
    engine.write_text(_DIES)
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))
    bench = Bench(current_platform, current_platform.get_device(0), tmp_path)
    with pytest.raises(BrokenPromiseError) as caught:
        conformance.ask(bench, "greedy")
    assert "exit code 3: torch.OutOfMemoryError: the device has no room for the pool" in caught.value.found
    assert "Rank 0 scheduler died" in caught.value.found
