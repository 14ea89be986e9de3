"""Shadow mode: run a second implementation on a share of the calls, and report which layer differs by how
much.

Both get the same inputs, so that a wrong kernel shows in its own layer only, and never in those after it. The
engine goes on with the first one's output. Calls in compiled code and in captured graphs are not compared;
replays of graphs are counted and reported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from sgl_aspects.errors import OperatorError
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch.policy import SelectionPolicy
from sgl_aspects.runtime.dispatch.selection import Selection
from sgl_aspects.runtime.dispatch.shadow.comparing import LayerComparison, difference, tensors_in
from sgl_aspects.runtime.dispatch.shadow.layer_names import LayerNames
from sgl_aspects.runtime.dispatch.types import OpImpl, Token

if TYPE_CHECKING:
    from sgl_aspects.runtime.dispatch.call_site import CallSite
    from sgl_aspects.runtime.dispatch.configuration import Settings

__all__ = ["LayerComparison", "Watch", "difference"]

logger = logging.getLogger("sgl_aspects.dispatch")

_GOLDEN = 0.6180339887498949
ALL = "*"


class Watch:
    """A watch for :meth:`OpManager.set_watch`.

    ``shadow`` names operators, or "*" for all, with a token each.
    """

    def __init__(self, shadow: Mapping[str, Token], rate: float = 0.01) -> None:
        self.shadow = dict(shadow)
        self.rate = rate
        self.layers = LayerNames()
        self._comparisons: dict[tuple[str, str], LayerComparison] = {}
        self._not_compared: dict[str, str] = {}
        self._replays = 0
        self._credit: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    # -- results -------------------------------------------------------------------------------------------

    def comparisons(self) -> list[LayerComparison]:
        """The comparisons, in the model's order."""
        with self._lock:
            return sorted(self._comparisons.values(), key=lambda each: (each.place, each.layer, each.op))

    def first_difference(self) -> LayerComparison | None:
        """The first layer, in the model's order, that differs by more than rounding."""
        return next((each for each in self.comparisons() if each.differed), None)

    def report(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        first = self.first_difference()
        comparisons = self.comparisons()
        compared_ops = {each.op for each in comparisons}
        return {
            "shadow": {op: token.text for op, token in self.shadow.items()},
            "rate": self.rate,
            "compared": sum(each.compared for each in comparisons),
            "replayed_steps": self._replays,
            "not_compared": {op: why for op, why in self._not_compared.items() if op not in compared_ops},
            "first_difference": None if first is None else asdict(first),
            "layers": [asdict(each) for each in comparisons],
        }

    # -- watched calls -------------------------------------------------------------------------------------

    def around(self, site: CallSite, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call itself if its operator is not watched."""
        shadow = self._shadow_impl(site, selection)
        if shadow is None:
            return call
        return _WatchedCall(self, site, selection.impl, shadow, call).run

    def _shadow_impl(self, site: CallSite, selection: Selection) -> OpImpl | None:
        token = self.shadow.get(site.op_name) or self.shadow.get(ALL)
        if token is None:
            return None
        policy = SelectionPolicy(prefer=token, strict=True)
        reason = None
        try:
            shadow = site.manager.select(site.op_name, policy=policy).impl
            if not token.matches(shadow):
                reason = f"{token.text} has none"
            elif shadow == selection.impl:
                reason = f"{shadow.impl_id} serves it itself"
        except OperatorError as error:
            reason = str(error)
        if reason is None:
            return shadow
        if site.op_name not in self._not_compared:
            logger.info("%s is not compared: %s", site.op_name, reason)
            self._not_compared[site.op_name] = reason
        return None

    def is_due(self, key: tuple[str, str]) -> bool:
        """Choose each layer's calls at the share, the layers spread over the steps."""
        with self._lock:
            credit = self._credit.get(key)
            if credit is None:
                credit = (len(self._credit) * _GOLDEN) % 1.0
            credit += self.rate
            self._credit[key] = credit - 1.0 if credit >= 1.0 else credit
        return credit >= 1.0

    def count_replay(self) -> None:
        """A step that a captured graph ran."""
        self._replays += 1

    # -- comparing -----------------------------------------------------------------------------------------

    def entry(self, layer: str, place: int, op: str, impl: OpImpl, shadow: OpImpl) -> LayerComparison:
        with self._lock:
            entry = self._comparisons.get((layer, op))
            if entry is None or (entry.impl, entry.shadow) != (impl.impl_id, shadow.impl_id):
                entry = LayerComparison(layer, op, impl.impl_id, shadow.impl_id, place)
                self._comparisons[layer, op] = entry
            return entry

    def compare(self, entry: LayerComparison, second: Callable[[], list[torch.Tensor]], found: Any) -> None:
        """Compare, without raising: a failure in the shadow is recorded in the report."""
        try:
            wanted = second()
            with self._lock:
                is_first = entry.take(found, wanted)
        except Exception as error:  # noqa: BLE001  # the engine must not notice
            entry.error = f"{type(error).__name__}: {error}"
            logger.warning("%s: the shadow %s failed: %s", entry.layer or entry.op, entry.shadow, entry.error)
            return
        if is_first:
            logger.warning(
                "%s: %s differs from %s by %.3g of the largest value (%.3g is rounding) in layer %s%s",
                entry.op,
                entry.impl,
                entry.shadow,
                entry.worst,
                entry.tolerance,
                entry.layer or "(none)",
                f": {entry.mismatch}" if entry.mismatch else "",
            )


class _WatchedCall:
    """The calls of one operator: ``run`` replaces its call site's while the watch is on."""

    def __init__(
        self, watch: Watch, site: CallSite, impl: OpImpl, shadow: OpImpl, call: Callable[..., Any]
    ) -> None:
        self._watch = watch
        self._op_name = site.op_name
        self._impl = impl
        self._shadow = shadow
        self._call = call
        self._second = site.spec.callable_of(shadow)
        #: Whether either writes to its arguments: then both get copies of the original ones.
        self._writes = any(site.manager.mutated_by(each) for each in (impl, shadow))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        place, layer = self._watch.layers.current()
        if current_platform.is_capturing() or not self._watch.is_due((layer, self._op_name)):
            return self._call(*args, **kwargs)
        given, named = args, kwargs
        if self._writes:
            given, named = tuple(map(_copied, args)), {name: _copied(each) for name, each in kwargs.items()}
        result = self._call(*args, **kwargs)
        entry = self._watch.entry(layer, place, self._op_name, self._impl, self._shadow)
        self._watch.compare(
            entry,
            lambda: self._found(self._second(*given, **named), given, named),
            self._found(result, args, kwargs),
        )
        return result

    def _found(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the output of the call: its result, and its arguments if they were written to."""
        return tensors_in(result) + (tensors_in((args, kwargs)) if self._writes else [])


def watch_of(settings: Settings) -> Watch | None:
    """Return the watch that the settings configure; None: none."""
    return Watch(dict(settings.shadow), settings.shadow_rate) if settings.shadow else None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
