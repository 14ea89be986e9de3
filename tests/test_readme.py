"""The README's program works as described."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.processes import finished, output_of, python

ROOT = Path(__file__).parent.parent


def first_hook() -> tuple[str, str]:
    """The README's first program, and what it prints."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def test_the_first_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    program, output = first_hook()
    script = tmp_path / "first_hook.py"
    script.write_text(program)
    assert output_of(python(script)) == output
    assert (ROOT / "examples" / "first_hook.py").read_text() == program


@pytest.mark.slow
def test_the_first_commands_need_wrapt_and_opentelemetry_alone(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"```\n(git clone) <[^>]+> (.*?)```", text, re.DOTALL)
    assert found is not None
    commands = f"{found[1]} --quiet {shlex.quote(str(ROOT))} {found[2]}"
    done = finished("bash", "-euc", commands, cwd=tmp_path, without=("PYTHONPATH",))
    assert output_of(done).endswith(first_hook()[1])


def test_every_path_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    for path in links + re.findall(r"^\| `([a-z_/.]+)`", text, re.MULTILINE):
        if not path.startswith("aspects."):
            assert (ROOT / path.partition("#")[0]).exists(), path


def test_every_command_the_readme_names_exists() -> None:
    from sgl_aspects.cli.main import COMMANDS

    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"sgl-aspects ([a-z]+)", text))
    assert named <= {command.name for command in COMMANDS}
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", text):
        assert f"\n{target}:" in makefile, target
