"""Properties whose functions are those of others, too: setters of a subclass with the getter of its base."""

from __future__ import annotations

import itertools

import pytest

import sgl_aspects as aspects
from tests.support.woven_modules import around, hooked, module_of

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
