"""Replacing a class: the new one stands wherever the old one stood, and goes without a trace."""

from __future__ import annotations

import copy
import itertools
import pickle
import textwrap
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookSource, HookType, State, Target
from sgl_aspects.errors import HookError
from tests.support.stand_ins import Engine
from tests.support.woven_modules import mark

ENGINE = """
class Base:
    def run(self): return ["Base"]
    def idle(self): return ["idle"]

class Scheduler(Base):
    limit = 3
    def __init__(self, size=1): self.size = size
    def run(self): return [*super().run(), "Scheduler"]
    def plan(self): return ["plan"]
    @classmethod
    def create(cls, size): return cls(size)
    @staticmethod
    def kind(): return ["kind"]
    class Config:
        def read(self): return ["Config"]

class Derived(Scheduler):
    def run(self): return [*super().run(), "Derived"]

EntryClass = [Scheduler, Base]
REGISTRY = {"scheduler": Scheduler}
CHOICES = {Scheduler}

def default(cls=Scheduler): return cls
def keyword(*, cls=Scheduler): return cls
def make_maker(cls):
    def make(): return cls()
    return make
closure = make_maker(Scheduler)

class Server:
    scheduler_class = Scheduler
    def __init__(self): self.chosen = Scheduler
    def make(self): return self.scheduler_class()
SERVER = Server()
PAIR = (Scheduler, Base)
def is_scheduler(thing): return isinstance(thing, Scheduler)
"""

PLUGIN = """
import engine
from engine import Scheduler
Original = Scheduler

class Better(Scheduler):
    limit = 5
    def run(self):
        assert Original is Scheduler
        assert super().run() == Scheduler.run(self) == Original.run(self)
        return [*super().run(), "Better"]
    def extra(self): return "extra"

def rebuild(): return Better()
ALL = [Better]
CLOSED = (lambda cls: lambda: cls)(Better)

class EvenBetter(Better):
    def run(self): return [*super().run(), "EvenBetter"]
"""


def replacing(target: str, cls: type, **options: Any) -> aspects.Advice:
    return aspects.Advice(Target.parse(target), HookType.REPLACE, cls, **options)


def replacing_function(target: str, name: str = "hook", **options: Any) -> aspects.Advice:
    """A hook that returns only its name, in a list."""
    return aspects.Advice(Target.parse(target), HookType.REPLACE, lambda *args: [name], **options)


@pytest.fixture
def both(engine: Engine) -> tuple[Any, Any]:
    """The modules `engine` and `plugin`, loaded."""
    engine.write("engine.py", ENGINE)
    engine.write("copier.py", "from engine import Scheduler, Scheduler as Renamed\n")
    engine.write("plugin.py", PLUGIN)
    engine.load("copier")
    return engine.load("engine"), engine.load("plugin")


def holders(module: Any, engine: Engine) -> list[Any]:
    """What stands in every kind of holder."""
    copier = engine.load("copier")
    return [
        module.Scheduler,
        copier.Scheduler,
        copier.Renamed,
        module.EntryClass[0],
        module.REGISTRY["scheduler"],
        next(iter(module.CHOICES)),
        module.default(),
        module.keyword(),
        type(module.closure()),
        module.Server.scheduler_class,
        module.Server().chosen,
        module.SERVER.chosen,
        type(module.SERVER.make()),
    ]


def test_every_holder_has_the_new_class_and_then_the_old_one_again(both: Any, engine: Engine) -> None:
    module, plugin = both
    old = module.Scheduler
    with aspects.woven(replacing("engine:Scheduler", plugin.Better)):
        assert holders(module, engine) == [plugin.Better] * 13
        assert module.EntryClass[1] is module.Base
        stale = [str(stale.holder) for stale in aspects.report().stale]
        of_subclass = "the bases of engine:Derived, which was defined before; replace it, too"
        assert stale == ["a tuple of 2 in module engine", of_subclass]  # PAIR
        assert "still held by a tuple of 2" in aspects.explain("engine:Scheduler")
    assert holders(module, engine) == [old] * 13
    assert set(old.__subclasses__()) == {module.Derived, plugin.Better}


def test_a_class_in_a_module_that_is_not_loaded_yet(engine: Engine) -> None:
    engine.write("engine.py", ENGINE)
    engine.write("copier.py", "from engine import Scheduler, Scheduler as Renamed\n")

    class Alone:
        def run(self) -> list[str]:
            return ["Alone"]

    with aspects.woven(replacing("engine:Scheduler", Alone)) as handle:
        module = engine.load("engine")
        assert handle.states == (State.WOVEN,)
        assert engine.load("copier").Renamed is module.Scheduler is module.default() is Alone
        assert module.is_scheduler(module.Scheduler())
        assert module.Derived().run() == ["Base", "Scheduler", "Derived"]
    assert engine.load("copier").Scheduler is module.Scheduler is not Alone


def test_isinstance_and_issubclass_hold_in_the_ways_that_users_rely_on(both: Any) -> None:
    module, plugin = both
    old, before = module.Scheduler, module.Scheduler()
    with aspects.woven(replacing("engine:Scheduler", plugin.Better)):
        made = module.Scheduler()
        for cls in (old, module.Scheduler, plugin.Better, module.Base):
            assert isinstance(made, cls)
            assert issubclass(module.Scheduler, cls)
        assert issubclass(module.Derived, old)
        assert module.is_scheduler(made)
        assert module.is_scheduler(plugin.rebuild())
        assert type(made) is module.Scheduler
        assert type(module.Scheduler.create(4)) is plugin.Better
        assert (module.Scheduler.limit, module.Derived.limit) == (5, 3)
    assert not isinstance(before, plugin.Better)
    assert isinstance(before, module.Scheduler)


def test_the_replacements_own_module_goes_on_with_the_original(both: Any) -> None:
    module, plugin = both
    for _ in range(2):
        with aspects.woven(replacing("engine:Scheduler", plugin.Better)):
            assert module.Scheduler().run() == ["Base", "Scheduler", "Better"]
            assert plugin.Original is plugin.Scheduler is not module.Scheduler
        assert type(plugin.rebuild()) is plugin.Better is plugin.ALL[0] is plugin.CLOSED()
        assert plugin.EvenBetter().run() == ["Base", "Scheduler", "Better", "EvenBetter"]
        assert plugin.EvenBetter.__bases__ == (plugin.Better,)
        assert module.Scheduler().run() == ["Base", "Scheduler"]


def test_another_module_that_had_the_replacement_before_keeps_it(both: Any, engine: Engine) -> None:
    module, plugin = both
    engine.write("user.py", "from plugin import Better\n")
    user = engine.load("user")
    with aspects.woven(replacing("engine:Scheduler", plugin.Better)):
        assert user.Better is module.Scheduler
    assert user.Better is plugin.Better is not module.Scheduler


def test_a_replacement_may_hold_the_original_in_any_way(both: Any) -> None:
    module, _ = both
    Old = module.Scheduler  # noqa: N806

    def decorated(function: Any) -> Any:
        return lambda self: function(self)

    class New(Old):  # type: ignore[misc, valid-type]
        original = Old

        def run(self, cls: Any = Old) -> list[str]:
            assert Old.run is cls.run is self.original.run
            return [*Old.run(self), "New"]

        @decorated
        def plan(self) -> list[str]:
            return [*super().plan(), *Old.plan(self), "New"]

        @staticmethod
        def kind() -> list[str]:
            return [*Old.kind(), "New"]

        @property
        def both(self) -> Any:
            return (lambda: Old)()

    with aspects.woven(replacing("engine:Scheduler", New)):
        made = module.Scheduler()
        assert made.run() == ["Base", "Scheduler", "New"]
        assert made.plan() == ["plan", "plan", "New"]
        assert made.kind() == ["kind", "New"]
        assert made.both is New.original is Old is not module.Scheduler
    assert New().run() == ["Base", "Scheduler", "New"]
    assert New().plan() == ["plan", "plan", "New"]


def test_classes_that_the_engine_derives_meanwhile_keep_the_replacement(both: Any, engine: Engine) -> None:
    module, plugin = both
    engine.write("late.py", "from engine import Scheduler\nclass Late(Scheduler): pass\n")
    with aspects.woven(replacing("engine:Scheduler", plugin.Better)):
        late = engine.load("late")
        assert late.Late().run() == ["Base", "Scheduler", "Better"]
    assert late.Scheduler is module.Scheduler
    assert late.Late().run() == ["Base", "Scheduler", "Better"]


# -- stacked ----------------------------------------------------------------------------------------------


def test_the_last_replacement_wins_and_a_warning_names_both(
    both: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, plugin = both
    first = replacing("engine:Scheduler", plugin.Better, source=HookSource("one", "one-dist"))
    second = replacing("engine.Scheduler", plugin.EvenBetter, source=HookSource("two", "two-dist"))
    with aspects.woven(first):
        with aspects.woven(second):
            assert module.Scheduler is plugin.EvenBetter
            (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            for name in ("one (one-dist)", "two (two-dist)", "plugin.Better", "plugin.EvenBetter"):
                assert name in warning
        assert module.Scheduler is plugin.Better
    assert module.Scheduler.__name__ == "Scheduler"


@pytest.mark.parametrize("removal", list(itertools.permutations(range(3))))
def test_stacked_replacements_are_undone_in_any_order(
    both: Any, engine: Engine, removal: tuple[int, ...]
) -> None:
    module, plugin = both
    old = module.Scheduler

    class Other(old):  # type: ignore[misc, valid-type]
        def run(self) -> list[str]:
            return [*old.run(self), "Other"]

    classes = [plugin.Better, Other, plugin.EvenBetter]
    bases = [cls.__bases__ for cls in classes]
    handles = [aspects.weave(replacing("engine:Scheduler", cls)) for cls in classes]
    left = [0, 1, 2]
    for index in removal:
        assert holders(module, engine) == [classes[left[-1]]] * 13
        assert [cls.__bases__ for cls in classes] == bases
        handles[index].disable()
        handles[index].enable()
        assert module.Scheduler is classes[left[-1]]
        handles[index].remove()
        left.remove(index)
    assert holders(module, engine) == [old] * 13
    assert [cls.__bases__ for cls in classes] == bases
    assert plugin.Better.__name__ == type(plugin.rebuild()).__name__ == "Better"
    assert plugin.Scheduler is plugin.Original is old
    assert set(old.__subclasses__()) == {module.Derived, plugin.Better, Other}


# -- with hooks on methods --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loaded", "order"),
    [*((True, order) for order in itertools.permutations(range(3))), (False, (0, 1, 2)), (False, (2, 1, 0))],
)
def test_hooks_on_methods_follow_the_class_that_stands_there(
    engine: Engine, order: tuple[int, ...], loaded: bool
) -> None:
    """A method that the replacement overrides (run), and one that it inherits (plan)."""
    engine.write("engine.py", ENGINE)
    engine.write("plugin.py", PLUGIN)
    module, plugin = engine.load("engine"), engine.load("plugin")
    old = module.Scheduler
    advices = [
        replacing("engine:Scheduler", plugin.Better),
        mark("engine:Scheduler.run"),
        mark("engine:Scheduler.plan"),
    ]
    if loaded:
        handles = [aspects.weave(advices[index]) for index in order]
    else:
        handles = [aspects.weave(*(advices[index] for index in order))]
    assert module.Scheduler().run() == ["Base", "Scheduler", "Better", "hook"]
    assert module.Scheduler().plan() == ["plan", "hook"]
    assert module.Derived().run() == ["Base", "Scheduler", "Derived"]
    assert old.run(old()) == ["Base", "Scheduler"]
    assert "plan" in vars(old)
    assert old().plan() == ["plan"]
    replacement = next(handle for handle in handles if advices[0] in handle.advices)
    replacement.disable()
    if loaded:
        assert module.Scheduler is old
        assert module.Scheduler().run() == ["Base", "Scheduler", "hook"]
        assert module.Scheduler().plan() == ["plan", "hook"]
        replacement.enable()
        assert module.Scheduler().run() == ["Base", "Scheduler", "Better", "hook"]
    for handle in handles:
        handle.remove()
    assert "plan" not in vars(plugin.Better)
    for cls, expected in ((old, ["Scheduler"]), (plugin.Better, ["Scheduler", "Better"])):
        assert cls().run() == ["Base", *expected]
        assert not hasattr(cls.run, "__wrapped__")


@pytest.mark.parametrize("first", ["class", "method"])
def test_removing_the_class_leaves_the_hooks_on_its_methods(both: Any, first: str) -> None:
    module, plugin = both
    advices = [replacing("engine:Scheduler", plugin.Better), mark("engine:Scheduler.run")]
    handles = [aspects.weave(advice) for advice in (advices if first == "class" else reversed(advices))]
    by_class = handles[0 if first == "class" else 1]
    by_class.remove()
    assert module.Scheduler().run() == ["Base", "Scheduler", "hook"]
    assert advices[1].state is State.WOVEN
    assert not hasattr(plugin.Better.__dict__["run"], "__wrapped__")
    for handle in handles:
        handle.remove()
    assert module.Scheduler().run() == ["Base", "Scheduler"]


@pytest.mark.parametrize("inherits", [False, True])  # the nested class from the replaced one
def test_a_hook_on_a_nested_class_follows_too(both: Any, inherits: bool) -> None:
    module, plugin = both
    first = [replacing("engine:Scheduler", plugin.Better)] * inherits
    with aspects.woven(mark("engine:Scheduler.Config.read"), *first):

        class New(module.Scheduler):  # type: ignore[misc, name-defined]
            class Config:
                def read(self) -> list[str]:
                    return ["New.Config"]

        with aspects.woven(replacing("engine:Scheduler", New)):
            assert module.Scheduler.Config().read() == ["New.Config", "hook"]
            assert New.__mro__[1].Config().read() == ["Config"]
        assert module.Scheduler.Config().read() == ["Config", "hook"]
        assert New.Config().read() == ["New.Config"]


def test_a_hook_whose_method_the_replacement_lacks_is_missing(both: Any) -> None:
    module, _ = both

    class Bare:
        pass

    advice = mark("engine:Scheduler.run")
    with aspects.woven(advice, replacing("engine:Scheduler", Bare)) as handle:
        assert handle.states == (State.MISSING, State.WOVEN)
    with aspects.woven(advice):
        with aspects.woven(replacing("engine:Scheduler", Bare)):
            assert aspects.report().hooks[0].state is State.MISSING
        assert aspects.report().hooks[0].state is State.WOVEN
        assert module.Scheduler().run() == ["Base", "Scheduler", "hook"]


# -- what may not be --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook_type", [HookType.BEFORE, HookType.AFTER, HookType.AROUND, HookType.NATIVE])
def test_a_class_is_a_hook_only_to_replace(hook_type: HookType) -> None:
    class Hook:
        pass

    message = f"class Hook can only be a REPLACE hook, not {hook_type.name}; use a function"
    with pytest.raises(TypeError, match=message):
        aspects.HookRegistry.register("engine:Scheduler", Hook, hook_type)


@pytest.mark.parametrize("hook_type", list(HookType))
def test_a_function_hook_on_a_class_says_how_to_mend_it(both: Any, hook_type: HookType) -> None:
    module, _ = both
    old = module.Scheduler

    class Observer:
        def enter(self, args: Any, kwargs: Any) -> None: ...
        def exit(self, token: Any, result: Any, error: Any) -> None: ...

    hook: Any = Observer() if hook_type is HookType.OBSERVE else lambda *args: None
    with pytest.raises(TypeError, match=r"engine:Scheduler is a class, .* 'engine:Scheduler.__init__'"):
        aspects.weave(aspects.Advice(Target.parse("engine:Scheduler"), hook_type, hook))
    assert module.Scheduler is old


def test_a_class_cannot_replace_a_function(both: Any) -> None:
    _, plugin = both
    for target in ("engine:default", "engine:Scheduler.run"):
        with pytest.raises(HookError, match="is not a class: a class cannot replace it; pass a function"):
            aspects.weave(replacing(target, plugin.Better))


def test_a_pattern_may_replace_classes_and_skips_functions(both: Any) -> None:
    module, plugin = both
    with aspects.woven(replacing("engine:Sched*", plugin.Better)):
        assert module.Scheduler is plugin.Better
    with aspects.woven(replacing("engine:d*", plugin.Better)) as handle:
        assert module.default() is module.Scheduler
        assert handle.states == (State.PENDING,) or handle.states == (State.MISSING,)


# -- kinds of classes -------------------------------------------------------------------------------------

KINDS = {
    "dataclass": """
        import dataclasses
        @dataclasses.dataclass
        class Old:
            a: int = 1
            b: str = "x"
        # the plugin
        import dataclasses
        @dataclasses.dataclass
        class New(Old):
            c: float = 0.5
    """,
    "dataclass with slots": """
        import dataclasses
        @dataclasses.dataclass(slots=True)
        class Old:
            a: int = 1
        # the plugin
        import dataclasses
        @dataclasses.dataclass(slots=True)
        class New(Old):
            c: float = 0.5
    """,
    "metaclass": """
        class Meta(type):
            made = []
            def __call__(cls, *args):
                cls.made.append(cls.__name__)
                return super().__call__(*args)
        class Old(metaclass=Meta):
            a = 1
        # the plugin
        class New(Old): pass
    """,
    "slots": """
        class Old:
            __slots__ = ("a",)
            def __init__(self): self.a = 1
        # the plugin
        class New(Old):
            __slots__ = ("b",)
    """,
    "generic": """
        from typing import Generic, TypeVar
        T = TypeVar("T")
        class Old(Generic[T]):
            a = 1
        Alias = Old[int]
        # the plugin
        class New(Old[int]): pass
    """,
    "init_subclass": """
        class Old:
            a = 1
            seen = []
            def __init_subclass__(cls): Old.seen.append(cls.__name__)
        # the plugin
        class New(Old): pass
    """,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_class_is_replaced_and_comes_back(engine: Engine, kind: str) -> None:
    old_source, new_source = textwrap.dedent(KINDS[kind]).split("# the plugin")
    holding = "class Holder:\n    cls = Old\ntable = {'old': Old}\n"
    engine.write("engine.py", old_source + holding)
    engine.write("plugin.py", "from engine import Old\n" + new_source)
    module, plugin = engine.load("engine"), engine.load("plugin")
    old = module.Old
    with aspects.woven(replacing("engine:Old", plugin.New)):
        assert module.Old is module.Holder.cls is module.table["old"] is plugin.New
        assert plugin.Old is old
        made = module.Old()
        assert made.a == 1
        assert copy.deepcopy(made).a == 1
    assert module.Old is module.Holder.cls is module.table["old"] is old


def test_exceptions_are_caught_by_code_that_copied_them(engine: Engine) -> None:
    engine.write("engine.py", "class Old(Exception): pass\ndef fail(): raise Old('engine')\n")
    engine.write("plugin.py", "from engine import Old\nclass New(Old):\n    code = 5\n")
    engine.write(
        "user.py",
        """
        import engine
        from engine import Old as Copied
        STALE = (Copied, KeyError)
        def caught(cls):
            try:
                engine.fail()
            except cls as error:
                return error
        def by_copy():
            try:
                engine.fail()
            except Copied as error:
                return error
        def by_tuple(): return caught(STALE)
        """,
    )
    module, plugin, user = engine.load("engine"), engine.load("plugin"), engine.load("user")
    with aspects.woven(replacing("engine:Old", plugin.New)):
        for error in (user.by_copy(), user.by_tuple(), user.caught(plugin.Old), user.caught(plugin.New)):
            assert type(error) is plugin.New
            assert error.code == 5
    assert type(user.by_copy()) is module.Old is not plugin.New


def test_instances_are_pickled(both: Any) -> None:
    module, plugin = both
    early = pickle.dumps(module.Scheduler(7))
    with aspects.woven(replacing("engine:Scheduler", plugin.Better)):
        made = pickle.loads(pickle.dumps(module.Scheduler(5)))
        assert type(made) is plugin.Better
        assert made.size == 5
        assert type(pickle.loads(early)) is plugin.Better  # by the name of the class, as always
        assert pickle.loads(pickle.dumps(module.Derived(3))).run() == module.Derived().run()
        assert pickle.loads(pickle.dumps(module.Scheduler)) is plugin.Better
    assert type(pickle.loads(early)) is module.Scheduler


def test_instances_that_were_made_before_are_reported(both: Any) -> None:
    module, plugin = both
    old = module.Scheduler()
    with aspects.woven(replacing("engine:Scheduler", plugin.Better)):
        assert type(old).__name__ == "Scheduler"
        assert old.run() == ["Base", "Scheduler"]
        holders = [stale.holder for stale in aspects.report().stale]
        assert "instances that were made before" in holders
    assert aspects.report().stale == ()


def test_a_replacement_that_is_not_a_subclass(both: Any) -> None:
    module, _ = both
    old = module.Scheduler

    class Duck:
        def __init__(self, size: int = 1) -> None:
            self.size = size

        def run(self) -> list[str]:
            return ["Duck"]

    with aspects.woven(replacing("engine:Scheduler", Duck)):
        assert module.is_scheduler(module.Scheduler())
        assert module.Scheduler().run() == ["Duck"]
    assert module.Scheduler is old


def test_a_nested_class_is_replaced(both: Any) -> None:
    module, _ = both
    old = module.Scheduler.Config

    class New(old):  # type: ignore[misc, valid-type]
        def read(self) -> list[str]:
            return [*super().read(), "New"]

    with aspects.woven(replacing("engine:Scheduler.Config", New), mark("engine.Scheduler.Config.read")):
        assert module.Derived.Config().read() == ["Config", "New", "hook"]
    assert module.Scheduler.Config is old


def test_an_inherited_class_attribute_is_replaced_on_the_subclass_only(both: Any) -> None:
    module, _ = both
    old = module.Scheduler.Config

    class New(old):  # type: ignore[misc, valid-type]
        pass

    with aspects.woven(replacing("engine:Derived.Config", New)):
        assert module.Derived.Config is New
        assert module.Scheduler.Config in (old, New)
    assert "Config" not in vars(module.Derived)
    assert module.Derived.Config is module.Scheduler.Config is old


def test_a_reload_of_the_module(both: Any, engine: Engine) -> None:
    import importlib

    module, plugin = both
    first = module.Scheduler
    with aspects.woven(replacing("engine:Scheduler", plugin.Better), mark("engine:Scheduler.run")):
        importlib.reload(module)
        assert module.Scheduler is plugin.Better
        assert module.Scheduler().run() == ["Base", "Scheduler", "Better", "hook"]
    assert module.Scheduler is not plugin.Better
    assert module.Scheduler is not first
    assert module.Derived().run() == ["Base", "Scheduler", "Derived"]
    assert engine.load("copier").Scheduler in (first, module.Scheduler)


def test_replacing_a_method_that_the_replacement_defines_itself_warns(
    both: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, plugin = both
    source = HookSource("one", "one-dist")
    by_class = replacing("engine:Scheduler", plugin.Better, source=source)
    by_method = replacing_function("engine:Scheduler.run", source=HookSource("two"))
    inherited = replacing_function("engine:Scheduler.plan", name="planned")
    for order in ((by_class, by_method, inherited), (by_method, inherited, by_class)):
        caplog.clear()
        handles = [aspects.weave(advice) for advice in order]
        assert module.Scheduler().run() == ["hook"]
        assert module.Scheduler().plan() == ["planned"]
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        for name in ("overrides run", "one (one-dist)", "from two", "plugin.Better"):
            assert name in warning
        for handle in handles:
            handle.remove()
    assert module.Scheduler().run() == ["Base", "Scheduler"]
    assert plugin.Better().run() == ["Base", "Scheduler", "Better"]
