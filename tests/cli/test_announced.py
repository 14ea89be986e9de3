"""What `sgl-aspects run` says on standard error: what is traced, where it goes, and whether it got there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import command, free_port, without_room


def test_what_is_traced_and_where_it_goes_is_said_once(tmp_path: Path) -> None:
    program, file = ("--", sys.executable, "-c", ""), tmp_path / "spans.jsonl"
    done = command("run", "--level", "2", "--file", "spans.jsonl", *program, cwd=tmp_path)
    said = without_room(done.stderr)
    assert said == f"sgl-aspects: tracing requests + scheduler (--level 2) to {file}\n"
    assert command("run", "--level", "0", *program).stderr == ""


def test_a_backend_that_is_not_there_is_two_lines_and_no_wait() -> None:
    hint = "(nothing listens there yet; for hooks alone: --level 0)"
    endpoint, waits = f"http://localhost:{free_port()}", "600"  # longer than this test
    program = ("--", sys.executable, "-c", "")
    done = command("run", "--endpoint", endpoint, *program, ASPECTS_TRACE_FLUSH_SECONDS=waits)
    assert without_room(done.stderr).splitlines() == [
        f"sgl-aspects: tracing requests (--level 1) to {endpoint} {hint}",
        f"sgl-aspects collector: nothing listens at {endpoint}: start a backend there, or choose --file FILE",
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "1>/dev/full"])
@pytest.mark.parametrize("options", [("--file", "spans.jsonl"), ("--dormant",)], ids=["traced", "dormant"])
def test_a_program_runs_wherever_it_cannot_be_said(
    where: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Where standard error is closed, what is said does not go among the program's output either."""
    traced = (sys.executable, "-m", "sgl_aspects", "run", *options, "--")
    code = "open('ran', 'x').close()" + ("; import os; os.write(1, b'1')" if "2>" in where else "")
    program = ("sh", "-c", f'exec "$@" {where}', "sh", *traced, sys.executable, "-c", code)
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(program, cwd=tmp_path, env=unbuffered, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == ("" if "1>" in where else "1")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["trace", "hook"])
def test_a_function_of_the_program_s_own_file_is_said_to_be_out_of_reach(tmp_path: Path, kind: str) -> None:
    declared = '[[hook]]\nhook = "json:dumps"\ntype = "before"\n' if kind == "hook" else "[[trace]]\n"
    (tmp_path / "aspects.toml").write_text(f'{declared}target = "__main__:f"\n')
    (tmp_path / "program.py").write_text("def f(): pass\nf()\n")
    program = ("--config", "aspects.toml", "--", sys.executable, "program.py")
    done = command("run", "--file", "spans.jsonl", *program, cwd=tmp_path)
    assert done.returncode == 0
    assert "__main__:f is not woven" in done.stderr
    assert "move the function to a module that it imports" in done.stderr
