"""Hooks under torch.compile: what is hooked is hooked in compiled code too, and observers break no graph."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sgl_aspects as aspects
from tests.support.processes import output_of, python
from tests.support.woven_modules import advice, module_of

torch = pytest.importorskip("torch")


pytestmark = pytest.mark.filterwarnings("default")  # torch warns about itself while compiling


SOURCE = """
import torch

def function(x, scale=2.0):
    return x * scale

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
    def forward(self, x):
        return x * self.weight + function(x)
    def method(self, x):
        return x + 1
    @classmethod
    def from_class(cls, x):
        return x + 2
    @staticmethod
    def static(x):
        return x + 3
    @property
    def doubled(self):
        return self.weight * 2

def call_function(layer, x): return function(x, scale=3.0)
def call_method(layer, x): return layer.method(x)
def call_from_class(layer, x): return layer.from_class(x)
def call_static(layer, x): return layer.static(x)
def call_doubled(layer, x): return layer.doubled + x
def call_forward(layer, x): return layer(x)
"""


TARGETS = {
    "function": "call_function",
    "Layer.method": "call_method",
    "Layer.from_class": "call_from_class",
    "Layer.static": "call_static",
    "Layer.doubled": "call_doubled",
    "Layer.forward": "call_forward",
}


class Watch:
    """Does what would break a full graph: a clock, a list, a context variable."""

    def __init__(self) -> None:
        self.calls = 0

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        import time

        self.calls += 1
        return time.time_ns()

    def exit(self, token: int, result: Any, error: BaseException | None) -> None:
        pass


HOOKS: dict[aspects.HookType, Callable[[], Any]] = {
    aspects.HookType.BEFORE: lambda: (
        lambda *args, **kwargs: (
            (*args[:-1], args[-1] * 3 if isinstance(args[-1], torch.Tensor) else args[-1]),
            kwargs,
        )
    ),
    aspects.HookType.AFTER: lambda: lambda result, *args, **kwargs: result + 100,
    aspects.HookType.AROUND: lambda: lambda original, *args, **kwargs: original(*args, **kwargs) + 10,
    aspects.HookType.NATIVE: lambda: lambda proceed, args, kwargs: proceed(args, kwargs) + 1000,
    aspects.HookType.REPLACE: lambda: lambda *args, **kwargs: torch.full((3,), -5.0),
    aspects.HookType.OBSERVE: Watch,
}


_numbers = itertools.count()


@pytest.fixture
def engine() -> Iterator[Any]:
    # torch.compile keeps the first module of a name.
    module: Any = types.ModuleType(f"compiled_engine_{next(_numbers)}")
    sys.modules[module.__name__] = module
    exec(SOURCE, module.__dict__)
    torch._dynamo.reset()
    yield module
    del sys.modules[module.__name__]
    torch._dynamo.reset()


@pytest.fixture
def arguments(engine: Any) -> tuple[Any, Any]:
    return engine.Layer(), torch.arange(3.0)


def _advice(engine: Any, target: str, hook_type: aspects.HookType) -> aspects.Advice:
    return advice(f"{engine.__name__}:{target}", hook_type, HOOKS[hook_type]())


def _compiled_cases() -> list[Any]:
    """Each target, each type and both graphs once; all combinations among the slow tests."""
    cases = []
    for target, kind, fullgraph in itertools.product(TARGETS, HOOKS, (True, False)):
        is_usual = fullgraph and (kind is aspects.HookType.AROUND or target == "Layer.method")
        by_default = is_usual or (target, kind) == ("function", aspects.HookType.AROUND)
        marks = () if by_default else pytest.mark.slow
        cases.append(
            pytest.param(target, kind, fullgraph, marks=marks, id=f"{target}-{kind.value}-{fullgraph}")
        )
    return cases


@pytest.mark.parametrize(("target", "hook_type", "fullgraph"), _compiled_cases())
def test_compiled_code_runs_the_hooks_that_eager_code_runs(
    engine: Any, arguments: Any, target: str, hook_type: aspects.HookType, fullgraph: bool
) -> None:
    caller = getattr(engine, TARGETS[target])
    bare = caller(*arguments)

    # Compiled before the hook came: what is compiled already notices hooks that come and go.
    compiled = torch.compile(caller, backend="eager", fullgraph=fullgraph)
    assert torch.equal(compiled(*arguments), bare)
    with aspects.woven(_advice(engine, target, hook_type)):
        hooked = caller(*arguments)
        assert torch.equal(compiled(*arguments), hooked)
        # Compiled while the hook is there.
        torch._dynamo.reset()
        fresh = torch.compile(caller, backend="eager", fullgraph=fullgraph)
        assert torch.equal(fresh(*arguments), hooked)
    assert torch.equal(compiled(*arguments), bare)
    assert torch.equal(fresh(*arguments), bare)
    looks_only = hook_type is aspects.HookType.OBSERVE
    if target == "Layer.doubled" and hook_type is aspects.HookType.BEFORE:
        looks_only = True  # a property has no argument to change
    assert torch.equal(hooked, bare) is looks_only


def test_a_chain_of_every_type_compiles_into_one_graph(engine: Any, arguments: Any) -> None:
    kinds = [kind for kind in HOOKS if kind is not aspects.HookType.REPLACE]
    advices = [_advice(engine, "Layer.method", kind) for kind in kinds]
    with aspects.woven(*advices):
        compiled = torch.compile(engine.call_method, backend="eager", fullgraph=True)
        assert torch.equal(compiled(*arguments), engine.call_method(*arguments))


def test_observers_stand_aside_while_compiling_and_look_at_eager_calls(engine: Any, arguments: Any) -> None:
    watch = Watch()
    with aspects.woven(advice(f"{engine.__name__}:Layer.method", aspects.HookType.OBSERVE, watch)):
        torch.compile(engine.call_method, backend="eager", fullgraph=True)(*arguments)
        assert watch.calls == 0
        engine.call_method(*arguments)
        assert watch.calls == 1
        assert aspects.report().hooks[0].calls == 1


class Backend:
    """Counts what is compiled."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1
        return graph.forward


@pytest.mark.parametrize("hook_type", [kind for kind in HOOKS if kind is not aspects.HookType.OBSERVE])
def test_hooking_what_no_compiled_code_holds_recompiles_nothing(
    engine: Any, arguments: Any, hook_type: aspects.HookType
) -> None:
    backend = Backend()
    exec("class Other:\n    def plan(self, x): return x\ndef plan(x): return x", vars(engine))
    compiled = torch.compile(engine.call_method, backend=backend, fullgraph=True)  # before any hook
    bare = compiled(*arguments)
    for target in ("Other.plan", "plan", "Layer.static"):
        handle = aspects.weave(_advice(engine, target, hook_type))
        assert torch.equal(compiled(*arguments), bare)
        handle.disable()
        handle.enable()
        handle.remove()
        assert torch.equal(compiled(*arguments), bare)
    assert backend.compiled == 1
    with aspects.woven(_advice(engine, "Layer.method", hook_type)):
        assert torch.equal(compiled(*arguments), engine.call_method(*arguments))
    assert torch.equal(compiled(*arguments), bare)


@pytest.mark.parametrize("hook_type", list(HOOKS))
@pytest.mark.parametrize("target", ["function", "Layer.method"])
def test_a_hooked_function_may_itself_be_compiled(target: str, hook_type: aspects.HookType) -> None:
    # A name of its own: torch.compile keeps the first module that it has found under a name.
    name = f"compiled_alone_{target.replace('.', '_')}_{hook_type.value}"
    with module_of(SOURCE, name) as engine:
        x = torch.arange(3.0)

        def call() -> Any:
            return engine.function if target == "function" else engine.Layer().method

        bare = call()(x)
        with aspects.woven(_advice(engine, target, hook_type)):
            compiled = torch.compile(call(), backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), call()(x))
        assert torch.equal(call()(x), bare)


def test_hooks_woven_before_the_compiler_was_loaded_do_not_break_a_full_graph() -> None:
    """In a fresh process: torch._dynamo is imported by the first torch.compile, after the weaving."""
    program = """
import sys, types, torch, sgl_aspects as aspects
module = types.ModuleType("early"); sys.modules["early"] = module
exec("def f(x): return x + 1", module.__dict__)
class Watch:
    calls = 0
    def enter(self, args, kwargs): Watch.calls += 1; print(end="")
    def exit(self, token, result, error): pass
aspects.weave(aspects.observe("early:f")(Watch))
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(lambda x: module.f(x), backend="eager", fullgraph=True)
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
assert Watch.calls == 0
module.f(1)
assert Watch.calls == 1
"""
    output_of(python("-c", program))


def test_what_the_compiler_imports_is_woven_while_the_compiler_itself_is_being_loaded() -> None:
    program = """
import logging, sys, torch, sgl_aspects as aspects
logging.basicConfig()
@aspects.before("torch._dynamo.config:no_such_function")
def config(): ...
@aspects.before("torch._dynamo.exc:unimplemented")
def exceptions(*args, **kwargs): ...
@aspects.before("statistics:mean")
def mean(data): print("mean")
aspects.weave(config, exceptions, mean)
compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
assert compiled(torch.ones(1)).tolist() == [2.0]
import statistics
statistics.mean([1, 2])
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, "mean\n"), done.stderr
    assert "Traceback" not in done.stderr


def _chains(module: Any) -> set[str]:
    """What torch.compile reads instead of the constants of hooked functions."""
    gc.collect()
    return {name for name in vars(module.__sgl_aspects__) if name.startswith("chain")}


def test_coroutines_and_generators_that_begin_after_the_last_hook_has_gone() -> None:
    """Their code still looks up what stands in the module for torch.compile, which goes with them."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))

    def watch(*args: Any) -> None: ...

    source = "async def wait(x): return x\ndef items(x): yield x\ndef call(x): return x"
    with module_of(source, "begun") as module:
        aspects.weave(aspects.before("begun:wait")(watch)).remove()
        before = _chains(module)
        with aspects.woven(*(aspects.before(f"begun:{name}")(watch) for name in ("wait", "items", "call"))):
            waiting, items = module.wait(1), module.items(2)
        assert module.call(0) == 0
        with pytest.raises(StopIteration, match="1"):
            waiting.send(None)
        assert next(items) == 2
        del waiting
        items.close()
        del items
        assert _chains(module) <= before


def test_a_call_that_has_just_begun_when_the_last_hook_goes() -> None:
    """On another thread, before its first instruction."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    begun, gone = threading.Event(), threading.Event()
    watched: list[types.CodeType] = []
    results: list[int] = []

    def wait_at_the_beginning(frame: types.FrameType, event: str, argument: Any) -> None:
        if watched and frame.f_code is watched[0]:
            begun.set()
            gone.wait(60)

    def call() -> None:
        sys.settrace(wait_at_the_beginning)
        try:
            results.append(module.call(3))
        finally:
            sys.settrace(None)

    with module_of("def call(x): return x", "begun") as module:
        aspects.weave(aspects.before("begun:call")(lambda *args: None)).remove()
        before = _chains(module)
        with aspects.woven(aspects.before("begun:call")(lambda *args: None)):
            watched.append(module.call.__code__)
            thread = threading.Thread(target=call)
            thread.start()
            assert begun.wait(60)
        gone.set()
        thread.join(60)
        assert results == [3]
        watched.clear()
        gc.collect()
        assert _chains(module) <= before


def test_kinds_of_hooks_may_alternate_on_a_function_in_a_whole_graph(engine: Any, arguments: Any) -> None:
    compiled = torch.compile(engine.call_function, backend="eager", fullgraph=True)
    bare = compiled(*arguments)
    for hook_type in [*HOOKS] * 4:
        with aspects.woven(_advice(engine, "function", hook_type)):
            assert torch.equal(compiled(*arguments), engine.call_function(*arguments))
        assert torch.equal(compiled(*arguments), bare)


def test_a_hooked_custom_operator_is_compiled(engine: Any) -> None:
    def add_five(x: Any) -> Any:
        return x + 5

    add_five.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    engine.operator = torch.library.custom_op("sgl_aspects_test::add_five", mutates_args=())(add_five)
    engine.operator.register_fake(torch.empty_like)
    exec("def call_operator(x): return operator(x)", vars(engine))
    compiled = torch.compile(engine.call_operator, backend="eager", fullgraph=True)
    x = torch.arange(3.0)
    with aspects.woven(_advice(engine, "operator", aspects.HookType.AROUND)):
        assert torch.equal(compiled(x), engine.call_operator(x))
    assert torch.equal(compiled(x), x + 5)
