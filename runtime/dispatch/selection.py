"""Selection: the implementation that the policy prefers and that supports given tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_aspects.errors import OperatorError
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch.policy import SelectionPolicy
from sgl_aspects.runtime.dispatch.types import OpImpl

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Considered:
    """One implementation, and why it was not chosen; None for the chosen one."""

    impl: OpImpl
    reason: str | None


@dataclass(frozen=True)
class Selection:
    """The implementations for calls of one operator with tensors of one type on one device."""

    impl: OpImpl
    #: In the policy's order, those after the chosen one included.
    considered: tuple[Considered, ...]
    #: True if other types or devices may select another implementation.
    depends_on_tensors: bool
    #: Used if the chosen one rejects a call or fails, best first.
    others: tuple[OpImpl, ...]


class Availability(dict[OpImpl, "str | None"]):
    """Implementation → why it is not available, None if it is: its own answer, called once."""

    def __missing__(self, impl: OpImpl) -> str | None:
        try:
            answer = impl.is_available() or "no reason given"
        except Exception as error:  # noqa: BLE001  # a library that does not load, shown in the report
            answer = f"{type(error).__name__}: {error}"
        self[impl] = f"not available: {answer}" if isinstance(answer, str) else None
        return self[impl]


def choose(
    op_name: str,
    impls: Iterable[OpImpl],
    policy: SelectionPolicy,
    availability: Availability,
    dtype: torch.dtype | None,
    device: torch.device | None,
    failed: Collection[str] = (),
) -> Selection:
    """Select the first implementation in the policy's order that is allowed and able; the reasons for all.

    ``failed``: ids of implementations that were excluded for these tensors under this policy.

    :raises OperatorError: there is none; lists the candidates and why each was left out.
    """
    impls = tuple(impls)
    arranged = policy.arranged(op_name, impls)
    considered: list[Considered] = []
    able: list[OpImpl] = []
    depends = False
    for impl in arranged:
        reason = policy.refuses(impl) or availability[impl]
        if reason is None:
            depends = depends or (not able and (impl.depends_on_tensors or bool(failed)))
            reason = _mismatch(impl, dtype, device)
            if reason is None and impl.impl_id in failed:
                reason = "set aside after it failed with such tensors"
            if reason is None:
                reason = f"comes after {able[0].impl_id}" if able else None
                able.append(impl)
        considered.append(Considered(impl, reason))
    considered += [
        Considered(i, "not in the order, and the policy is strict") for i in impls if i not in arranged
    ]
    if not able:
        reasons = "; ".join(f"{each.impl.impl_id}: {each.reason}" for each in considered)
        tensors = f" with {dtype} on {device}" if dtype is not None else ""
        raise OperatorError(
            f"no implementation may serve {op_name}{tensors} under the policy {policy.describe()}: "
            f"{reasons or 'none is registered'}. "
            f"Name one that can in per_op_order, or switch strict off."
        )
    return Selection(able[0], tuple(considered), depends, tuple(able[1:]))


def _mismatch(impl: OpImpl, dtype: torch.dtype | None, device: torch.device | None) -> str | None:
    """Return why it does not support such tensors. Unknown tensors are assumed to fit."""
    if device is not None and impl.device_types is not None and device.type not in impl.device_types:
        return f"runs on {', '.join(sorted(impl.device_types))}, not on {device.type}"
    if dtype is not None and impl.supported_dtypes is not None and dtype not in impl.supported_dtypes:
        return f"supports {', '.join(sorted(map(str, impl.supported_dtypes)))}, not {dtype}"
    if device is not None and impl.min_arch is not None:
        wanted = ".".join(map(str, impl.min_arch))
        found = current_platform.get_device_capability(device.index or 0)
        if found is None:
            return f"needs compute capability {wanted}, and {current_platform.device_name} has no such number"
        if (found.major, found.minor) < impl.min_arch:
            return f"needs compute capability {wanted}, and this device has {found.as_version_str()}"
    return None
