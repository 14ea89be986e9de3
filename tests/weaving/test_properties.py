"""Properties and methods whose functions are those of others: of a base, a descriptor, a wrapper."""

from __future__ import annotations

import functools
import gc
import itertools
import types
import weakref
from typing import Any

import pytest

import sgl_aspects as aspects
from tests.support.woven_modules import Watch, around, fixture_of, hooked, module_of

PROPERTY_OF_A_SUBCLASS = """
class Account:
    @property
    def balance(self): return 1
class Sub(Account):
    @Account.balance.setter
    def balance(self, value): self.value = value
"""


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_property_that_has_its_getter_of_a_base_comes_back(order: tuple[int, ...]) -> None:
    with module_of(PROPERTY_OF_A_SUBCLASS) as module:
        before = (vars(module.Account)["balance"], vars(module.Sub)["balance"])
        targets = ["engine:Account.balance", "engine:Sub.balance.fset", "engine:Account.balance"]
        handles = [aspects.weave(around(targets[index], hooked)) for index in order]
        assert module.Sub().balance == ("hooked", ("hooked", 1))
        for handle in handles:
            handle.remove()
        assert vars(module.Account)["balance"] is before[0]
        assert vars(module.Sub)["balance"] is before[1]
        assert not [name for name in vars(before[0].fget) if "sgl_aspects" in name]


@pytest.mark.parametrize("order", [1, -1])
def test_parts_of_properties_that_share_a_function_are_hooked_at_once(order: int) -> None:
    with module_of(PROPERTY_OF_A_SUBCLASS) as module:
        held = [module.Sub.balance.fset]  # so that hooks look for what refers to it
        before = (vars(module.Account)["balance"], vars(module.Sub)["balance"])
        targets = ["engine:Account.balance", "engine:Sub.balance.fset"][::order]
        handle = aspects.weave(*(around(target, hooked) for target in targets))
        assert module.Sub().balance == module.Account().balance == ("hooked", 1)
        assert held[0](module.Sub(), 2) == ("hooked", None)
        handle.disable()
        assert (vars(module.Account)["balance"], vars(module.Sub)["balance"]) == before
        handle.enable()
        assert module.Sub().balance == ("hooked", 1)
        handle.remove()
        assert (vars(module.Account)["balance"], vars(module.Sub)["balance"]) == before


FUNCTIONS = """
def get(*args): return "get"
def put(*args): return "put"
class Owner: pass
Owner.value = property(get, put)
"""


@pytest.mark.parametrize("first", ["get", "put", "Owner.value", "Owner.value.fset"])
@pytest.mark.parametrize("second", ["get", "put", "Owner.value", "Owner.value.fset"])
@pytest.mark.parametrize("ends", [(0, 1), (1, 0)])
def test_a_property_whose_functions_are_hooked_by_any_of_their_names(
    first: str, second: str, ends: tuple[int, int]
) -> None:
    with module_of(FUNCTIONS) as module:
        before = vars(module.Owner)["value"]
        aspects.weave(around(f"engine:{first}", hooked)).remove()
        assert vars(module.Owner)["value"] is before
        hooks = [lambda original, *args: ("hooked", original(*args)) for _ in range(2)]
        targets = (f"engine:{first}", f"engine:{second}")
        handles = [aspects.weave(around(*one)) for one in zip(targets, hooks)]
        for handle in handles:
            handle.disable()
            handle.enable()
        parts = vars(module.Owner)["value"].fget(), vars(module.Owner)["value"].fset()
        assert str(parts).count("hooked") == 2
        for end in ends:
            handles[end].remove()
        assert vars(module.Owner)["value"] is before


FAMILY = """
import wrapt
class Base:
    def m(self): pass
    @classmethod
    def c(cls): pass
    @property
    def p(self): pass
    @p.setter
    def p(self, value): pass
    @p.deleter
    def p(self): pass
class Sub(Base): pass
made = Base()
kept = made.m
@wrapt.decorator
def handing_on(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs)
@handing_on
def decorated(): pass
"""
family = fixture_of(FAMILY)


def test_a_setter_hooked_in_a_subclass_after_its_getter_stays_out_of_the_base(family: Any) -> None:
    setter = Watch()
    aspects.weave(around("engine:Sub.p"))
    aspects.weave(setter.on("engine:Sub.p.fset"))
    family.Base().p = 1
    assert not setter.entered
    family.Sub().p = 1
    assert len(setter.entered) == 1


def test_a_setter_hooked_at_once_with_the_getter_in_a_subclass_runs_there_too(family: Any) -> None:
    setter = Watch()
    aspects.weave(around("engine:Sub.p"), setter.on("engine:Base.p.fset"))
    family.Sub().p = family.Base().p = 1
    assert len(setter.entered) == 2


def test_a_getter_hooked_in_the_base_runs_in_a_subclass_that_keeps_a_hook_on_the_setter_alone(
    family: Any,
) -> None:
    getter = Watch()
    handle = aspects.weave(around("engine:Sub.p"))
    aspects.weave(around("engine:Sub.p.fset"), getter.on("engine:Base.p"))
    handle.remove()
    assert family.Sub().p is None
    assert len(getter.entered) == 1


def test_an_inherited_setter_of_a_class_that_equals_all_others(family: Any) -> None:
    exec(
        "class Meta(type):\n"
        "    __hash__ = type.__hash__\n"
        "    def __eq__(cls, other): return True\n"
        "class Like(Base, metaclass=Meta): pass\n"
        "class Below(Like): pass\n",
        vars(family),
    )
    setter = Watch()
    with aspects.woven(setter.on("engine:Like.p.fset")):
        family.Below().p = 1
    assert len(setter.entered) == 1


def test_a_bound_method_has_the_hooks_on_its_instance_and_its_class_woven_at_once(family: Any) -> None:
    of_instance, of_class = Watch(), Watch()
    aspects.weave(of_instance.on("engine:made.m"), of_class.on("engine:Base.m"))
    family.kept()
    assert (len(of_instance.entered), len(of_class.entered)) == (1, 1)


def test_a_bound_method_has_the_hooks_on_its_instance_that_are_enabled_after_those_on_its_class(
    family: Any,
) -> None:
    of_instance, of_class = Watch(), Watch()
    handle = aspects.weave(of_instance.on("engine:made.m"))
    handle.disable()
    aspects.weave(of_class.on("engine:Base.m"))
    handle.enable()
    family.kept()
    assert (len(of_instance.entered), len(of_class.entered)) == (1, 1)


def test_a_bound_method_has_the_hooks_on_its_subclass_and_another_name_of_it_woven_at_once(
    family: Any,
) -> None:
    family.alias, kept = family.Base.m, [family.Sub().m]
    function = kept[0].__func__
    of_class, of_alias = Watch(), Watch()
    handle = aspects.weave(of_alias.on("engine:alias"), of_class.on("engine:Sub.m"))
    kept[0]()
    assert (len(of_class.entered), len(of_alias.entered)) == (1, 1)
    handle.remove()
    assert kept[0].__func__ is function


def test_a_bound_method_has_its_own_function_back_when_both_hooks_are_removed_at_once(family: Any) -> None:
    function = family.kept.__func__
    aspects.weave(around("engine:Base.m"), around("engine:made.m")).remove()
    assert family.kept.__func__ is function


@pytest.mark.parametrize(
    "targets", [["engine:Base.p", "engine:Base.p.fset", "engine:Base.p.fdel"], ["engine:decorated"]]
)
def test_what_was_hooked_can_be_collected_after_the_removal(targets: list[str]) -> None:
    with module_of(FAMILY) as module:
        handle = aspects.weave(*map(around, targets))
        handle.disable()
        handle.remove()
        base = weakref.ref(module.Base)
    del module
    while gc.collect():
        pass
    assert base() is None


def test_a_method_without_a_name_that_is_bound_to_a_hooked_function_is_named(family: Any) -> None:
    kept = types.MethodType(functools.partial(print), family.Base.m)
    with aspects.woven(around("engine:Base.m")):
        assert [stale.holder for stale in aspects.report().stale] == ["the bound method partial"]
    assert kept.__self__ is family.Base.m
