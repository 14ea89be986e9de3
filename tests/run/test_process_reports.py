"""Reports of each process's hooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_report_has_no_option_of_the_command(tmp_path: Path) -> None:
    """It may be a key."""
    run = [sys.executable, "-m", "sgl_aspects", "run", "--level", "0", "--report", str(tmp_path), "--"]
    program = [sys.executable, "-c", "print('hello')", "--api-key", "secret-1", "--token=secret-2"]
    subprocess.run([*run, *program], check=True, timeout=120)
    texts = [file.read_text() for file in tmp_path.iterdir()]
    assert any("hello" in text for text in texts)
    assert not any("secret" in text for text in texts)
