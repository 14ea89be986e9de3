"""Reports of every process of a run, and what the commands make of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from sgl_aspects.cli.doctor import diagnose
from sgl_aspects.cli.main import main
from sgl_aspects.run.process_reports import ProcessReport
from sgl_aspects.tracing.record import native
from tests.support.distributions import install
from tests.support.processes import command, error_of, output_of, python
from tests.support.woven_modules import advice, module_of

PLUGIN = """
import sgl_aspects as aspects

def passes_on(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs)

def activate():
    for target in ("victim:used", "victim:idle", "victim:gone", "nowhere.at_all:f", "victim:Number"):
        aspects.HookRegistry.register(target, passes_on, aspects.HookType.AROUND)
"""

VICTIM = """
Number = int
def used(): return 1
def idle(): return 2
def serve():
    used()
"""

PROGRAM = """
import multiprocessing, os, signal, victim
def killed():
    import victim
    victim.used()
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    victim.used()
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=victim.serve)
        process.start(); process.join()
    process = multiprocessing.get_context("spawn").Process(target=killed)
    process.start(); process.join()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of a program whose plugin has a good hook, an idle one, and three that cannot work."""
    site = tmp_path_factory.mktemp("site")
    (site / "hooks_of_victim.py").write_text(PLUGIN)
    (site / "victim.py").write_text(VICTIM)
    (site / "program.py").write_text(PROGRAM)
    install(site, "hooks-of-victim", "[sgl_aspects.plugins]\nvictim = hooks_of_victim:activate\n")
    program = ("--level", "0", "--report", "reports", "--", sys.executable, "program.py")
    output_of(command("run", *program, cwd=site, PYTHONPATH=str(site)))
    return site / "reports"


def test_every_process_leaves_a_report_with_what_its_hooks_did(folder: Path) -> None:
    processes = json.loads(output_of(command("hooks", "--from", folder, "--json")))
    calls = {
        process["process_id"]: {hook["target"]: hook["calls"] for hook in process["report"]["hooks"]}
        for process in processes
    }
    assert len(calls) == 4
    ended = [process["process_id"] for process in processes if process["ended"]]
    assert [calls[process]["victim:used"] for process in ended] == [1, 1, 1]
    # The one that was killed left its first report, and is marked.
    assert [process["ended"] for process in processes].count(False) == 1
    sources = {tuple(hook["source"]) for process in processes for hook in process["report"]["hooks"]}
    assert sources == {("victim", "hooks-of-victim")}


THREADS = """
import atexit, json, threading
def look():  # registered first, so it runs last
    print(json.dumps([thread.name for thread in threading.enumerate()]))
atexit.register(look)
import sgl_aspects
sgl_aspects.load_plugins()
print(json.dumps([thread.name for thread in threading.enumerate()]))
"""


@pytest.mark.parametrize("reports", [False, True])
def test_neither_plugins_nor_reports_start_a_thread(reports: bool, tmp_path: Path) -> None:
    environment = {"SGL_ASPECTS_REPORT": str(tmp_path)} if reports else {}
    printed = output_of(python("-c", THREADS, without=("SGL_ASPECTS",), **environment))
    assert [json.loads(line) for line in printed.splitlines()] == [["MainThread"], ["MainThread"]]


def test_doctor_names_what_is_wrong_and_what_to_do(folder: Path) -> None:
    done = command("doctor", "--from", str(folder), "--json")
    findings = {finding["what"].rpartition(" on ")[2]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1
    assert set(findings) == {"victim:idle", "victim:gone", "nowhere.at_all:f", "victim:Number"}
    assert findings["victim:gone"]["severity"] == "error"
    assert "has no gone" in findings["victim:gone"]["why"]
    assert "alternates" in findings["victim:gone"]["advice"]
    assert findings["victim:idle"]["severity"] == "warning"
    assert "never called" in findings["victim:idle"]["why"]
    assert "not loaded" in findings["nowhere.at_all:f"]["why"]
    assert "is a class" in findings["victim:Number"]["why"]


def test_a_plugin_that_failed_is_a_finding_and_shown_with_the_hooks(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("def activate(): raise KeyError('in the plugin')")
    install(tmp_path, "failing", "[sgl_aspects.plugins]\nbad = failing:activate\n")
    run = ("run", "--level", "0", "--report", "reports", "--", sys.executable, "-c", "pass")
    for _ in range(2):
        output_of(command(*run, cwd=tmp_path, PYTHONPATH=str(tmp_path)))
    for origin in ((), ("--from", "reports")):
        where = {"cwd": tmp_path, "PYTHONPATH": str(tmp_path)}
        assert (
            "plugin bad (failing) failed: KeyError: 'in the plugin'"
            in command("hooks", *origin, **where).stdout
        )
        found = command("doctor", *origin, **where)
        assert found.returncode == 1
        count = "2 processes" if origin else "1 process"
        assert f"error: plugin bad (failing) failed in {count}\n  KeyError: 'in the plugin'\n" in found.stdout


def test_a_class_that_replaces_another_one_is_not_said_to_be_idle() -> None:
    class Faster: ...

    with module_of("class Engine: ...") as engine:
        hook = advice("engine:Engine", HookType.REPLACE, Faster)
        with aspects.woven(hook):
            assert isinstance(engine.Engine(), Faster)
            assert list(diagnose([ProcessReport(1, "serve", True, aspects.report(), {})])) == []


def test_doctor_speaks_to_people_too(folder: Path) -> None:
    text = command("doctor", "--from", str(folder)).stdout
    assert text.splitlines()[0] == "5 hooks in 4 processes, 4 findings"
    assert f"compiled step path: {native.state()}" in text
    assert "error: hooks_of_victim.passes_on on victim:gone" in text


def test_hooks_speaks_to_people_too(folder: Path) -> None:
    text = command("hooks", "--from", str(folder)).stdout
    assert "woven" in text
    assert "[victim (hooks-of-victim)]" in text
    assert "(has not ended, or was killed: the state of its latest report)" in text


def test_the_hooks_of_engines_that_are_not_here_are_one_line(tmp_path: Path) -> None:
    hooks = '[[hook]]\ntarget = "victim:used"\nhook = "victim:passes_on"\ntype = "around"\n'
    (tmp_path / "aspects.toml").write_text(hooks)
    (tmp_path / "victim.py").write_text(
        "def used(): return 1\ndef passes_on(original_fn, *args): return original_fn(*args)\n"
    )
    options = ("--report", "reports", "--config", "aspects.toml", "--file", "spans.jsonl")
    program = ("--", sys.executable, "-c", "import victim; victim.used()")
    output_of(command("run", *options, *program, cwd=tmp_path, PYTHONPATH=str(tmp_path)))
    shown = command("hooks", "--from", str(tmp_path / "reports")).stdout.splitlines()
    assert len(shown) == 3
    assert "victim:used" in shown[1]
    assert "engines that are not loaded here: embedded (" in shown[2]
    assert "sglang (" in shown[2]
    assert command("doctor", "--from", str(tmp_path / "reports")).stdout.splitlines()[:3] == [
        "1 hook in 1 process, 0 findings",
        "tracing: 0 hooks, 0 called",
        shown[2].strip(),
    ]


def test_the_tracings_own_hooks_do_not_hide_a_plugins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"hook_type": "OBSERVE", "state": "WOVEN", "order": 0, "detail": "", "places": [], "errors": 0}
    hook = {**kinds, "hook": "mine:seen", "required": False, "is_counted": True}
    ours, mine = ["tracing", "sgl-aspects"], ["mine", "my-plugin"]
    hooks = [
        {**hook, "target": "engine:Engine.step", "calls": 7, "source": mine},
        *(
            {**hook, "target": f"engine:Engine.m{each}", "calls": each % 2, "source": ours}
            for each in range(60)
        ),
    ]
    report = {"hooks": hooks, "stale": [], "displaced": []}
    process = {"process_id": 7, "command": "serve", "ended": True, "report": report}
    (tmp_path / "7.hooks.json").write_text(json.dumps(process))
    assert main(["hooks", "--from", str(tmp_path)]) == 0
    _, own, tracing = capsys.readouterr().out.splitlines()
    assert "7 calls" in own
    assert "[mine (my-plugin)]" in own
    assert tracing.strip() == "tracing: 60 hooks, 30 called"


def test_a_folder_without_reports_is_one_line(tmp_path: Path) -> None:
    assert "sgl-aspects run --report" in error_of(command("doctor", "--from", str(tmp_path)))
