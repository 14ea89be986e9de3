"""What hooks do: order, arguments and results, observers, async rules, messages where they cannot work."""

from __future__ import annotations

import asyncio
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookSource, HookType, Result
from tests.support.woven_modules import Watch, advice, around, fixture_of, hand_on

SOURCE = """
import asyncio
log = []
def f(a, b=2):
    log.append(("f", a, b))
    return a + b
def fail(a): raise ValueError(a)
def recursive(n): return 0 if n == 0 else 1 + recursive(n - 1)
def returns_none(): return None
async def co(a, b=2):
    await asyncio.sleep(0)
    return a + b
async def gives_task(): return asyncio.ensure_future(co(1))
async def co_fail(a): raise ValueError(a)
def gen(n):
    for i in range(n): yield i
    return "end"
async def agen(n):
    for i in range(n): yield i
class C:
    def m(self, x=1): return ("m", x)
"""


engine = fixture_of(SOURCE)


def tagged(text: str, **options: Any) -> aspects.Advice:
    return around("engine:f", lambda original, *a, **k: [text, original(*a, **k)], **options)


# -- order ----------------------------------------------------------------------------------------------


def test_higher_orders_are_outside(engine: Any) -> None:
    with aspects.woven(tagged("5", order=5), tagged("-1", order=-1), tagged("0"), tagged("9", order=9)):
        assert engine.f(1) == ["9", ["5", ["0", ["-1", 3]]]]


def test_of_equal_orders_the_later_one_is_outside(engine: Any) -> None:
    with aspects.woven(tagged("first"), tagged("second")), aspects.woven(tagged("third")):
        assert engine.f(1) == ["third", ["second", ["first", 3]]]


def test_all_types_take_part_in_one_order(engine: Any) -> None:
    seen: list[str] = []

    def note(text: str) -> Callable[..., Any]:
        return lambda *a, **k: seen.append(text)

    def native(proceed: Any, args: Any, kwargs: Any) -> Any:
        seen.append("native")
        return proceed(args, kwargs)

    with aspects.woven(
        advice("engine:f", HookType.BEFORE, note("before"), order=3),
        advice("engine:f", HookType.AFTER, note("after"), order=2),
        advice("engine:f", HookType.NATIVE, native, order=1),
        around("engine:f", lambda o, *a, **k: note("around")() or o(*a, **k), order=4),
        advice("engine:f", HookType.REPLACE, lambda a, b=2: note("replace")() or -1, order=9),
    ):
        assert engine.f(1) == -1
    assert seen == ["around", "before", "native", "replace", "after"]


def test_replace_is_innermost_whatever_its_order(engine: Any) -> None:
    replacing = advice("engine:f", HookType.REPLACE, lambda a, b=2: "replaced", order=99)
    with aspects.woven(tagged("around", order=-99), replacing):
        assert engine.f(1) == ["around", "replaced"]


def test_disabled_and_enabled_hooks_keep_their_place(engine: Any) -> None:
    original = engine.f
    first, second, third = (aspects.weave(tagged(text)) for text in ("1", "2", "3"))
    second.disable()
    assert engine.f(1) == ["3", ["1", 3]]
    assert second.states == (aspects.State.DISABLED,)
    second.enable()
    assert engine.f(1) == ["3", ["2", ["1", 3]]]
    for handle in (first, second, third):
        handle.disable()
    assert engine.f is original
    third.enable()
    second.remove()
    first.enable()
    assert engine.f(1) == ["3", ["1", 3]]
    first.remove()
    third.remove()
    third.remove()  # a second time does nothing
    assert engine.f is original


def test_a_late_hook_takes_effect_at_once_through_every_copy(engine: Any) -> None:
    with aspects.woven(tagged("early")):
        copy = engine.f
        with aspects.woven(tagged("late")):
            assert copy(1) == ["late", ["early", 3]]
        assert copy(1) == ["early", 3]


# -- REPLACE --------------------------------------------------------------------------------------------


def test_the_last_replace_wins_and_the_earlier_one_comes_back(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = advice("engine:f", HookType.REPLACE, lambda a, b=2: "one", source=HookSource("alpha", "dist-a"))
    two = advice("engine:f", HookType.REPLACE, lambda a, b=2: "two", source=HookSource("beta", "dist-b"))
    with aspects.woven(one):
        with caplog.at_level(logging.WARNING, "sgl_aspects"), aspects.woven(two) as second:
            assert engine.f(1) == "two"
            second.disable()
            assert engine.f(1) == "one"
            second.enable()
            assert engine.f(1) == "two"
        assert engine.f(1) == "one"
    (record,) = caplog.records
    assert "alpha (dist-a)" in record.getMessage()
    assert "beta (dist-b)" in record.getMessage()
    assert engine.f(1) == 3


def test_a_replace_with_another_signature_is_called_as_the_caller_did(engine: Any) -> None:
    def other(*numbers: int, scale: int = 10, **rest: Any) -> Any:
        return (numbers, scale, rest)

    watch = Watch()
    with aspects.woven(advice("engine:f", HookType.REPLACE, other), watch.on("engine:f")):
        assert engine.f(1, 2, 3, 4) == ((1, 2, 3, 4), 10, {})
        assert engine.f(scale=5, extra=6) == ((), 5, {"extra": 6})
        assert engine.f.__name__ == "f"
    assert watch.entered == [((1, 2, 3, 4), {}), ((), {"scale": 5, "extra": 6})]
    with pytest.raises(TypeError):
        engine.f(1, 2, 3)


def test_a_replace_has_its_own_defaults(engine: Any) -> None:
    with aspects.woven(advice("engine:f", HookType.REPLACE, lambda a, b=50: a + b)):
        assert engine.f(1) == 51
    with aspects.woven(advice("engine:f", HookType.REPLACE, lambda a, b: a + b)), pytest.raises(TypeError):
        engine.f(1)


def test_a_replace_may_be_any_callable(engine: Any) -> None:
    for replacement, result in ((max, 5), (C_ADD(3).__call__, 9), (C_ADD(4), 10)):
        with aspects.woven(advice("engine:f", HookType.REPLACE, replacement)):
            assert engine.f(1, 5) == result


class C_ADD:  # noqa: N801  a callable instance, as a constant
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, a: int, b: int) -> int:
        return a + b + self.offset


def test_a_replace_may_call_the_original_that_it_kept(engine: Any) -> None:
    kept = engine.f

    def replacement(a: int, b: int = 2) -> Any:
        return ("replaced", kept(a, b))

    with aspects.woven(advice("engine:f", HookType.REPLACE, replacement)):
        assert engine.f(1) == ("replaced", 3)


def test_an_around_hook_may_call_the_original_that_it_kept(engine: Any) -> None:
    kept = engine.f

    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        return (original(*args, **kwargs), kept(5, 5))

    with aspects.woven(around("engine:f", hook)):
        assert engine.f(1) == (3, 10)


# -- BEFORE, AFTER, AROUND, NATIVE ----------------------------------------------------------------------


def test_before_changes_arguments(engine: Any) -> None:
    with aspects.woven(advice("engine:f", HookType.BEFORE, lambda a, b=2: ((a * 10,), {"b": b * 10}))):
        assert engine.f(1) == 30
    with aspects.woven(advice("engine:f", HookType.BEFORE, lambda *a, **k: ([7], {}))):
        assert engine.f(1) == 9


@pytest.mark.parametrize("bad", [5, (1,), (1, 2), ((1,), None), ("a", {}), {}, "xy", [(1,), {}, 3]])
def test_before_must_return_none_or_a_pair(engine: Any, bad: Any) -> None:
    engine_log = engine.log
    with (
        aspects.woven(advice("engine:f", HookType.BEFORE, lambda *a, **k: bad, source=HookSource("alpha"))),
        pytest.raises(
            aspects.AspectsError, match=r"alpha.*engine:f.*return None, or a pair \(args, kwargs\)"
        ),
    ):
        engine.f(1)
    assert engine_log == []


def test_after_changes_the_result_and_can_make_it_none(engine: Any) -> None:
    calls: list[Any] = []

    def after(result: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((result, args, kwargs))
        return answers.pop(0)

    answers: list[Any] = [None, 0, Result(None), Result(Result(1))]
    with aspects.woven(advice("engine:f", HookType.AFTER, after)):
        assert [engine.f(1) for _ in range(4)] == [3, 0, None, Result(1)]
    assert calls == [(3, (1,), {})] * 4


def test_around_decides_how_often_the_original_runs(engine: Any) -> None:
    with aspects.woven(around("engine:f", lambda o, *a, **k: "skipped")):
        assert engine.f(1) == "skipped"
    with aspects.woven(around("engine:f", lambda o, a, b=2: o(a) + o(a, b * 10))):
        assert engine.f(1) == 24
    assert engine.log == [("f", 1, 2), ("f", 1, 20)]


def test_native_hooks_get_and_give_the_packed_pair(engine: Any) -> None:
    seen: list[Any] = []

    def native(proceed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append((args, kwargs))
        return ["native", proceed((2,), {"b": 3})]

    def outer(proceed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ["outer", proceed(args, kwargs)]

    with aspects.woven(
        advice("engine:f", HookType.NATIVE, native),
        advice("engine:f", HookType.NATIVE, outer),
        around("engine:f", lambda o, *a, **k: ["around", o(*a, **k)]),
    ):
        assert engine.f(1) == ["around", ["outer", ["native", 5]]]
        assert engine.f(a=1) == ["around", ["outer", ["native", 5]]]
    assert seen == [((1,), {}), ((), {"a": 1})]


@pytest.mark.parametrize("kind", [HookType.BEFORE, HookType.AFTER, HookType.AROUND, HookType.NATIVE])
def test_what_a_users_hook_raises_is_raised(engine: Any, kind: HookType) -> None:
    def hook(*_: Any, **__: Any) -> None:
        raise KeyError("mine")

    watch = Watch()
    with aspects.woven(advice("engine:f", kind, hook), watch.on("engine:f")), pytest.raises(KeyError):
        engine.f(1)
    assert [type(error) for _, error in watch.left] == [KeyError]


def test_what_the_original_raises_passes_through_unchanged(engine: Any) -> None:
    seen: list[Any] = []

    def catching(original: Any, *args: Any) -> Any:
        try:
            return original(*args)
        except ValueError as error:
            seen.append(error)
            raise

    watch = Watch()
    after = advice("engine:fail", HookType.AFTER, lambda *_: seen.append("after"))
    with (
        aspects.woven(around("engine:fail", catching), watch.on("engine:fail"), after),
        pytest.raises(ValueError, match="x") as caught,
    ):
        engine.fail("x")
    assert seen == [caught.value]
    assert watch.left == [(None, caught.value)]
    assert caught.value.__context__ is None


# -- hooks that hook, and recursion ---------------------------------------------------------------------


def test_recursion_goes_through_the_hook_at_every_depth(engine: Any) -> None:
    watch = Watch()
    with aspects.woven(watch.on("engine:recursive"), around("engine:recursive")):
        assert engine.recursive(50) == 50
    assert [args for args, _ in watch.entered] == [(n,) for n in range(50, -1, -1)]
    assert [result for result, _ in watch.left] == list(range(51))


def test_a_hook_may_weave_and_remove_while_it_runs(engine: Any) -> None:
    inner: list[aspects.Handle] = []

    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not inner:
            inner.append(aspects.weave(tagged("inner")))
            return ["outer", original(*args, **kwargs)]
        inner.pop().remove()
        handle.remove()
        return ["last", original(*args, **kwargs)]

    original = engine.f
    handle = aspects.weave(around("engine:f", hook))
    assert engine.f(1) == ["outer", 3]  # the call that runs is not changed under its feet
    assert engine.f(1) == ["inner", ["last", 3]]
    assert engine.f is original


def test_hooks_may_be_hooked(engine: Any) -> None:
    exec("def hook(original, *a, **k): return ['hook', original(*a, **k)]", vars(engine))
    with aspects.woven(around("engine:f", engine.hook)):
        seen = Watch()
        with aspects.woven(seen.on("engine:hook")):
            assert engine.f(1) == ["hook", 3]
        # The hook was handed over as an object, and is called as that.
        assert engine.hook(lambda: 1) == ["hook", 1]


def test_a_hook_that_calls_its_target_does_not_recurse_for_ever_by_itself(engine: Any) -> None:
    depth: list[int] = []

    def hook(original: Any, a: int, b: int = 2) -> Any:
        depth.append(a)
        return engine.f(a - 1) if a > 0 else original(a, b)

    with aspects.woven(around("engine:f", hook)):
        assert engine.f(3) == 2
    assert depth == [3, 2, 1, 0]


# -- observers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("name", ["f", "co", "gen", "agen"])
def test_any_number_of_observers_in_their_order(engine: Any, count: int, name: str) -> None:
    seen: list[str] = []

    def pair(index: int) -> aspects.Advice:
        def enter(args: Any, kwargs: Any) -> int:
            seen.append(f"+{index}")
            return index

        found: aspects.Advice = aspects.observe(
            f"engine:{name}",
            enter=enter,
            exit=lambda token, result, error: seen.append(f"-{token}"),
        )
        return found

    calls: dict[str, Callable[[], Any]] = {
        "f": lambda: engine.f(1),
        "co": lambda: asyncio.run(engine.co(1)),
        "gen": lambda: list(engine.gen(2)),
        "agen": lambda: asyncio.run(collect(engine.agen(2))),
    }
    bare = calls[name]()
    with aspects.woven(*(pair(index) for index in range(count))):
        assert calls[name]() == bare
        inwards = [f"+{index}" for index in reversed(range(count))]
        assert seen == [*inwards, *(step.replace("+", "-") for step in reversed(inwards))]


async def collect(items: Any) -> list[Any]:
    return [item async for item in items]


class Broken:
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.exits: list[Any] = []

    def enter(self, args: Any, kwargs: Any) -> str:
        if self.where == "enter":
            raise RuntimeError("in enter")
        return "token"

    def exit(self, token: Any, result: Any, error: Any) -> None:
        self.exits.append(token)
        if self.where == "exit":
            raise RuntimeError("in exit")


@pytest.mark.parametrize("others", [0, 2, 6])
@pytest.mark.parametrize("where", ["enter", "exit"])
@pytest.mark.parametrize("name", ["f", "fail", "co", "gen", "agen", "C.m"])
def test_a_broken_observer_is_contained_counted_and_logged_once(
    engine: Any, caplog: pytest.LogCaptureFixture, where: str, name: str, others: int
) -> None:
    broken = Broken(where)
    watches = [Watch() for _ in range(others)]
    target = f"engine:{name}"
    made = advice(target, HookType.OBSERVE, broken, source=HookSource("clumsy", "dist-c"))

    def call() -> Any:
        if name == "fail":
            with pytest.raises(ValueError):
                engine.fail(1)
            return None
        found = eval(f"engine.{name.replace('C.m', 'C().m')}", {"engine": engine})(1)
        if inspect.iscoroutine(found):
            return asyncio.run(found)
        return asyncio.run(collect(found)) if inspect.isasyncgen(found) else found

    bare = call()
    engine.log.clear()
    with (
        caplog.at_level(logging.WARNING, "sgl_aspects"),
        aspects.woven(*(watch.on(target) for watch in watches), made),
    ):
        for _ in range(3):
            result = call()
            assert list(result) == [0] if name == "gen" else result == bare
        (record,) = caplog.records
        assert "clumsy (dist-c)" in record.getMessage()
        assert target in record.getMessage()
        assert f"in {where}" in record.getMessage()
        (report,) = (hook for hook in aspects.report().hooks if "Broken" in hook.hook)
        assert (report.errors, report.calls) == (3, 3)
    assert broken.exits == ([] if where == "enter" else ["token"] * 3)
    assert all(len(watch.entered) == len(watch.left) == 3 for watch in watches)
    if name == "f":
        assert len(engine.log) == 3  # each call went through once


def test_an_observer_cannot_change_the_call(engine: Any) -> None:
    class Meddler:
        def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kwargs["b"] = 99
            kwargs["c"] = 1
            return object()

        def exit(self, token: Any, result: Any, error: Any) -> str:
            return "another result"

    with aspects.woven(advice("engine:f", HookType.OBSERVE, Meddler())):
        assert engine.f(1) == 3


def test_observers_do_not_swallow_what_stops_a_program(engine: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with aspects.woven(aspects.observe("engine:f", enter=interrupt)), pytest.raises(KeyboardInterrupt):
        engine.f(1)


def test_observers_see_the_result_of_the_other_hooks(engine: Any) -> None:
    watch = Watch()
    with aspects.woven(watch.on("engine:f"), tagged("outside, by its order", order=100)):
        engine.f(1)
    assert watch.left == [(["outside, by its order", 3], None)]


@pytest.mark.parametrize("observers", [1, 6])
def test_observers_cover_the_whole_life_of_coroutines_and_generators(engine: Any, observers: int) -> None:
    watches = [Watch() for _ in range(observers)]
    targets = ["engine:co", "engine:gen", "engine:agen", "engine:co_fail"]
    with aspects.woven(*(watch.on(target) for watch in watches for target in targets)):
        coroutine = engine.co(1)
        assert all(watch.entered == [] for watch in watches)
        assert asyncio.run(coroutine) == 3
        assert all(watch.left == [(3, None)] for watch in watches)

        items = engine.gen(2)
        assert next(items) == 0
        assert all((len(watch.entered), len(watch.left)) == (2, 1) for watch in watches)
        assert list(items) == [1]
        assert all(watch.left[1:] == [("end", None)] for watch in watches)

        items = engine.gen(2)
        next(items)
        del items  # collected while it was suspended
        assert all(isinstance(watch.left[2][1], GeneratorExit) for watch in watches)

        assert asyncio.run(collect(engine.agen(2))) == [0, 1]
        assert all(watch.left[3:] == [(None, None)] for watch in watches)
        with pytest.raises(ValueError, match="x"):
            asyncio.run(engine.co_fail("x"))
        assert all(isinstance(watch.left[4][1], ValueError) for watch in watches)


def test_a_cancelled_coroutine_leaves_its_observer(engine: Any) -> None:
    watch = Watch()

    async def cancel() -> None:
        task = asyncio.ensure_future(engine.co(1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    with aspects.woven(watch.on("engine:co"), around("engine:co")):
        asyncio.run(cancel())
    assert [type(error).__name__ for _, error in watch.left] == ["CancelledError"]


# -- async def targets ----------------------------------------------------------------------------------


async def async_hand_on(original: Any, *args: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0)
    return await original(*args, **kwargs)


async def async_native(proceed: Any, args: Any, kwargs: Any) -> Any:
    return await proceed(args, kwargs)


@pytest.mark.parametrize("first", ["sync", "async"])
@pytest.mark.parametrize("second", ["sync", "async"])
def test_around_and_native_hooks_on_async_targets_may_be_sync_or_async(
    engine: Any, first: str, second: str
) -> None:
    hooks: dict[str, Callable[..., Any]] = {"sync": hand_on, "async": async_hand_on}
    natives: dict[str, Any] = {"sync": lambda proceed, *call: proceed(*call), "async": async_native}
    with aspects.woven(
        around("engine:co", hooks[first]),
        advice("engine:co", HookType.NATIVE, natives[second]),
        advice("engine:co", HookType.NATIVE, natives[first]),
        around("engine:co", hooks[second]),
    ):
        assert inspect.iscoroutinefunction(engine.co)
        assert inspect.iscoroutine(made := engine.co(1))
        assert asyncio.run(made) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("kind", "hook", "result"),
    [
        (HookType.BEFORE, lambda a, b=2: ((a * 10,), {"b": b}), 12),
        (HookType.BEFORE, lambda *a, **k: None, 3),
        (HookType.AFTER, lambda result, *a, **k: result * 10, 30),
        (HookType.AFTER, lambda *a, **k: None, 3),
        (HookType.AFTER, lambda *a, **k: Result(None), None),
        (HookType.AROUND, lambda original, *a, **k: "cached", "cached"),
        (HookType.REPLACE, lambda a: ("replaced", a), ("replaced", 1)),
    ],
)
def test_hooks_on_async_targets_change_arguments_and_results(
    engine: Any, kind: HookType, hook: Callable[..., Any], result: Any, asynchronous: bool
) -> None:
    async def later(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return hook(*args, **kwargs)

    with aspects.woven(advice("engine:co", kind, later if asynchronous else hook), around("engine:co")):
        assert inspect.iscoroutinefunction(engine.co)
        assert asyncio.run(engine.co(1)) == result


@pytest.mark.parametrize("hook", [hand_on, async_hand_on])
def test_a_task_that_an_async_target_returns_is_not_awaited_for_it(engine: Any, hook: Any) -> None:
    async def use() -> Any:
        task = await engine.gives_task()
        assert isinstance(task, asyncio.Task)
        return await task

    with aspects.woven(around("engine:gives_task", hook)):
        assert asyncio.run(use()) == 3


# -- what cannot work -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "hook", "message"),
    [
        (HookType.OBSERVE, Watch, r"engine:f: the observer .* is a class: pass an instance"),
        (HookType.OBSERVE, hand_on, r"engine:f: the observer .* has neither enter\(\) nor exit\(\)"),
        (HookType.OBSERVE, types.SimpleNamespace(enter=None), r"has neither enter\(\) nor exit\(\)"),
        (HookType.OBSERVE, types.SimpleNamespace(enter=5, exit=print), "cannot be called"),
        (HookType.BEFORE, 5, r"engine:f: the hook 5 cannot be called"),
        ("around", hand_on, r"engine:f: 'around' is not a HookType; choose one of BEFORE, AFTER, AROUND"),
    ],
)
def test_wrong_hooks_are_refused_when_they_are_made(engine: Any, kind: Any, hook: Any, message: str) -> None:
    with pytest.raises(aspects.AspectsError, match=message) as caught:
        advice("engine:f", kind, hook)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("order", ["first", None, 1.5, float("nan")])
def test_an_order_that_cannot_be_compared_is_refused_when_the_hook_is_made(engine: Any, order: Any) -> None:
    with pytest.raises(TypeError, match=f"engine:f: order = {order!r}: write a whole number"):
        around("engine:f", order=order)


def test_what_carries_no_hooks_is_refused(engine: Any) -> None:
    with pytest.raises(TypeError, match="carries no hooks; decorate it with before, after, around"):
        aspects.weave(hand_on)


class Unhashable:
    """A callable that has no hash, as instances of dataclasses have none."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, original_fn: Any, *args: Any, **kwargs: Any) -> Any:
        return [original_fn(*args, **kwargs)]

    def enter(self, args: Any, kwargs: Any) -> None: ...

    def exit(self, token: Any, result: Any, error: BaseException | None) -> None: ...


def test_hooks_without_a_hash_run_and_the_code_that_holds_them_can_be_hashed(engine: Any) -> None:
    hook = Unhashable()
    observer = advice("engine:f", HookType.OBSERVE, hook)
    with aspects.woven(around("engine:f", hook), observer):
        assert engine.f(1) == [3]
        assert isinstance(hash(engine.f.__code__), int)  # as debuggers do
        assert observer.errors == 0
