"""Python processes that sgl-aspects starts import nothing from the current folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl_aspects import env, isolated
from sgl_aspects.conformance.check import Bench, BrokenPromiseError
from sgl_aspects.conformance.suite import call_in_processes
from sgl_aspects.engines.sglang.conformance import run_child
from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform
from sgl_aspects.run.collector import CollectorProcess
from sgl_aspects.run.folder import make_run_folder, remove_run_folder
from sgl_aspects.runtime.processes.ranks import RankProcesses
from sgl_aspects.runtime.server_args import ServerArgs
from sgl_aspects.tracing.settings import TraceSettings
from tests.support.attachable import python_of
from tests.support.processes import wait_until

_SHADOWED = ("queue", "json", "contextlib", "dataclasses", "typing")


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_a_collector_runs_no_module_of_the_engines_current_folder(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.10 has no PYTHONSAFEPATH."""
    interpreter = python_of(version)
    if interpreter is None:
        pytest.skip(f"Python {version} is not here")
    mark = tmp_path / "mark"
    for name in _SHADOWED:
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    folder = make_run_folder()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", interpreter)
    try:
        # Its packages may be of another version of Python: that it ends is enough.
        with contextlib.suppress(ConfigError):
            with env.reading_from({"PATH": "/usr/bin:/bin"}):
                settings = TraceSettings.from_environment()
            collector = CollectorProcess(folder, settings.collector_environment(), settings.prints())
            collector.ask_to_end()
            wait_until(lambda: collector.has_ended)
            collector.abandon()
    finally:
        remove_run_folder(folder)
    assert not mark.exists(), mark.read_text()


def test_a_package_is_found_where_this_one_is_and_on_pythonpath_but_replaces_no_standard_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe.py").write_text(
        "import queue, sys, sgl_aspects\nprint(queue, sgl_aspects, *sys.argv[1:])"
    )
    (tmp_path / "queue.py").write_text("raise SystemExit('not of the standard library')")
    monkeypatch.setenv("PYTHONPATH", f"relative::{tmp_path}")
    words = isolated.python("probe", "a word")
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd="/")
    package = Path(isolated.__file__).parent
    assert str(package / "__init__.py") in done.stdout
    assert str(tmp_path) not in done.stdout
    assert done.stdout.endswith("a word\n")


def test_checks_in_sglang_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    for name in ("typing", "contextlib"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    bench = Bench(current_platform, torch.device("cpu"), tmp_path / "bench", "float64")
    with pytest.raises(BrokenPromiseError):
        run_child(bench, "no such check")
    assert not mark.exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
@pytest.mark.parametrize("starts", ["an engine", "a check"])
def test_processes_of_multiprocessing_import_nothing_from_the_current_folder(
    starts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "multiprocessing.py").write_text(f"open({str(mark)!r}, 'a').write('ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if starts == "a check":
        assert call_in_processes(os.getpid, [()]) != [os.getpid()]
    else:
        processes = RankProcesses(ServerArgs(tmp_path / "no model"))
        processes.join(60)
        processes.kill()
    assert not mark.exists()
    assert "PYTHONSAFEPATH" not in os.environ
