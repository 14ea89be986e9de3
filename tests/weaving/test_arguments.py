"""Arguments reach every kind of hook as the caller wrote them, whichever other hooks are there."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookRegistry, HookType
from sgl_aspects.errors import HookError
from sgl_aspects.weaving import argument_reader
from tests.support.woven_modules import Watch, advice, around, fixture_of, module_of

SOURCE = """
def f(a, b=2, *, c=3, **rest): return (a, b, c, rest)
def optional(a=0, b=0, c=0, *, d=0, e=0): return (a, b, c, d, e)
def named(result, original_fn=1, args=2, kwargs=3, *, self=4, proceed=5): return (result, original_fn, self)
def only(a, /, b=2, **rest): return (a, b, rest)
async def co(a, b=2): return (a, b)
def gen(a, b=2): yield (a, b)
async def agen(a, b=2): yield (a, b)
class C:
    def forward(self, batch, stream=False, prefix=None): return (batch, stream, prefix)
    @classmethod
    def made(cls, a=1): return a
    @staticmethod
    def static(a=1): return a
    @property
    def size(self): return 5
    @size.setter
    def size(self, value): self.value = value
"""

CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "f": [((1,), {}), ((1, 5), {}), ((), {"a": 1}), ((1,), {"c": 4, "b": 9}), ((1,), {"x": 1})],
    "optional": [((), {}), ((1, 2, 3), {"d": 4, "e": 5}), ((), {"e": 1})],
    "named": [((0,), {}), ((0, 1, 2, 3), {"self": 6}), ((), {"result": 1, "args": 7, "proceed": 1})],
    "only": [((1,), {"a": 5}), ((1, 2), {}), ((1,), {"b": 3})],
    "co": [((1,), {}), ((), {"a": 1, "b": 3})],
    "gen": [((1,), {}), ((1, 2), {})],
    "agen": [((1,), {}), ((1,), {"b": 4})],
    "C.forward": [(("batch",), {}), (("batch", True), {}), (("batch",), {"prefix": 1})],
    "C.made": [((), {}), ((), {"a": 2})],
    "C.static": [((), {}), ((2,), {})],
}


engine = fixture_of(SOURCE)


def called(engine: Any, path: str) -> Any:
    return getattr(engine.C(), path[2:]) if path.startswith("C.") else getattr(engine, path)


def finish(value: Any) -> Any:
    """What a call comes to in the end, for every kind of function."""
    if inspect.iscoroutine(value):
        return asyncio.run(value)
    if inspect.isasyncgen(value):
        return asyncio.run(collect(value))
    return list(value) if inspect.isgenerator(value) else value


async def collect(items: Any) -> list[Any]:
    return [item async for item in items]


def kinds(seen: list[Any]) -> dict[HookType, Any]:
    """A hook of each kind that writes down what it gets."""

    def note(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    def hand_on(original_fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original_fn(*args, **kwargs)

    def after(result: Any, /, *args: Any, **kwargs: Any) -> None:
        note(*args, **kwargs)

    def native(proceed: Any, args: Any, kwargs: Any) -> Any:
        seen.append((args, dict(kwargs)))
        return proceed(args, kwargs)

    observer = aspects.observe("x:y", enter=lambda args, kwargs: seen.append((args, dict(kwargs)))).hook
    return {
        HookType.BEFORE: note,
        HookType.AFTER: after,
        HookType.AROUND: hand_on,
        HookType.NATIVE: native,
        HookType.OBSERVE: observer,
    }


OTHERS: list[list[Callable[[str], aspects.Advice]]] = [
    [],
    [lambda target: Watch().on(target)],
    [lambda target: around(target), lambda target: Watch().on(target)],
]


@pytest.mark.parametrize("others", OTHERS, ids=["alone", "observed", "wrapped and observed"])
@pytest.mark.parametrize("kind", [kind for kind in HookType if kind is not HookType.REPLACE])
@pytest.mark.parametrize("path", CALLS)
def test_each_hook_sees_the_call_as_it_was_written(
    engine: Any, path: str, kind: HookType, others: list[Callable[[str], aspects.Advice]]
) -> None:
    target, seen = f"engine:{path}", []  # type: str, list[Any]
    bare = [finish(called(engine, path)(*args, **kwargs)) for args, kwargs in CALLS[path]]
    with aspects.woven(advice(target, kind, kinds(seen)[kind]), *(make(target) for make in others)):
        for args, kwargs in CALLS[path]:
            assert finish(called(engine, path)(*args, **kwargs)) == bare.pop(0)
    skipped = 1 if path in ("C.forward", "C.made") else 0  # self or cls
    assert [(args[skipped:], kwargs) for args, kwargs in seen] == CALLS[path]


@pytest.mark.parametrize("face", ["registry", "aspects"])
def test_hooks_with_the_signatures_that_are_usual_in_sglang(engine: Any, face: str) -> None:
    seen: list[Any] = []
    hooks: list[tuple[str, HookType, Any]] = [
        ("f", HookType.AROUND, lambda original_fn, *args: original_fn(*args)),
        ("C.forward", HookType.AROUND, lambda original_fn, self, batch: original_fn(self, batch)),
        ("C.forward", HookType.AFTER, lambda result, self, batch: seen.append(batch)),
        ("optional", HookType.AFTER, lambda result, *args, **kwargs: seen.append((args[2], kwargs["d"]))),
        ("named", HookType.AFTER, lambda res, *args, **kwargs: seen.append(args)),
        ("co", HookType.BEFORE, lambda a: ((a, 7), {})),
    ]
    if face == "registry":
        for path, kind, hook in hooks:
            HookRegistry.register(f"engine.{path}", hook, kind)
        HookRegistry.apply_hooks()
    else:
        aspects.weave(*(advice(f"engine:{path}", kind, hook) for path, kind, hook in hooks))
    assert engine.f(1) == (1, 2, 3, {})
    assert engine.C().forward("batch") == ("batch", False, None)
    assert engine.optional(1, 2, 3, d=4) == (1, 2, 3, 4, 0)
    assert engine.named(8) == (8, 1, 4)
    assert asyncio.run(engine.co(1)) == (1, 7)
    assert seen == ["batch", (3, 4), (8,)]
    if face == "registry":
        HookRegistry.reset()


def test_setters_get_their_value_by_position(engine: Any) -> None:
    watch = Watch()
    with aspects.woven(watch.on("engine:C.size.fset")):
        made = engine.C()
        made.size = 7
    assert watch.entered == [((made, 7), {})]


def test_a_wrong_call_is_told_in_the_targets_own_words(engine: Any) -> None:
    def error(*args: Any, **kwargs: Any) -> str:
        with pytest.raises(TypeError) as caught:
            engine.only(*args, **kwargs)
        return str(caught.value)

    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}), ((1, 2, 3), {}), ((), {"a": 1})]
    bare = [error(*args, **kwargs) for args, kwargs in wrong]
    with aspects.woven(around("engine:only"), Watch().on("engine:only")):
        assert [error(*args, **kwargs) for args, kwargs in wrong] == bare


def test_the_signature_is_the_targets(engine: Any) -> None:
    for path in CALLS:
        bare = inspect.signature(called(engine, path)), inspect.getfullargspec(called(engine, path))
        with aspects.woven(around(f"engine:{path}")):
            woven = called(engine, path)
            assert (inspect.signature(woven), inspect.getfullargspec(woven)) == bare
            assert repr(inspect.signature(woven)) == repr(bare[0])
        assert "__signature__" not in vars(getattr(engine, path.split(".")[0]))


@pytest.mark.parametrize(
    ("path", "parameter", "values"),
    [
        ("f", "a", [1, 1, 1, 1, 1]),
        ("f", "b", [2, 5, 2, 9, 2]),
        ("f", "c", [3, 3, 3, 4, 3]),
        ("f", "rest", [None, None, None, None, {"x": 1}]),
        ("only", "a", [1, 1, 1]),
        ("only", "rest", [{"a": 5}, None, None]),
    ],
)
def test_a_parameter_is_read_by_its_name(engine: Any, path: str, parameter: str, values: list[Any]) -> None:
    read = argument_reader(getattr(engine, path), parameter)
    assert [read(args, kwargs) for args, kwargs in CALLS[path]] == values


def test_a_parameter_of_what_has_no_signature_is_refused() -> None:
    with pytest.raises(HookError, match="has no signature"):
        argument_reader(min, "x")


# -- observers with one half ------------------------------------------------------------------------------


class EnterOnly:
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def enter(self, args: Any, kwargs: Any) -> None:
        self.events.append(("enter", args))


class ExitOnly:
    enter = None

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def exit(self, token: Any, result: Any, error: Any) -> None:
        self.events.append(("exit", token, result if error is None else type(error)))


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("path", ["f", "co", "gen", "agen"])
def test_an_observer_may_have_only_one_half(engine: Any, path: str, count: int) -> None:
    bare = finish(getattr(engine, path)(1))
    final = {"f": bare, "co": bare}.get(path)
    events: list[Any] = []
    watch = Watch()
    observers = [EnterOnly(events), ExitOnly(events)] * count
    advices = [advice(f"engine:{path}", HookType.OBSERVE, observer) for observer in observers]
    with aspects.woven(*advices, watch.on(f"engine:{path}")):
        assert finish(getattr(engine, path)(1)) == bare
    assert events == [("enter", (1,))] * count + [("exit", None, final)] * count
    assert len(watch.entered) == len(watch.left) == 1


def test_a_half_that_raises_is_contained(engine: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("clumsy")

    enter = aspects.observe("engine:f", enter=fail)
    leave = aspects.observe("engine:f", exit=fail)
    with aspects.woven(enter, leave):
        assert engine.f(1) == (1, 2, 3, {})
    assert (enter.errors, leave.errors) == (1, 1)
    assert enter.name == leave.name == f"{__name__}.{fail.__qualname__}"


# -- async hooks that are not awaited ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["f", "gen", "agen", "C.forward", "C.size"])
@pytest.mark.parametrize("kind", [HookType.AROUND, HookType.BEFORE, HookType.AFTER, HookType.NATIVE])
def test_an_async_hook_on_what_is_not_async_is_refused_with_the_fix(
    engine: Any, path: str, kind: HookType
) -> None:
    async def hook(*args: Any, **kwargs: Any) -> None: ...

    original = engine.f
    with pytest.raises(TypeError, match=rf"engine:{path}.*the hook is async.*Write it as a plain def"):
        aspects.weave(advice(f"engine:{path}", kind, hook))
    assert engine.f is original
    assert aspects.report().hooks == ()


@pytest.mark.parametrize("kind", [HookType.AROUND, HookType.BEFORE, HookType.AFTER, HookType.NATIVE])
def test_original_fn_of_a_stacked_hook_has_the_targets_name_and_signature(kind: HookType) -> None:
    seen: list[Any] = []

    def outer(original_fn: Any, *args: Any) -> Any:
        seen.append((original_fn.__name__, original_fn.__doc__, str(inspect.signature(original_fn))))
        return original_fn(*args)

    inner: dict[HookType, Any] = {
        HookType.AROUND: lambda original_fn, *args: original_fn(*args),
        HookType.BEFORE: lambda *args: None,
        HookType.AFTER: lambda result, *args: None,
        HookType.NATIVE: lambda proceed, args, kwargs: proceed(args, kwargs),
    }
    hooks = [advice("engine:f", kind, inner[kind]), advice("engine:f", HookType.AROUND, outer)]
    source = "def f(a, b=2):\n    'Documented.'\n    return a + b\n"
    with module_of(source) as engine, aspects.woven(*hooks):
        assert engine.f(1) == 3
    assert seen == [("f", "Documented.", "(a, b=2)")]
