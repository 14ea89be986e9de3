"""Reports of each process's hooks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects.cli.main import main
from sgl_aspects.run.process_reports import ProcessReport, read_all


def test_a_report_has_no_option_of_the_command(tmp_path: Path) -> None:
    """It may be a key."""
    run = [sys.executable, "-m", "sgl_aspects", "run", "--level", "0", "--report", str(tmp_path), "--"]
    program = [sys.executable, "-c", "print('hello')", "--api-key", "secret-1", "--token=secret-2"]
    subprocess.run([*run, *program], check=True, timeout=120)
    texts = [file.read_text() for file in tmp_path.iterdir()]
    assert any("hello" in text for text in texts)
    assert not any("secret" in text for text in texts)


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    """The content of a report, with one hook."""
    with aspects.woven(aspects.before("os:getcwd")(lambda: None)):
        found = ProcessReport(os.getpid(), "python", True, aspects.report(), {})
    values: dict[str, Any] = json.loads(json.dumps(found.as_dict(), default=str))
    values["report"]["stale"] = [{"target": "os:getcwd", "holder": "a tuple"}]
    return values


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("process_id",), "none"),
        (("command",), 5),
        (("failed_plugins",), 5),
        (("report", "displaced"), [5]),
        (("report", "hooks", 0, "calls"), "many"),
        (("report", "hooks", 0, "detail"), 5),
        (("report", "hooks", 0, "places"), [[]]),
        (("report", "hooks", 0, "source"), [5, "a"]),
        (("report", "stale", 0, "holder"), None),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_an_error_that_names_the_file(
    path: tuple[Any, ...],
    value: Any,
    report: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "0-1.hooks.json"
    file.write_text(json.dumps(report))
    assert main(["hooks", "--from", str(tmp_path)]) == 0
    assert "os:getcwd" in capsys.readouterr().out
    inner: Any = report
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    file.write_text(json.dumps(report))
    assert main(["hooks", "--from", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{file} is not a report of this version" in said
    assert "delete it" in said
    assert "Traceback" not in said


def test_a_report_of_any_size_is_not_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder may be another user's."""
    file = tmp_path / "1-aa.hooks.json"
    file.touch()
    os.truncate(file, 100 << 30)
    assert main(["hooks", "--from", str(tmp_path)]) == 2
    assert f"{file} is not a report of this version" in capsys.readouterr().err


_FORKS = """
import os, time
import victim
if not os.fork():
    victim.used()
    print(os.getpid(), flush=True)
    time.sleep(600)
os.wait()
"""


def test_a_forked_child_that_lives_is_asked_for_its_report(tmp_path: Path) -> None:
    """As a pre-forking server's workers: they call what is hooked, and a signal ends them."""
    (tmp_path / "hook.toml").write_text(
        '[[hook]]\ntarget = "victim:used"\nhook = "victim:passes_on"\ntype = "around"\n'
    )
    (tmp_path / "victim.py").write_text("def used(): pass\ndef passes_on(original_fn): original_fn()\n")
    run = [sys.executable, "-m", "sgl_aspects", "run", "--level", "0", "--report", "reports"]
    program = ["--config", "hook.toml", "--", sys.executable, "-c", _FORKS]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [*run, *program], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            calls = {one.process_id: one.report.hooks[0].calls for one in read_all(tmp_path / "reports")}
        finally:
            os.kill(child, signal.SIGKILL)
    assert calls == {process.pid: 0, child: 1}
    assert {one.process_id for one in read_all(tmp_path / "reports")} == {process.pid, child}
