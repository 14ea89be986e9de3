"""The agent's work inside the process that is attached to."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects.attach import agent
from sgl_aspects.run import entry
from sgl_aspects.weaving import in_pieces
from tests.support.attachable import SECONDS
from tests.support.stand_ins import Engine


class _Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("is_frozen", [True, False])
def test_garbage_of_the_engine_does_not_stay_where_it_froze_its_objects(is_frozen: bool) -> None:
    if is_frozen:
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        garbage = [weakref.ref(_Cycle())]
        with in_pieces(), agent._beside_the_engine():
            garbage.append(weakref.ref(_Cycle()))
            assert gc.get_freeze_count() == 0
        assert bool(gc.get_freeze_count()) is bool(before) is is_frozen
        gc.collect()
        assert [each() for each in garbage] == [None, None]
    finally:
        gc.unfreeze()


def test_a_search_of_the_heap_rests_in_between() -> None:
    held = [json.dumps]
    with in_pieces(rest=3):
        begin, used = time.perf_counter(), time.thread_time()
        handle = aspects.weave(aspects.before("json:dumps")(lambda *args, **kwargs: None))
        share = (time.thread_time() - used) / (time.perf_counter() - begin)
        assert held == [json.dumps]
        handle.remove()
    assert share < 0.5


def test_the_first_traced_step_has_nothing_to_import() -> None:
    """It would wait for the weaver's lock: real SGLang stood still for 5 to 12 s, as long as weaving took."""
    code = """
import sys, torch
from sgl_aspects.attach import agent
from sgl_aspects.engines.sglang.roles import _platform_of
agent._import_devices()
before = set(sys.modules)
assert _platform_of("cpu") is not None
assert not [name for name in set(sys.modules) - before if name.startswith("sgl_aspects")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_a_late_detach_of_an_earlier_run_leaves_the_one_that_has_taken_over(tmp_path: Path) -> None:
    """As from the guard of a command that was killed, when another command has attached meanwhile."""
    code = """
first, second = sys.argv[2:]
perform("attach", first)
assert perform("attach", second)["woven"] == ["json:dumps"]
assert perform("detach", first)["restored"] == 0
assert hasattr(json.dumps, "__wrapped__")
assert perform("detach", second)["restored"] == 1
assert not hasattr(json.dumps, "__wrapped__")
"""
    _attach_itself(code, tmp_path, tmp_path / "first", tmp_path / "second")


def test_an_original_that_another_patch_covers_is_said_not_to_be_back(tmp_path: Path) -> None:
    code = """
assert perform("attach", sys.argv[2])["woven"] == ["json:dumps"]
woven = json.dumps
json.dumps = lambda *words: woven(*words)
answer = perform("detach", sys.argv[2])
assert (answer["restored"], answer["not_restored"]) == (0, ["json:dumps"]), answer
"""
    _attach_itself(code, tmp_path, tmp_path / "run")


@pytest.mark.parametrize("has_one", [True, False])
def test_a_full_ring_ends_nothing_before_there_is_a_collector(has_one: bool, tmp_path: Path) -> None:
    code = f"""
import pathlib, time
perform("attach", sys.argv[2])
pathlib.Path(sys.argv[2], "collector.lock").touch() if {has_one} else None  # it has ended
for _ in range(40_000):
    json.dumps(1)
deadline = time.monotonic() + ({SECONDS} if {has_one} else 1)
while hasattr(json.dumps, "__wrapped__") and time.monotonic() < deadline:
    time.sleep(0.02)
assert hasattr(json.dumps, "__wrapped__") is not {has_one}
"""
    _attach_itself(code, tmp_path, tmp_path / "run")


_PERFORM = """
import json, sys
import sgl_aspects as aspects
from sgl_aspects.attach import agent

def perform(operation, folder):
    environment = {"SGL_ASPECTS_TRACE": "3", "SGL_ASPECTS_TRACE_RUN": folder}
    environment["SGL_ASPECTS_CONFIG"] = sys.argv[1]
    request = {"operation": operation, "version": aspects.__version__, "environment": environment}
    return agent.perform(request)
"""


def _attach_itself(code: str, tmp_path: Path, *folders: Path) -> None:
    """Run code in a process that attaches to itself, for runs in these folders."""
    for folder in folders:
        folder.mkdir()
    configuration = tmp_path / "aspects.toml"
    configuration.write_text('[[trace]]\ntarget = "json:dumps"\n')
    words: list[str | Path] = [sys.executable, "-c", _PERFORM + code, configuration, *folders]
    subprocess.run(words, check=True, timeout=200)


def test_an_import_does_not_wait_for_a_thread_that_weaves_in_pieces(engine: Engine) -> None:
    """As an engine's thread imports while another attaches: its hooks come when that has woven."""
    engine.write("later.py", "def f(): return 1\n\nclass Base: ...\n")
    entered, imported = threading.Event(), threading.Event()

    class Slow(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            entered.set()
            assert imported.wait(30)
            super().__setattr__(name, value)

    module = ModuleType("slow")
    vars(module)["A"] = Slow("A", (), {"f": lambda self: 1})
    sys.modules["slow"] = module
    handles = [aspects.weave(aspects.around("later:f")(lambda call: call() + 1))]

    def attach() -> None:
        with in_pieces(rest=0):
            handles.append(aspects.weave(aspects.around("slow:A.f")(lambda call, self: call(self) + 1)))

    def load() -> None:
        importlib.import_module("later")
        imported.set()

    attaching, loading = threading.Thread(target=attach), threading.Thread(target=load)
    try:
        attaching.start()
        assert entered.wait(60)
        loading.start()
        loading.join(60)
        assert not loading.is_alive()
    finally:
        imported.set()
        attaching.join(60)
        loading.join(60)
        del sys.modules["slow"]
    assert module.A().f() == 2
    assert sys.modules["later"].f() == 2
    for handle in handles:
        handle.remove()
    assert sys.modules["later"].f() == 1


def test_two_attaches_at_once_leave_the_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that began first ends first: the other must not restore what it has found meanwhile."""
    function = "sgl_aspects.attach.agent:perform"
    both = threading.Barrier(2)

    def import_together(_: str) -> ModuleType:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        if threading.current_thread() is threads[1]:
            threads[0].join(1)  # not for ever: this one may have begun first
        return agent

    def state() -> tuple[object, ...]:
        return dict(os.environ), sys.getswitchinterval(), [*sys.path], [*sys.meta_path]

    monkeypatch.setattr(importlib, "import_module", import_together)
    before = state()
    threads = [threading.Thread(target=entry.enter, args=(str(tmp_path), key)) for key in "ab"]
    for key, thread in zip("ab", threads):
        request = {"version": "another", "pause": 0.01, "package": str(tmp_path), "function": function}
        (tmp_path / f"{key}.request").write_text(json.dumps(request))
        thread.start()
    for thread in threads:
        thread.join()
    for key in "ab":
        assert "attach with the version that is loaded" in (tmp_path / f"{key}.answer").read_text()
    assert state() == before
