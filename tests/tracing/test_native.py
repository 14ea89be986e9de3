"""A plain decode step is recorded in C where there is a compiler, else in Python: the same records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_aspects.tracing.native import build
from sgl_aspects.tracing.ring import format as layout

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")

# A fake engine: twenty steps with what interrupts them. Prints its spans without ids and times.
_ENGINE = """
import ctypes, json, logging, sys, types
from types import SimpleNamespace
from sgl_aspects.weaving import Advice, HookType, Target, weave as weave_advice
from sgl_aspects.engines import EMBEDDED
from sgl_aspects.runtime.scheduling.batch import ForwardMode
from sgl_aspects.tracing import native
from sgl_aspects.tracing.collector.run_reader import RunReader
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.ring import format as layout
from sgl_aspects.tracing.ring.recorder import RingRecorder
from tests.support.rings import read_all

recorded, timed = [], []

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def record(event, stream):
    if Event.broken:
        return 1
    recorded.append((event, stream))
    return 0

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p)
def elapsed(milliseconds, begin, end):
    if not Event.ready:
        return 1
    timed.append((begin, end))
    milliseconds[0] = 2.0
    return 0

class Event:
    ready, broken = True, False
    def recorder(self):
        return ctypes.cast(record, ctypes.c_void_p).value, ctypes.cast(elapsed, ctypes.c_void_p).value, 7
    def marker(self):
        def mark(stream):
            if Event.broken:
                raise RuntimeError("broken")
        return mark
    def timer(self, end):
        def read():
            if not Event.ready:
                raise RuntimeError("not ready")
            return 2.0
        return read

recorder = RingRecorder(sys.argv[1])
recorder.open()
trackers = Trackers.of(EMBEDDED, recorder, DEFAULTS)
found = {o.role: o for kind in (StepObserver, ForwardObserver) for o in kind(trackers).observations()}
reqs = [SimpleNamespace(rid=f"r{n}", output_ids=[]) for n in range(4)]
for req in reqs:
    trackers.requests.resume(trackers.requests.queued(req.rid), 1)
cache = SimpleNamespace(total_size=1000, available_size=lambda: 500)
scheduler = SimpleNamespace(waiting=[], running=reqs, kv_cache=cache, has_work=True)
platform = SimpleNamespace(device_name="chip", create_event=Event, current_stream=lambda: None,
                           stream_handle=lambda stream: 9)
runner = SimpleNamespace(platform=platform)

running = []
woven = types.ModuleType("woven")

def weave(role):
    def function(*args, **kwargs):
        inside, result, error = running.pop()
        inside()
        if error is not None:
            raise error
        return result
    setattr(woven, role, function)
    advice = Advice(Target.parse(f"woven:{role}"), HookType.OBSERVE, found[role])
    advice.caller = found[role].caller
    weave_advice(advice)

def call(role, args, result=None, error=None, inside=lambda: None, **kwargs):
    running.append((inside, result, error))
    try:
        getattr(woven, role)(*args, **kwargs)
    except (ValueError, KeyError) as raised:
        assert raised is error

sys.modules["woven"] = woven
for role in found:
    weave(role)

def step(number, error=None, processing=None, size=4, level=3):
    recorder.steps.words[layout.WORD_LEVEL] = level
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=reqs[:size] if size < 4 else reqs,
                            step_id=number, num_tokens=size)
    result = object()
    call("schedule", (scheduler,), batch, last_batch=None)
    replay = lambda: call("graph_launch", (object(),))
    inside = replay if number % 3 else lambda: None
    forward = lambda: call("forward", (runner,), inside=inside, error=error, batch=batch)
    launched = ((scheduler,), {"batch": batch}) if number in (7, 8) else ((scheduler, batch), {})
    call("run_batch", launched[0], result, error, inside=forward, **launched[1])
    if error is None:
        call("process_batch_result", (scheduler, batch, result), None, processing)

for number in range(1, 31):
    Event.ready, Event.broken = number not in (11, 12), number == 24
    step(number, error=ValueError() if number == 5 else None, processing=KeyError() if number == 9 else None,
         size=3 if number in (14, 15, 20) else 4, level={17: 0, 18: 2, 19: 1}.get(number, 3))
call("schedule", (scheduler,), None)
call("schedule", (scheduler,), None)
assert set(recorded) == ({(7, 9)} if native.compiled else set())
assert len(recorded) > 20 and len(timed) > 7 or not native.compiled
assert trackers.steps.late == [] and trackers.steps.in_flight == [] and trackers.steps.running is None
records = [r for r in read_all(RunReader(sys.argv[1])) if type(r).__name__ == "SpanEnd"]
told = [[r.type.name, list(r.values), r.error, len(r.links), r.start_ns <= r.end_ns] for r in records]
print(json.dumps([native.compiled is not None, told]))
"""


def spans(folder: Path, native: str, more: dict[str, str] | None = None) -> tuple[bool, list[list[object]]]:
    """Whether it was compiled, and the spans that it recorded."""
    folder.mkdir(parents=True)
    environment = {**os.environ, build.VARIABLE: native, **(more or {})}
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    compiled, told = json.loads(done.stdout)
    return compiled, told


@needs_compiler
def test_both_ways_record_the_same_steps(tmp_path: Path) -> None:
    was_compiled, compiled = spans(tmp_path / "compiled", build.AUTO)
    assert was_compiled
    was_compiled, interpreted = spans(tmp_path / "interpreted", build.OFF)
    assert not was_compiled
    # Late device times: the order may differ, but not the records.
    order = json.dumps
    assert sorted(compiled, key=order) == sorted(interpreted, key=order)
    steps = [span for span in compiled if span[0] == "scheduler.step"]
    assert len(steps) > 25


@needs_compiler
def test_what_is_compiled_is_kept_for_the_next_process(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert not spans(tmp_path / "before", build.CACHED, cache)[0]
    assert spans(tmp_path / "first", build.AUTO, cache)[0]
    (made,) = (tmp_path / "cache" / "sgl-aspects").iterdir()
    assert spans(tmp_path / "next", build.CACHED, cache)[0]
    made.chmod(0o666)  # any user may have written to it
    assert not spans(tmp_path / "foreign", build.CACHED, cache)[0]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled, in its cache folder."""
    folder = tmp_path_factory.mktemp("compiled")
    assert spans(folder / "run", build.AUTO, {"XDG_CACHE_HOME": str(folder / "cache")})[0]
    (made,) = (folder / "cache" / "sgl-aspects").iterdir()
    return made


@needs_compiler
@pytest.mark.parametrize("bytes_left", [0, 100, 9000, -1])
def test_a_file_that_was_cut_off_is_compiled_anew(tmp_path: Path, compiled: Path, bytes_left: int) -> None:
    """To load it could end the process with SIGBUS. A compiler that copies is fast."""
    shutil.copytree(compiled.parents[1], tmp_path / "cache")
    (made,) = (tmp_path / "cache" / "sgl-aspects").iterdir()
    made.write_bytes(made.read_bytes()[:bytes_left])
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\nexec cp {compiled} "$last"\n')
    compiler.chmod(0o755)
    more = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CC": str(compiler)}
    assert not spans(tmp_path / "cached", build.CACHED, more)[0]
    assert spans(tmp_path / "second", build.AUTO, more)[0]
    assert spans(tmp_path / "third", build.CACHED, more)[0]


def test_a_compiler_that_complains_in_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nprintf "\\377\\376" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(build.VARIABLE, build.AUTO)
    assert build.load() is None


def test_the_switch_has_a_short_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sgl-aspects run` sets the short name."""
    monkeypatch.delenv(build.VARIABLE, raising=False)
    monkeypatch.setenv(build.VARIABLE.removeprefix("SGL_"), "OFF")
    assert build.load() is None


def test_without_a_compiler_python_records(tmp_path: Path) -> None:
    more = {"CC": "/no/such/compiler", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    was_compiled, told = spans(tmp_path / "run", build.AUTO, more)
    assert not was_compiled
    assert told


def test_the_header_has_the_layout_of_a_step() -> None:
    assert f"#define PROCESS_END {layout.PROCESS_END}ull\n" in build.header()
    assert f"#define SLOT_BYTES {layout.SLOT_BYTES}ull\n" in build.header()


def test_an_unknown_value_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(build.VARIABLE, "perhaps")
    build.load()
    assert "SGL_ASPECTS_NATIVE=perhaps is ignored: choose auto, cached or off" in caplog.text


@pytest.mark.parametrize("reader", ["collector.process", "collector.dump", "ring.reader"])
def test_what_only_reads_records_compiles_nothing(reader: str, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), build.VARIABLE: build.AUTO}
    command = [sys.executable, "-c", f"import sgl_aspects.tracing.{reader}"]
    subprocess.run(command, env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
