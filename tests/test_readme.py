"""The README's program works as described."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_first_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(
        r"## A first hook\n\n```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", text, re.DOTALL
    )
    assert found is not None
    program, output = found.groups()
    script = tmp_path / "first_hook.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == output
    assert (ROOT / "examples" / "first_hook.py").read_text() == program


def test_every_path_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    for path in links + re.findall(r"^\| `([a-z_/.]+)`", text, re.MULTILINE):
        if not path.startswith("aspects."):
            assert (ROOT / path).exists(), path


def test_every_command_the_readme_names_exists() -> None:
    from sgl_aspects.cli.main import COMMANDS

    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"sgl-aspects ([a-z]+)", text))
    assert named <= {command.name for command in COMMANDS}
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", text):
        assert f"\n{target}:" in makefile, target
