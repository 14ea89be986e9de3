"""A plain decode step is recorded in C where the package was built with a compiler, else in Python alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native
from tests.support.builds import build, is_compiled
from tests.support.processes import output_of, python
from tests.support.tree import PACKAGE, ROOT

in_c = pytest.mark.skipif(native.compiled is None, reason=native.state())

# A fake engine: twenty steps with what interrupts them. Prints its spans without ids and times.
_ENGINE = """
import ctypes, dataclasses, json, logging, sys, types
from types import SimpleNamespace
from sgl_aspects.weaving import Advice, HookType, Target, weave as weave_advice
from sgl_aspects.engines import EMBEDDED, Role
from sgl_aspects.runtime.core import ForwardMode
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.draft import DraftObserver
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
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
drafts = {role: Role((f"woven:{role}",)) for role in ("draft", "draft_extend")}
engine = dataclasses.replace(EMBEDDED, roles={**EMBEDDED.roles, **drafts})
trackers = Trackers.of(engine, recorder, DEFAULTS)
passes = ForwardObserver(trackers)
observers = StepObserver(trackers), passes, DraftObserver(trackers, passes)
found = {o.role: o for observer in observers for o in observer.observations()}
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
    drafted = lambda: call("draft", (), inside=lambda: call("draft_extend", (), inside=forward))
    fed = lambda: call("draft_extend", (), error=KeyError() if number == 10 else None)
    work = (lambda: (drafted(), forward(), fed())) if number in (6, 10, 21, 25) else forward
    launched = ((scheduler,), {"batch": batch}) if number in (7, 8) else ((scheduler, batch), {})
    call("run_batch", launched[0], result, error, inside=work, **launched[1])
    if number in (25, 26):
        call("draft", ())
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

# Drafts of requests that stay, leave while their batch is in flight, and give way.
_DRAFTS = """
import json, sys
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from tests.support.rings import read_all
from tests.support.speculating import speculate

recorder = RingRecorder(sys.argv[1], int(sys.argv[2]))
recorder.open()
for _ in speculate(recorder):
    pass
records = [r for r in read_all(RunReader(sys.argv[1])) if type(r).__name__ == "SpanEnd"]
told = [[r.type.name, list(r.values), r.error, len(r.links)] for r in records]
print(json.dumps([native.compiled is not None, told]))
"""


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = python("-c", program, *arguments, cwd=ROOT, without=(native.VARIABLE,), **environment)
    output_of(done)
    return done


def spans(
    folder: Path, switch: str, program: str = _ENGINE, *arguments: str
) -> tuple[bool, list[list[object]]]:
    """Whether it ran in C, and the spans that it recorded."""
    folder.mkdir()
    compiled, told = json.loads(run(program, str(folder), *arguments, SGL_ASPECTS_NATIVE=switch).stdout)
    return compiled, told


def state(before: str = "pass", **environment: str) -> str:
    """The state of the compiled path in a process, after the statements ``before``."""
    imported = "from sgl_aspects.tracing.record import native"
    program = f"import sys, types; {before}; {imported}; print(native.state())"
    return run(program, **environment).stdout.strip()


@in_c
def test_both_ways_record_the_same_steps(tmp_path: Path) -> None:
    in_use, compiled = spans(tmp_path / "compiled", "on")
    assert in_use
    in_use, interpreted = spans(tmp_path / "interpreted", "off")
    assert not in_use
    # Late device times: the order may differ, but not the records.
    order = json.dumps
    assert sorted(compiled, key=order) == sorted(interpreted, key=order)
    steps = [span for span in compiled if span[0] == "scheduler.step"]
    assert len(steps) > 25


@in_c
@pytest.mark.parametrize("level", ["1", "3"])
def test_both_ways_count_the_same_drafts(tmp_path: Path, level: str) -> None:
    _, compiled = spans(tmp_path / "compiled", "on", _DRAFTS, level)
    _, interpreted = spans(tmp_path / "interpreted", "off", _DRAFTS, level)
    assert compiled == interpreted
    assert len([span for span in compiled if span[0] == "decode"]) == 6 + 2 + 5


def test_the_c_files_have_the_layout_of_the_ring() -> None:
    text = (PACKAGE / "tracing" / "record" / "native" / "layout.h").read_text()
    numbers = {name: int(number) for name, number in re.findall(r"#define (\w+) (\d+)ull", text)}
    assert len(numbers) == text.count("#define")
    assert numbers == {name: getattr(layout, name) for name in numbers}


def test_the_reason_why_it_is_not_in_use() -> None:
    module = "sys.modules['sgl_aspects.tracing.record.native._decode_path']"
    # The launcher sets the short name.
    assert state(ASPECTS_NATIVE="off") == "not in use: SGL_ASPECTS_NATIVE is off"
    assert state(f"{module} = None").startswith("not in use: it was not built for this Python: install sgl")
    older = f"{module} = types.SimpleNamespace(CHECKSUM=1)"
    assert state(older).startswith("not in use: it was built from other sources: install sgl-aspects again")


def test_a_switch_that_is_neither_on_nor_off_is_an_error() -> None:
    with pytest.raises(
        AssertionError, match="SGL_ASPECTS_NATIVE='perhaps': write one of 1, true, yes, on, 0"
    ):
        state(SGL_ASPECTS_NATIVE="perhaps")


def test_a_traced_run_begins_with_the_reason_unless_it_was_chosen(tmp_path: Path) -> None:
    program = (
        "from sgl_aspects.tracing import attach\n"
        "if __name__ == '__main__':\n"
        f"    attach(file={str(tmp_path / 'spans.jsonl')!r}).close()"
    )
    built = build(sys.executable, tmp_path / "build", CC="false")
    first = run(f"import sys; del sys.path[0]\n{program}", PYTHONPATH=str(built)).stderr.splitlines()[0]
    assert first.startswith("the compiled step path is not in use: it was not built for this Python: install")
    assert "compiled step path" not in run(program, SGL_ASPECTS_NATIVE="off").stderr
    if native.compiled is not None:
        assert "compiled step path" not in run(program).stderr


@pytest.mark.parametrize(
    "environment", [{"CC": "/no/such/compiler"}, {"CC": "false"}, {"SGL_ASPECTS_NATIVE": "off"}]
)
def test_without_a_compiler_the_package_is_built_in_python(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    built = build(sys.executable, tmp_path / "build", **environment)
    assert (built / "sgl_aspects" / "tracing" / "record" / "native" / "fields.py").exists()
    assert not is_compiled(built)
