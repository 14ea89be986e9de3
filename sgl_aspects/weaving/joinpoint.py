"""A join point: one woven place, the hooks that are active there, and the way back."""

from __future__ import annotations

import logging
import types
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.chain import build_chain, own_containers
from sgl_aspects.weaving.codegen import ANYTHING, MAX_FLAT_OBSERVERS, FunctionKind, Signature, WovenFunction
from sgl_aspects.weaving.hooks import Advice, HookType, innermost_first
from sgl_aspects.weaving.kinds import Observers, is_awaited, open_descriptor, weave_callable
from sgl_aspects.weaving.places import Place, current

logger = logging.getLogger("sgl_aspects")


class JoinPoint:
    """Holds the original and what stands in its place; the weaver serialises all changes.

    While no hook is active the identical original object is back where it was.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.advices: list[Advice] = []
        self.original = place.raw
        self.inner, self._rebuild = open_descriptor(place.raw, place.part, str(place))
        if isinstance(self.inner, type):
            raise HookError(
                f"{place} is a class, and a class takes only REPLACE with a class; "
                f"to hook its calls use '{place}.__init__' or another of its methods"
            )
        self.woven = weave_callable(self.inner, str(place))
        self.replacement = self._rebuild(self.woven.function)
        self._head: Any = self.inner
        self.installed = False

    def own_containers(self) -> set[int]:
        """Ids of everything of ours that holds the original on purpose."""
        held: list[Any] = [
            *own_containers(self._head),
            self,
            self.__dict__,
            self.place,
            self.place.__dict__,
            self.woven,
            self.woven.__dict__,
        ]
        held += [self.original, self.replacement, *(self._rebuild.__closure__ or ())]
        if isinstance(self.woven, WovenFunction):
            held += [self.woven.function.__dict__, *(self.woven.function.__closure__ or ())]
        return {id(holder) for holder in held}

    def follow(self, inherited: Any) -> None:
        """Call ``inherited`` from now on: what the base class has has been hooked, or is plain again."""
        self.original = inherited
        self.inner, _ = open_descriptor(inherited, self.place.part, str(self.place))

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
        self._head = build_chain(self.inner, behavioural, awaits=is_awaited(self.inner))
        self.woven.steer(
            self._head,
            _flattened(observers),
            signature=self._accepted(replaces[-1].hook) if replaces else None,
            compiling=compiling,
        )

    @property
    def active(self) -> bool:
        return any(advice.enabled for advice in self.advices)

    def _accepted(self, replacement: Any) -> Signature | None:
        """The parameters to accept for a REPLACE hook: the target's, or anything where they differ."""
        if not isinstance(self.woven, WovenFunction):
            return None
        same = (
            isinstance(replacement, types.FunctionType)
            and Signature.of(replacement) == self.woven.signature
            and FunctionKind.of(replacement) is self.woven.kind
        )
        return self.woven.signature if same else ANYTHING

    @property
    def standing(self) -> Any:
        """What stands at the place as far as we know: the original, or ours."""
        return self.replacement if self.installed else self.original

    def settle(self, compiling: Any = None) -> None:
        """Put ours in place while a hook is active, the identical original while none is.

        :raises TypeError, AttributeError: the place cannot be written.
        """
        self.refresh(compiling)
        if self.active and not self.installed:
            setattr(self.place.owner, self.place.name, self.replacement)
            self.installed = True
        elif not self.active and self.installed:
            self.installed = False
            self._restore()

    def _restore(self) -> None:
        owner, name = self.place.owner, self.place.name
        if current(owner, name) is not self.replacement:
            logger.info("%s: somebody else's patch stands there; it is left in place", self.place)
        elif self.place.inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, self.original)

    @property
    def displaced(self) -> bool:
        """Somebody else's object stands where ours was put."""
        return self.installed and current(self.place.owner, self.place.name) is not self.replacement


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


class _Remaining:
    """All observers past the flattened ones, as one."""

    def __init__(self, triples: Observers) -> None:
        self.triples = triples

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        tokens = []
        for enter, _, failed in self.triples:
            try:
                tokens.append(enter(args, kwargs))
            except Exception as error:  # noqa: BLE001  an observer never breaks the call
                tokens.append(failed(error))
        return tokens

    def exit(self, tokens: list[Any], result: Any, error: BaseException | None) -> None:
        for (_, leave, failed), token in reversed(list(zip(self.triples, tokens))):
            if token is failed:
                continue
            try:
                leave(token, result, error)
            except Exception as broken:  # noqa: BLE001  an observer never breaks the call
                failed(broken)


def _flattened(observers: list[Advice]) -> Observers:
    triples = tuple((advice.hook.enter, advice.hook.exit, _Failed(advice)) for advice in observers)
    if len(triples) <= MAX_FLAT_OBSERVERS:
        return triples
    keep = MAX_FLAT_OBSERVERS - 1
    rest = _Remaining(triples[keep:])
    return (*triples[:keep], (rest.enter, rest.exit, _Failed(observers[-1])))
