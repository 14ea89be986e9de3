"""CallSite: one place where an operator is called, a layer or the operator's own function.

``run`` is what calls go to. It is the chosen implementation itself, so that a resolved call is a plain call;
a change of policy points every site's ``run`` back at :meth:`CallSite.resolve_and_call`, and the next call
chooses anew.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from sgl_aspects.errors import OperatorError, UnsupportedCallError
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch.selection import Selection
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl

if TYPE_CHECKING:
    from sgl_aspects.runtime.dispatch.manager import OpManager
    from sgl_aspects.runtime.dispatch.policy import SelectionPolicy
    from sgl_aspects.runtime.dispatch.registry import OperatorSpec

logger = logging.getLogger("sgl_aspects.dispatch")

_GUARD = """
def make(calls, resolve):
    def guarded({signature}):
        call = calls.get(({key}.dtype, {key}.get_device()))
        if call is None:
            call = calls[{key}.dtype, {key}.get_device()] = resolve(({key}.dtype, {key}.device))
        return call({names})
    return guarded
"""


@cache
def _guard_maker(spec: OperatorSpec) -> Callable[..., Callable[..., Any]]:
    """A guard with the operator's own signature packs no arguments."""
    parameters = inspect.signature(spec.reference).parameters
    # call_op may leave out what has a default; the operators' functions give everything, by place.
    signature = ", ".join(
        name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in parameters.items()
    )
    source = _GUARD.format(signature=signature, key=spec.keyed_by, names=", ".join(parameters))
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<guard of {spec.name}>", "exec"), namespace)
    maker: Callable[..., Callable[..., Any]] = namespace["make"]
    return maker


#: The dtype and device that a call is resolved for.
Key = tuple[Any, Any]


class CallSite:
    """Made by :meth:`OpManager.site`. A layer's site calls functions through ``layer.call_function``."""

    def __init__(self, manager: OpManager, op_name: str, layer: Any = None, key_index: int = 0) -> None:
        self.manager = manager
        self.op_name = op_name
        self.layer = layer
        self.key_index = key_index
        self.run: Callable[..., Any] = self.resolve_and_call
        self._calls: dict[tuple[SelectionPolicy, Key], Callable[..., Any]] = {}
        self._guarded = False

    def reset(self) -> None:
        """Choose anew at the next call; at once where no tensor has a say in it."""
        self._calls = {}
        self._guarded = False
        self.run = self.resolve_and_call
        self.manager.install_early(self)

    def key(self, args: tuple[Any, ...]) -> Key:
        if self.layer is not None:
            tensor = self.layer.key_tensor(args)
        else:
            tensor = args[self.key_index]
        return getattr(tensor, "dtype", None), getattr(tensor, "device", None)

    def select(self, key: Key) -> Selection:
        return self.manager.select(self.op_name, *key, layer=self.layer)

    def bound(self, impl: OpImpl) -> Callable[..., Any]:
        """The implementation as this place calls it."""
        if self.layer is None:
            return impl.fn
        if impl.takes_layer:
            return impl.fn.__get__(self.layer)  # type: ignore[no-any-return]
        return partial(self.layer.call_function, impl.fn)

    def resolve_and_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._resolved(self.key(args))(*args, **kwargs)

    def foresee(self, keys: list[Key]) -> None:
        """Resolve for these tensors now, so that compiled code meets no first call."""
        for key in keys:
            try:
                self._resolved(key)
            except OperatorError:  # told at the call
                return

    def _resolved(self, key: Key) -> Callable[..., Any]:
        manager = self.manager
        epoch, policy = manager.epoch, manager.policy
        call = self._calls.get((policy, key))
        if call is None:
            selection = self.select(key)
            manager.log_selection(self.op_name, key, selection)
            call = manager.watched(self, selection, self.bound(selection.impl))
            self._calls[policy, key] = call
            # Once tensors have a say here they keep it: another type's choice must not replace the guard.
            self._guarded = self._guarded or selection.depends_on_tensors
            manager.install(self, epoch, call, guarded=self._guarded)
        return call

    def guard(self, policy: SelectionPolicy) -> Callable[..., Any]:
        """What ``run`` is where tensors decide: look the first one up, then a plain call."""
        calls, resolve = {}, self._resolved
        for (of_policy, (dtype, device)), call in self._calls.items():
            if of_policy == policy and device is not None:
                # A device's number, -1 for the host's: asking for it makes no object.
                calls[dtype, -1 if device.index is None else device.index] = call
        if self.layer is not None and type(self.layer).has_own_key:
            return self.resolve_and_call
        if self.layer is None:
            return _guard_maker(self.manager.registry.spec(self.op_name))(calls, resolve)

        def guarded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            call = calls.get((tensor.dtype, tensor.get_device()))
            if call is None:
                call = calls[tensor.dtype, tensor.get_device()] = resolve((tensor.dtype, tensor.device))
            return call(tensor, *args, **kwargs)

        return guarded

    # -- when an implementation fails ------------------------------------------------------------------

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns after all, from the next implementation; raises where there must be none.

        Nothing takes over for the reference, under a strict policy, for lack of memory, while a graph is
        being captured, or once arguments may have been written to: an in-place operator that ran half would
        run twice.
        """
        key = self.key(args)
        selection = self.select(key)
        impl = selection.impl
        if (
            impl.kind is ImplKind.REFERENCE
            or not selection.others
            or self.manager.policy.strict
            or isinstance(error, torch.OutOfMemoryError)
            or current_platform.is_capturing()
        ):
            raise error
        written = self.manager.mutated_by(impl)
        if written and not isinstance(error, UnsupportedCallError):
            raise OperatorError(
                f"{impl.impl_id} failed ({type(error).__name__}: {error}), and may have written to "
                f"{', '.join(written)} before: no other implementation repeats the call. Choose another for "
                f"{self.op_name} in per_op_order."
            ) from error
        for other in selection.others:
            call = self.bound(other)
            try:
                result = call(*args, **kwargs)
            except Exception as next_error:
                if other.kind is ImplKind.REFERENCE or self.manager.mutated_by(other):
                    # Not even the reference can: it is the call that is wrong.
                    raise next_error from error
                continue
            self.manager.count_failure(self, key, impl, error, other)
            return result
        raise error
