"""A join point: one woven place, the hooks that are active there, and the way back."""

from __future__ import annotations

import dataclasses
import logging
import types
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.chain import build_chain, own_containers
from sgl_aspects.weaving.functions import FunctionKind, WovenFunction
from sgl_aspects.weaving.homes import Home
from sgl_aspects.weaving.hooks import Advice, HookType, innermost_first
from sgl_aspects.weaving.kinds import open_attribute
from sgl_aspects.weaving.places import Place

logger = logging.getLogger("sgl_aspects")


class JoinPoint:
    """Holds the original and what stands in its place; the weaver serialises all changes.

    While no hook is active the identical original object is back where it was.

    :param home: shared by the points for the parts of one property.
    """

    def __init__(self, place: Place, home: Home | None = None) -> None:
        if home is not None:
            place = dataclasses.replace(place, raw=home.original)
        self.place = place
        self.advices: list[Advice] = []
        opened = open_attribute(place)
        self.inner = opened.content
        self._called = opened.called
        self.woven = opened.weave(str(place))
        self.home = home or Home(place, opened.rebuild)
        self._head: Any = self._called
        self._observers: dict[Advice, Any] = {}
        self.home.with_resident(place.part, self.woven.function)  # may fail: now, not when it is registered
        self.installed = False

    def admit(self, advice: Advice) -> None:
        """Add a hook; an observer that wants to know its function is asked for the one for this function.

        :raises HookError: the observer cannot do its work on this function.
        """
        self._check_async(advice)
        if advice.hook_type is HookType.OBSERVE and hasattr(type(advice.hook), "bound_to"):
            self._observers[advice] = advice.hook.bound_to(self.inner)
        self.advices.append(advice)

    def _check_async(self, advice: Advice) -> None:
        if (
            advice.hook_type in (HookType.OBSERVE, HookType.REPLACE)
            or self.woven.kind is FunctionKind.COROUTINE
        ):
            return
        if FunctionKind.of(advice.hook) is FunctionKind.COROUTINE:
            raise HookError(
                f"{advice}: the hook is async, and {self.place} is not: its callers would get a coroutine. "
                "Write it as a plain def, or hook the async def that awaits this function"
            )

    def dismiss(self, advice: Advice) -> None:
        """Take a hook away."""
        self.advices.remove(advice)
        self._observers.pop(advice, None)

    @property
    def original(self) -> Any:
        """What stood here before; for a place that is inherited, what the base has now."""
        return self.home.original

    @property
    def standing(self) -> Any:
        """What stands at the place as far as we know: the original, or ours."""
        return self.home.standing

    @property
    def replacement(self) -> Any:
        """Ours, whether it stands there or not."""
        return self.home.with_resident(self.place.part, self.woven.function)

    def own_containers(self) -> set[int]:
        """Ids of everything of ours that holds the original on purpose."""
        held: list[Any] = [self, self.__dict__, self.place, self.place.__dict__]
        held += [*own_containers(self._head), *self.home.own_containers()]
        held += [self.woven, *self.woven.own_containers()]
        if self._called is not self.inner and type(self._called) is types.FunctionType:
            held += [self._called.__dict__, *(self._called.__closure__ or ())]
        # A function holds nothing itself: its dictionary, closure and defaults do, and those are users'.
        return {id(holder) for holder in held if type(holder) is not types.FunctionType}

    def follow(self, below: Any) -> None:
        """Call ``below`` from now on: what the base class has has been hooked, or is plain again."""
        opened = open_attribute(dataclasses.replace(self.place, raw=below))
        self.inner, self._called = opened.content, opened.called
        self.home.follow(below, opened.rebuild)

    @property
    def calls(self) -> int:
        return self.woven.calls

    def refresh(self, compiling: Any = None) -> None:
        """Make the woven callable run the hooks that are active now."""
        active = _once([advice for advice in innermost_first(self.advices) if advice.enabled])
        replaces = [advice for advice in active if advice.hook_type is HookType.REPLACE]
        behavioural = [
            advice for advice in active if advice.hook_type not in (HookType.REPLACE, HookType.OBSERVE)
        ]
        # The last REPLACE wins; the earlier ones stay registered and come back when it goes.
        behavioural = replaces[-1:] + behavioural
        observers = [advice for advice in reversed(active) if advice.hook_type is HookType.OBSERVE]
        self._head = build_chain(self._called, behavioural, awaits=self.woven.kind is FunctionKind.COROUTINE)
        self.woven.set_hooks(self._head, tuple(map(self._observing, observers)), compiling)

    def _observing(self, advice: Advice) -> tuple[Any, Any, Any]:
        observer = self._observers.get(advice, advice.hook)
        return getattr(observer, "enter", None), getattr(observer, "exit", None), _Failed(advice)

    @property
    def active(self) -> bool:
        return any(advice.enabled for advice in self.advices)

    def release(self) -> None:
        """No hook will come here any more."""
        self.woven.release(self._called)

    def settle(self, compiling: Any = None) -> None:
        """Put ours in place while a hook is active, the identical original while none is.

        :raises Exception: the place cannot be written, or its owner does not want it to be.
        """
        self.refresh(compiling)
        if self.active and not self.installed:
            self._exchange_attributes()
            self.home.move_in(self.place.part, self.woven.function)
            self.installed = True
        elif not self.active and self.installed and not (self.advices and self.displaced):
            # Under somebody's patch, ours stays where that patch calls it, until its last hook has gone.
            self.installed = False
            self._exchange_attributes()
            self.home.move_out(self.place.part)

    def _exchange_attributes(self) -> None:
        if isinstance(self.woven, WovenFunction) and isinstance(self.inner, types.FunctionType):
            if self.active:
                self.woven.take_attributes(self.inner)
            else:
                self.woven.give_attributes(self.inner)

    @property
    def displaced(self) -> bool:
        """Somebody else's object stands where ours was put."""
        return self.installed and not self.home.is_ours


def _once(advices: list[Advice]) -> list[Advice]:
    """Leave out a hook that came here under two names of the same function: it runs once."""
    first: dict[tuple[int, HookType], Advice] = {}
    for advice in advices:
        first.setdefault((id(advice.hook), advice.hook_type), advice)
    return [
        advice
        for advice in advices
        if (one := first[id(advice.hook), advice.hook_type]) is advice or one.target == advice.target
    ]


class _Failed:
    """Handles an observer's exception; answers itself, which marks that observer as not entered."""

    __slots__ = ("advice",)

    def __init__(self, advice: Advice) -> None:
        self.advice = advice

    def __call__(self, error: Exception) -> _Failed:
        self.advice.record_error(error)
        return self
