"""The results of SGLang's hook registry, case by case, as JSON: run with its hooks adopted and without.

Each case makes its own modules. It returns results of calls, the registry's lists, or the type of an
exception, with the messages of the registry's logger, by level.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import math
import sys
import types
from typing import Any, ClassVar

from sglang.srt import plugins
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType, plugin_hook

AROUND, AFTER, BEFORE, REPLACE = HookType.AROUND, HookType.AFTER, HookType.BEFORE, HookType.REPLACE
said: list[str] = []


# Words that SGLang's own tests look for in the registry's messages.
SOUGHT = ("will override",)


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(
            " ".join([record.levelname, *(words for words in SOUGHT if words in record.getMessage())])
        )


def module(**content: Any) -> tuple[Any, str]:
    made = types.ModuleType(f"case_{len(sys.modules)}")
    vars(made).update(content)
    sys.modules[made.__name__] = made
    return made, made.__name__


def double(x: Any, y: int = 0) -> Any:
    """Twice x."""
    return 2 * x + y


def fresh(function: Any = double) -> Any:
    """A copy, so that no case sees another one's hooks."""
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    return functools.update_wrapper(copied, function, updated=()) and copied


def hook(target: str, *hooks: tuple[HookType, Any]) -> None:
    for hook_type, one in hooks:
        HookRegistry.register(target, one, hook_type)
    HookRegistry.apply_hooks()


def hooked(*hooks: tuple[HookType, Any], f: Any = double) -> Any:
    """A new module, whose function ``f`` has these hooks."""
    made, name = module(f=fresh(f))
    hook(f"{name}.f", *hooks)
    return made


def a_class() -> Any:
    """A new class with members of every kind."""

    class Thing:
        class Inner:
            def method(self) -> list[Any]:
                return ["inner"]

        def method(self, x: Any = 0) -> list[Any]:
            return ["method", x]

        @classmethod
        def of_class(cls, x: Any) -> list[Any]:
            return [cls.__name__, x]

        @staticmethod
        def static(x: Any) -> list[Any]:
            return ["static", x]

        def __call__(self, x: Any) -> list[Any]:
            return ["call", x]

    return Thing


def derived(base: Any, **members: Any) -> Any:
    return type("Derived", (base,), members)


def plus(number: Any) -> Any:
    def around(original_fn: Any, *args: Any, **kwargs: Any) -> Any:
        return original_fn(*args, **kwargs) + number

    return around


def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
        return type(error).__name__


HELPERS = set(globals())  # each function from here on is a case

# -- kinds of hooks ---------------------------------------------------------------------------------------


def each_kind_alone() -> Any:
    found = []
    for kind, one in (
        (AROUND, plus(1)),
        (BEFORE, lambda x: ((10 * x,), {"y": 1})),
        (BEFORE, lambda x: None),
        (BEFORE, lambda x: [[x + 1], {}]),
        (AFTER, lambda result, x: result + 5),
        (AFTER, lambda result, x: None),
        (AFTER, lambda result, x: 0),
        (AFTER, lambda result, x: False),
        (REPLACE, lambda x: 100 * x),
        (REPLACE, lambda *args, **kwargs: [args, kwargs]),
    ):
        made = hooked((kind, one))
        found.append(made.f(3))
    return found


def the_default_kind_is_after() -> Any:
    made, name = module(f=fresh())
    HookRegistry.register(f"{name}.f", lambda result, x: result + 1)
    HookRegistry.apply_hooks()
    return made.f(3)


def hooks_get_the_arguments_as_they_were_written() -> Any:
    seen: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append([args, kwargs])

    def around(original_fn: Any, *args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original_fn(*args, **kwargs)

    for kind, one in (
        (AROUND, around),
        (BEFORE, note),
        (AFTER, lambda result, *a, **k: note(*a, **k)),
        (REPLACE, note),
    ):
        made = hooked((kind, one))
        for args, kwargs in (
            ((1,), {}),
            ((1, 2), {}),
            ((1,), {"y": 2}),
            ((), {"x": 1}),
            ((), {"y": 2, "x": 1}),
        ):
            attempt(made.f, *args, **kwargs)
    return seen


def a_hook_may_take_what_its_target_does_not() -> Any:
    def around(original_fn: Any, *args: Any, extra: int = 0, **kwargs: Any) -> Any:
        return original_fn(*args[:1], **kwargs) + extra

    made = hooked((AROUND, around))
    return [made.f(1, extra=5), made.f(1, 2, 3, 4)]


def wrong_calls_raise() -> Any:
    made = hooked((AROUND, plus(1)))
    return [attempt(made.f), attempt(made.f, 1, 2, 3), attempt(made.f, 1, nothing=2)]


def what_hooks_raise_gets_through() -> Any:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("hook")

    found = []
    for kind in (AROUND, BEFORE, AFTER, REPLACE):
        made = hooked((kind, fails))
        found.append(attempt(made.f, 1))
    return found


def what_the_target_raises_gets_through() -> Any:
    seen = []

    def broken(x: Any) -> Any:
        raise ZeroDivisionError

    made = hooked((AFTER, lambda result, x: seen.append(result)), (BEFORE, lambda x: None), f=broken)
    return [attempt(made.f, 1), seen]


def callables_of_every_kind_are_hooks() -> Any:
    class Instance:
        def __call__(self, original_fn: Any, x: Any) -> Any:
            return original_fn(x) + 1

        def method(self, original_fn: Any, x: Any) -> Any:
            return original_fn(x) + 2

    def with_number(number: int, original_fn: Any, x: Any) -> Any:
        return original_fn(x) + number

    found = []
    for one in (Instance(), Instance().method, functools.partial(with_number, 3)):
        made = hooked((AROUND, one))
        found.append(made.f(1))
    return found


# -- several ----------------------------------------------------------------------------------------------


def order_is_that_of_registration_with_replace_innermost() -> Any:
    calls: list[Any] = []

    def noting(label: str) -> Any:
        def around(original_fn: Any, x: Any) -> Any:
            calls.append(label)
            return [*original_fn(x), label]

        return around

    made = hooked(
        (AROUND, noting("first")),
        (BEFORE, lambda x: ((x + 1,), {})),
        (REPLACE, lambda x: [x]),
        (AROUND, noting("second")),
        (AFTER, lambda result, x: [*result, "after"]),
    )
    return [made.f(3), calls]


def the_same_hook_twice_runs_twice() -> Any:
    one = plus(1)
    return hooked((AROUND, one), (AROUND, one)).f(0)


def the_last_replace_wins_and_the_others_are_told() -> Any:
    made = hooked((REPLACE, lambda x: 1), (REPLACE, lambda x: 2), (AROUND, plus(10)))
    return made.f(0)


def applying_again_changes_nothing() -> Any:
    made = hooked((AROUND, plus(1)))
    before = made.f
    HookRegistry.apply_hooks()
    plugins.HookRegistry.apply_hooks()
    return [made.f(0), made.f is before]


def a_late_hook_on_a_patched_target_is_not_applied() -> Any:
    made = hooked((AROUND, plus(1)))
    hook(f"{made.__name__}.f", (AROUND, plus(100)))
    return [made.f(0), len(HookRegistry._hooks[f"{made.__name__}.f"])]


def a_late_hook_on_another_target_is_applied() -> Any:
    made, name = module(f=fresh(), g=fresh())
    hook(f"{name}.f", (AROUND, plus(1)))
    hook(f"{name}.g", (AROUND, plus(2)))
    return [made.f(0), made.g(0)]


# -- what the registry reports ------------------------------------------------------------------------------


def lists_of_the_registry() -> Any:
    _, name = module(f=fresh(), g=fresh())
    one = plus(1)
    HookRegistry.register(f"{name}.f", one, AROUND, source=HookSource("plugin", "dist"))
    token = hook_registry._current_plugin_source.set(HookSource("current", None))
    HookRegistry.register(f"{name}.g", one, AROUND)
    hook_registry._current_plugin_source.reset(token)
    before = sorted(HookRegistry._patched)
    HookRegistry.apply_hooks()
    entries = [
        [key.partition(".")[2], kind.value, same is one, source and list(source)]
        for key, found in HookRegistry._hooks.items()
        for kind, same, source in found
    ]
    return [before, [target.partition(".")[2] for target in sorted(HookRegistry._patched)], entries]


def reset_forgets_and_leaves_what_is_in_place() -> Any:
    made, name = module(f=fresh(), g=fresh())
    HookRegistry.register(f"{name}.g", plus(1), AROUND)
    hook(f"{name}.f", (AROUND, plus(1)))
    HookRegistry.reset()
    HookRegistry.apply_hooks()
    return [made.f(0), made.g(0), len(HookRegistry._hooks), len(HookRegistry._patched)]


def a_registered_hook_that_was_reset_before_it_was_applied() -> Any:
    made, name = module(f=fresh())
    HookRegistry.register(f"{name}.f", plus(1), AROUND)
    HookRegistry.reset()
    HookRegistry.apply_hooks()
    return made.f(0)


def hooks_after_a_reset_come_on_top() -> Any:
    made = hooked((AROUND, plus(1)))
    HookRegistry.reset()
    hook(f"{made.__name__}.f", (AROUND, plus(10)))
    HookRegistry.reset()
    hook(f"{made.__name__}.f", (BEFORE, lambda x: ((x + 100,), {})))
    return made.f(0)


def a_replace_after_a_reset_covers_what_was_there() -> Any:
    made = hooked((AROUND, plus(1)))
    HookRegistry.reset()
    hook(f"{made.__name__}.f", (AROUND, plus(10)), (REPLACE, lambda x: 7))
    return made.f(0)


def a_target_that_was_restored_by_hand_is_hooked_again() -> Any:
    class Thing:
        def __init__(self, x: int) -> None:
            self.x = x

    _, name = module(Thing=Thing)
    found = []
    for _ in range(3):
        seen: list[Any] = []
        before = Thing.__dict__["__init__"]
        HookRegistry.reset()
        hook(f"{name}.Thing.__init__", (BEFORE, lambda self, x, seen=seen: seen.append(x)))
        found.append([Thing(3).x, seen])
        Thing.__init__ = before  # type: ignore[method-assign]
        found.append([Thing(4).x, list(seen)])
    return found


def the_decorator_answers_the_hook_itself() -> Any:
    made, name = module(f=fresh(), Thing=type("Thing", (), {}))

    @plugin_hook(f"{name}.f", type=REPLACE)  # type: ignore[untyped-decorator]
    def replacement(x: Any) -> Any:
        return x + 42

    @plugin_hook(f"{name}.Thing", type=REPLACE)
    class Other(made.Thing):  # type: ignore[misc,name-defined]
        pass

    HookRegistry.apply_hooks()
    return [replacement(0), made.f(0), made.Thing is Other]


# -- errors -------------------------------------------------------------------------------------------------


def a_class_is_a_replace_hook_only() -> Any:
    class Hook:
        pass

    found = [attempt(HookRegistry.register, "a.b", Hook, kind) for kind in (BEFORE, AFTER, AROUND)]
    return [found, len(HookRegistry._hooks)]


def a_class_target_takes_replace_only() -> Any:
    made, name = module(Thing=a_class(), f=fresh())
    before = made.Thing
    HookRegistry.register(f"{name}.f", plus(1), AROUND)
    hook(f"{name}.Thing", (AROUND, plus(1)))
    return [made.Thing is before, sorted(HookRegistry._patched) == [f"{name}.f"], made.f(0)]


def hooks_of_a_target_are_applied_together_or_not_at_all() -> Any:
    made, name = module(Thing=a_class())
    before = made.Thing
    hook(f"{name}.Thing", (REPLACE, derived(before)), (AROUND, plus(1)))
    return [made.Thing is before, len(HookRegistry._patched)]


def what_is_missing_is_tried_again() -> Any:
    made, name = module()
    hook(f"{name}.f", (AROUND, plus(1)))
    patched = len(HookRegistry._patched)
    HookRegistry.apply_hooks()
    made.f = fresh()
    HookRegistry.apply_hooks()
    HookRegistry.apply_hooks()
    return [patched, made.f(0), len(HookRegistry._patched)]


def a_module_that_is_missing_is_tried_again() -> Any:
    hook("case_of_no_module.f", (AROUND, plus(1)))
    patched = len(HookRegistry._patched)
    made = types.ModuleType("case_of_no_module")
    made.f = fresh()  # type: ignore[attr-defined]
    sys.modules[made.__name__] = made
    HookRegistry.apply_hooks()
    return [patched, made.f(0), len(HookRegistry._patched)]


def a_member_that_is_missing() -> Any:
    _, name = module(Thing=a_class())
    hook(f"{name}.Thing.gone", (AROUND, plus(1)))
    return len(HookRegistry._patched)


def odd_targets_leave_the_others_alone() -> Any:
    made, name = module(f=fresh())
    for target in ("nodots", "", "case_gone.sub.f", "sglang.srt.gone.f", ".", "a b.c", f"{name}.f.g.h"):
        HookRegistry.register(target, plus(1), AROUND)
    hook(f"{name}.f", (AROUND, plus(1)))
    return [made.f(0), sorted(HookRegistry._patched) == [f"{name}.f"]]


def a_type_that_is_none() -> Any:
    made, name = module(f=fresh(), g=fresh())
    found = attempt(HookRegistry.register, f"{name}.f", plus(1), "around")
    hook(f"{name}.g", (AROUND, plus(1)))
    return [found, made.f(0), made.g(0), len(HookRegistry._patched)]


# -- classes and their members ------------------------------------------------------------------------------


def methods_of_every_kind() -> Any:
    Thing = a_class()  # noqa: N806
    _, name = module(Thing=Thing)
    for member in ("method", "of_class", "static", "__call__"):
        HookRegistry.register(f"{name}.Thing.{member}", plus(["around"]), AROUND)
    HookRegistry.apply_hooks()
    found = []
    for cls in (Thing, derived(Thing)):
        found += [
            cls().method(1),
            cls.of_class(2),
            cls().of_class(3),
            cls.static(4),
            cls().static(5),
            cls()(6),
        ]
    kinds = [type(vars(Thing)[member]).__name__ for member in ("method", "of_class", "static")]
    return [found, kinds]


def members_get_self_and_cls() -> Any:
    Thing = a_class()  # noqa: N806
    _, name = module(Thing=Thing)
    seen: list[Any] = []
    HookRegistry.register(f"{name}.Thing.method", lambda self, x: seen.append(type(self).__name__), BEFORE)
    HookRegistry.register(f"{name}.Thing.of_class", lambda result, cls, x: seen.append(cls.__name__), AFTER)
    HookRegistry.apply_hooks()
    return [Thing().method(1), Thing.of_class(x=2), seen]


def a_replaced_member() -> Any:
    Thing = a_class()  # noqa: N806
    _, name = module(Thing=Thing)
    HookRegistry.register(f"{name}.Thing.method", lambda self, x: ["new", x], REPLACE)
    HookRegistry.register(f"{name}.Thing.of_class", lambda cls, x: [cls.__name__, x], REPLACE)
    HookRegistry.register(f"{name}.Thing.static", lambda x: ["new", x], REPLACE)
    HookRegistry.apply_hooks()
    return [Thing().method(1), Thing.of_class(2), Thing.static(3)]


def an_inherited_method_is_hooked_for_the_class_that_is_named() -> Any:
    made, name = module(Base=(base := a_class()), Derived=derived(base))
    hook(f"{name}.Derived.method", (AROUND, plus(["around"])))
    return [made.Base().method(), made.Derived().method()]


def a_nested_class() -> Any:
    made, name = module(Thing=a_class())
    hook(f"{name}.Thing.Inner.method", (AROUND, plus(["around"])))
    return made.Thing.Inner().method()


def a_class_in_the_place_of_another() -> Any:
    Thing = a_class()  # noqa: N806
    Other = derived(Thing, method=lambda self: ["other"])  # noqa: N806
    made, name = module(Thing=Thing)
    copy, _ = module(Alias=Thing)
    HookRegistry.register(f"{name}.Thing.method", plus(["around"]), AROUND)
    hook(f"{name}.Thing", (REPLACE, Other))
    answer = [made.Thing is Other, copy.Alias is Other, isinstance(made.Thing(), Thing)]
    return [*answer, made.Thing().method(), Thing().method()]


def a_method_replaced_in_the_class_that_replaces() -> Any:
    made, name = module(Thing=a_class())
    HookRegistry.register(f"{name}.Thing", derived(made.Thing, method=lambda self: ["other"]), REPLACE)
    hook(f"{name}.Thing.method", (REPLACE, lambda self: ["new"]))
    return made.Thing().method()


def a_member_only_the_replacement_has() -> Any:
    made, name = module(Thing=a_class())
    HookRegistry.register(f"{name}.Thing.more", plus(1), AROUND)
    hook(f"{name}.Thing", (REPLACE, derived(made.Thing, more=lambda self: 1)))
    return [made.Thing().more(), len(HookRegistry._patched)]


def an_instance_in_a_module() -> Any:
    Thing = a_class()  # noqa: N806
    made, name = module(thing=Thing(), other=Thing())
    hook(f"{name}.thing.method", (AROUND, plus(["around"])))
    return [made.thing.method(1), made.other.method(1)]


# -- functions ----------------------------------------------------------------------------------------------


def copies_in_other_modules_follow() -> Any:
    shared = fresh()
    made, name = module(f=shared)
    first, _ = module(f=shared, again=shared)
    second, _ = module(f=fresh())
    hook(f"{name}.f", (AROUND, plus(1)))
    return [made.f(0), first.f(0), first.again(0), second.f(0), first.f is made.f]


def a_hooked_function_looks_like_its_target() -> Any:
    made, name = module(f=fresh())
    original = made.f
    hook(f"{name}.f", (AROUND, plus(1)))
    found = made.f
    return [
        found.__name__,
        found.__qualname__,
        found.__module__,
        found.__doc__,
        str(inspect.signature(found)),
        found.__wrapped__ is original,
        isinstance(found, types.FunctionType),
    ]


def generators() -> Any:
    def counted(x: int) -> Any:
        yield from range(x)

    def around(original_fn: Any, x: int) -> Any:
        yield "first"
        yield from original_fn(x)

    return list(hooked((AROUND, around), f=counted).f(3))


def async_targets() -> Any:
    async def later(x: int) -> int:
        return x

    found = []

    async def around(original_fn: Any, x: int) -> Any:
        return await original_fn(x) + 1

    async def replacement(x: int) -> Any:
        return x + 100

    for kind, one in (
        (AROUND, around),
        (AROUND, lambda original_fn, x: original_fn(x)),
        (REPLACE, replacement),
        (BEFORE, lambda x: ((x + 5,), {})),
    ):
        found.append(asyncio.run(hooked((kind, one), f=later).f(1)))
    return found


def async_generators() -> Any:
    async def counted(x: int) -> Any:
        for number in range(x):
            yield number

    async def around(original_fn: Any, x: int) -> Any:
        async for number in original_fn(x):
            yield number + 1

    made = hooked((AROUND, around), f=counted)

    async def collect() -> list[int]:
        return [number async for number in made.f(3)]

    return asyncio.run(collect())


def callables_other_than_functions() -> Any:
    class Instance:
        def __call__(self, x: int) -> int:
            return x

    made, name = module(
        builtin=math.sinh,
        partial=functools.partial(double, 3),
        instance=Instance(),
        cached=functools.lru_cache(double),
    )
    for target in ("builtin", "partial", "instance", "cached"):
        HookRegistry.register(f"{name}.{target}", plus(1), AROUND)
    HookRegistry.apply_hooks()
    return [made.builtin(0), made.partial(), made.instance(1), made.cached(2)]


def a_second_registry_has_hooks_of_its_own() -> Any:
    class Second(HookRegistry):  # type: ignore[misc]
        _hooks = type(HookRegistry._hooks)(list)
        _patched: ClassVar[set[str]] = set()

    made, name = module(f=fresh(), g=fresh())
    Second.register(f"{name}.f", plus(1), AROUND)
    HookRegistry.register(f"{name}.g", plus(2), AROUND)
    HookRegistry.apply_hooks()
    before = [made.f(0), made.g(0), len(Second._patched)]
    Second.apply_hooks()
    HookRegistry.reset()
    return [before, made.f(0), made.g(0), len(Second._patched), len(Second._hooks)]


CASES = [made for name, made in list(globals().items()) if name not in HELPERS and inspect.isfunction(made)]


def main() -> None:
    if sys.argv[1] == "adopted":
        from sgl_aspects import load_plugins

        load_plugins()
        assert HookRegistry.apply_hooks.__func__.__module__ == "sgl_aspects.engines.sglang.adoption"
    listener = Listener(logging.WARNING)
    hook_registry.logger.addHandler(listener)
    logging.getLogger("sgl_aspects").setLevel(logging.CRITICAL)
    answers = {}
    for function in CASES:
        HookRegistry.reset()
        said.clear()
        try:
            answer = function()
        except Exception as error:  # noqa: BLE001  likewise
            answer = f"raises {type(error).__name__}: {error}"
        answers[function.__name__] = {"answer": answer, "said": list(said)}
    print(json.dumps(answers, default=list))


if __name__ == "__main__":
    main()
