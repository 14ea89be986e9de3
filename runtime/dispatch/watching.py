"""Shadow mode: run a second implementation on a share of the calls, and say which layer differs by how much.

Both get the same inputs, so that a wrong kernel shows in its own layer only, and never in those after it. The
engine goes on with the first one's output. Calls in compiled code and in graphs that are being captured or
replayed are not compared: those stand aside, and are counted nowhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from sgl_aspects.errors import OperatorError
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch.layer_names import LayerNames
from sgl_aspects.runtime.dispatch.policy import SelectionPolicy
from sgl_aspects.runtime.dispatch.selection import Selection
from sgl_aspects.runtime.dispatch.types import OpImpl, Token

if TYPE_CHECKING:
    from sgl_aspects.runtime.dispatch.call_site import CallSite

logger = logging.getLogger("sgl_aspects.dispatch")

#: The largest difference, as a share of the largest value, that rounding explains.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_GOLDEN = 0.6180339887498949
ALL = "*"


@dataclass
class LayerComparison:
    """What the compared calls of one operator in one layer came to."""

    layer: str
    op: str
    impl: str
    shadow: str
    #: The layer's place in the model.
    place: int
    compared: int = 0
    #: How many of them differed by more than ``tolerance``.
    differed: int = 0
    #: The largest difference, as a share of the shadow's largest value. Infinite where one is not finite.
    worst: float = 0.0
    tolerance: float = 0.0
    #: What went wrong in the shadow itself.
    error: str | None = None


@dataclass(frozen=True)
class TensorSummary:
    """One tensor of a call; numbers of its finite elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    min: float
    max: float
    mean: float
    nan_count: int
    inf_count: int


class Watch:
    """Give it to :meth:`OpManager.set_watch`.

    ``shadow`` names operators, or "*" for all, with a token each.
    """

    def __init__(
        self, shadow: Mapping[str, Token], rate: float = 0.01, summaries: Sequence[str] = ()
    ) -> None:
        self.shadow = dict(shadow)
        self.rate = rate
        self.summaries = tuple(summaries)
        self.layers = LayerNames()
        self._comparisons: dict[tuple[str, str], LayerComparison] = {}
        self._summaries: dict[tuple[str, str], list[TensorSummary]] = {}
        self._credit: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        self.layers.start()

    def stop(self) -> None:
        self.layers.stop()

    # -- results -------------------------------------------------------------------------------------------

    def comparisons(self) -> list[LayerComparison]:
        """In the model's order."""
        with self._lock:
            return sorted(self._comparisons.values(), key=lambda each: (each.place, each.layer, each.op))

    def first_difference(self) -> LayerComparison | None:
        """The first layer, in the model's order, that differs by more than rounding."""
        return next((each for each in self.comparisons() if each.differed), None)

    def tensor_summaries(self) -> dict[str, dict[str, list[TensorSummary]]]:
        """layer → operator → its tensors at the last call that was looked at."""
        found: dict[str, dict[str, list[TensorSummary]]] = {}
        with self._lock:
            for (layer, op), tensors in self._summaries.items():
                found.setdefault(layer, {})[op] = tensors
        return found

    def report(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        first = self.first_difference()
        return {
            "shadow": {op: token.text for op, token in self.shadow.items()},
            "rate": self.rate,
            "first_difference": None if first is None else asdict(first),
            "layers": [asdict(each) for each in self.comparisons()],
            "summaries": {
                layer: {op: [asdict(tensor) for tensor in tensors] for op, tensors in ops.items()}
                for layer, ops in self.tensor_summaries().items()
            },
        }

    # -- calls -----------------------------------------------------------------------------------------------

    def around(self, site: CallSite, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call itself where nothing is asked about its operator."""
        shadow = self._shadow_impl(site, selection)
        summed_up = site.op_name in self.summaries or ALL in self.summaries
        if shadow is None and not summed_up:
            return call
        second = None if shadow is None else site.bound(shadow)
        mutates = site.manager.mutated_by(selection.impl)
        if shadow is not None:
            mutates += site.manager.mutated_by(shadow)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or current_platform.is_capturing():
                return call(*args, **kwargs)
            place, layer = self.layers.current()
            if not self._is_due((layer, site.op_name)):
                return call(*args, **kwargs)
            given = _copied(args, kwargs) if mutates else (args, kwargs)
            result = call(*args, **kwargs)
            if shadow is not None and second is not None:
                entry = self._entry(layer, place, site.op_name, selection.impl, shadow)
                self._compare(entry, second, given, result, (args, kwargs) if mutates else None)
            if summed_up:
                self._sum_up(layer, site.op_name, args, kwargs, result)
            return result

        return watched

    def _shadow_impl(self, site: CallSite, selection: Selection) -> OpImpl | None:
        token = self.shadow.get(site.op_name) or self.shadow.get(ALL)
        if token is None:
            return None
        policy = SelectionPolicy(prefer=token, strict=True)
        try:
            shadow = site.manager.select(site.op_name, layer=site.layer, policy=policy).impl
        except OperatorError as error:
            logger.warning("%s is not compared: %s", site.op_name, error)
            return None
        if not token.matches(shadow) or shadow == selection.impl:
            if token.matches(shadow):
                logger.info("%s is not compared: %s serves it itself", site.op_name, shadow.impl_id)
            return None
        return shadow

    def _is_due(self, key: tuple[str, str]) -> bool:
        """Each layer at its own share of the calls, the layers spread over the steps."""
        with self._lock:
            credit = self._credit.get(key)
            if credit is None:
                credit = (len(self._credit) * _GOLDEN) % 1.0
            credit += self.rate
            self._credit[key] = credit - 1.0 if credit >= 1.0 else credit
        return credit >= 1.0

    def _entry(self, layer: str, place: int, op: str, impl: OpImpl, shadow: OpImpl) -> LayerComparison:
        with self._lock:
            entry = self._comparisons.get((layer, op))
            if entry is None or (entry.impl, entry.shadow) != (impl.impl_id, shadow.impl_id):
                entry = LayerComparison(layer, op, impl.impl_id, shadow.impl_id, place)
                self._comparisons[layer, op] = entry
            return entry

    def _compare(
        self,
        entry: LayerComparison,
        second: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,
        written: tuple[tuple[Any, ...], dict[str, Any]] | None,
    ) -> None:
        """Never an exception: what fails in the shadow is told in the report."""
        try:
            expected = second(*given[0], **given[1])
            pairs = list(zip(_tensors(result), _tensors(expected), strict=True))
            if written is not None:
                pairs += list(zip(_tensors(written), _tensors(given), strict=True))
            errors = [difference(found, wanted) for found, wanted in pairs]
        except Exception as error:  # noqa: BLE001  # the engine must not notice
            with self._lock:
                entry.error = f"{type(error).__name__}: {error}"
            logger.warning("%s: the shadow %s failed: %s", entry.layer or entry.op, entry.shadow, entry.error)
            return
        tolerance = max((TOLERANCES.get(found.dtype, 0.0) for found, _ in pairs), default=0.0)
        worst = max(errors, default=0.0)
        with self._lock:
            entry.compared += 1
            entry.tolerance = tolerance
            entry.worst = max(entry.worst, worst)
            entry.differed += worst > tolerance
            first = entry.differed == 1 and worst > tolerance
        if first:
            logger.warning(
                "%s: %s differs from %s by %.3g of the largest value (%.3g is rounding) in layer %s",
                entry.op,
                entry.impl,
                entry.shadow,
                worst,
                tolerance,
                entry.layer or "(none)",
            )

    def _sum_up(self, layer: str, op: str, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [(f"input {i}", tensor) for i, tensor in enumerate(_tensors((args, kwargs)))]
        tensors += [(f"output {i}", tensor) for i, tensor in enumerate(_tensors(result))]
        found = [summary(name, tensor) for name, tensor in tensors]
        with self._lock:
            self._summaries[layer, op] = found


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference as a share of the largest wanted value; for whole numbers the share that
    differs.

    Infinite for another shape, and where one is finite and the other is not.
    """
    if found.shape != wanted.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    if not (found.is_floating_point() and wanted.is_floating_point()):
        return float((found != wanted).double().mean())
    one, other = found.detach().double(), wanted.detach().double()
    finite = other.isfinite()
    if not torch.equal(finite, one.isfinite()):
        return float("inf")
    one, other = one[finite], other[finite]
    if one.numel() == 0:
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))


def summary(name: str, tensor: torch.Tensor) -> TensorSummary:
    exact = tensor.detach().double()
    finite = exact[exact.isfinite()]
    low, high, mean = (
        (float(finite.min()), float(finite.max()), float(finite.mean()))
        if finite.numel()
        else (0.0, 0.0, 0.0)
    )
    nans = int(exact.isnan().sum())
    infinities = int(exact.isinf().sum())
    shape = tuple(tensor.shape)
    return TensorSummary(
        name, shape, str(tensor.dtype).removeprefix("torch."), low, high, mean, nans, infinities
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in a value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    return tuple(copy(value) for value in args), {name: copy(value) for name, value in kwargs.items()}
