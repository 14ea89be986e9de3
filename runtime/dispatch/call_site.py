"""CallSite: the target of one operator's calls.

``run`` is the chosen implementation itself, so that a resolved call is a plain call. A change of policy
points it back at :meth:`CallSite.resolve_and_call`, and the next call chooses anew.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sgl_aspects.errors import OperatorError, OperatorSignatureError, UnsupportedCallError
from sgl_aspects.platforms import current_platform
from sgl_aspects.platforms.answers import answer_of
from sgl_aspects.runtime.dispatch.selection import Selection
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl

if TYPE_CHECKING:
    from sgl_aspects.runtime.dispatch.manager import OpManager
    from sgl_aspects.runtime.dispatch.policy import SelectionPolicy

#: The dtype and device that a call is resolved for; None if unknown or irrelevant.
Key = tuple[Any, Any]
ANY: Key = (None, None)
_USUAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CallSite:
    """Made by :meth:`OpManager.site`, one for each operator."""

    def __init__(self, manager: OpManager, op_name: str) -> None:
        self.manager = manager
        self.op_name = op_name
        self.spec = manager.registry.spec(op_name)
        self.run: Callable[..., Any] = self.resolve_and_call
        #: Policy → (dtype, number of the device) → function: a guard looks its calls up here.
        self._calls: dict[SelectionPolicy, dict[Key, Callable[..., Any]]] = {}
        self._guarded = False

    def discard(self) -> None:
        """Discard the choice: the next call chooses."""
        self._calls = {}
        self._guarded = False
        self.run = self.resolve_and_call

    def reset(self) -> None:
        """Discard the choice. Choose again at once, so that compiled code meets no first call: for all
        tensors if they are irrelevant, else for the commonest.
        """
        self.discard()
        if self.manager.is_scoped:
            return
        try:
            if not self.manager.select(self.op_name).depends_on_tensors:
                self._resolve(*ANY)
                return
            for key in _usual_keys():
                self._resolve(*key)
        except OperatorError:  # reported at the call, with its tensors
            return

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        """Return the dtype and device of the argument that the operator is keyed by."""
        index = self.spec.key_index
        tensor = args[index] if len(args) > index else kwargs.get(self.spec.keyed_by)
        return getattr(tensor, "dtype", None), getattr(tensor, "device", None)

    def resolve_and_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._resolve(*self.key(args, kwargs))(*args, **kwargs)

    def _resolve(self, dtype: Any, device: Any) -> Callable[..., Any]:
        manager = self.manager
        calls, policy = self._calls, manager.policy
        # A device's number, -1 for the host's: reading it from a tensor creates no object.
        key = (dtype, -1 if device is None or device.index is None else device.index)
        call = calls.get(policy, {}).get(key)
        if call is not None:
            return call
        selection = manager.select(self.op_name, dtype, device)
        manager.log_selection(self, (dtype, device), selection.impl)
        call = self.spec.callable_of(selection.impl)
        calls.setdefault(policy, {})[key] = call
        # A guard stays once tensors matter here: another type's choice must not replace it.
        self._guarded = self._guarded or selection.depends_on_tensors
        run = self._guard(calls[policy]) if self._guarded else call
        with manager.lock:
            # Unless the choice is outdated by now, or depends on the context.
            if calls is self._calls and not manager.is_scoped:
                self.run = run
        return call

    def _guard(self, calls: dict[Key, Callable[..., Any]]) -> Callable[..., Any]:
        """Return a function that looks up the call for its tensors."""
        index, name, resolve = self.spec.key_index, self.spec.keyed_by, self._resolve

        def guarded(*args: Any, **kwargs: Any) -> Any:
            tensor = args[index] if len(args) > index else kwargs[name]
            call = calls.get((tensor.dtype, tensor.get_device())) or resolve(tensor.dtype, tensor.device)
            return call(*args, **kwargs)

        return guarded

    # -- when an implementation fails ------------------------------------------------------------------

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the next implementation; raises if there must be none.

        No other implementation is used for the reference, under a strict policy, for lack of memory, while a
        graph is being captured, or once arguments may have been written to: an in-place operator that ran
        half would run twice.
        """
        key = self.key(args, kwargs)
        selection = self.manager.select(self.op_name, *key)
        impl = _who_ran(error, selection)
        others = [each for each in (selection.impl, *selection.others) if each is not impl]
        if (
            impl.kind is ImplKind.REFERENCE
            or not others
            or self.manager.policy.strict
            or isinstance(error, (torch.OutOfMemoryError, OperatorSignatureError))
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
        for other in others:
            call = self.spec.callable_of(other)
            try:
                result = call(*args, **kwargs)
            except Exception as next_error:
                if other.kind is ImplKind.REFERENCE or self.manager.mutated_by(other):
                    # The reference fails too: the call itself is wrong.
                    raise next_error from error
                continue
            self.manager.count_failure(self, key, impl, error, other)
            return result
        raise error


def _who_ran(error: Exception, selection: Selection) -> OpImpl:
    """Return the implementation in the traceback: the choice may have changed since the call began."""
    impls = [*(each.impl for each in selection.considered), selection.impl]
    imported = [impl for impl in impls if callable(impl.fn) or "function" in vars(impl)]
    by_code = {getattr(impl.function, "__code__", None): impl for impl in imported}
    ran = (by_code.get(frame.f_code) for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((impl for impl in ran if impl is not None), selection.impl)


def _usual_keys() -> list[Key]:
    try:
        numbers = range(current_platform.device_count())
        devices = [answer_of(torch.device, current_platform.get_device, number) for number in numbers]
    except NotImplementedError:  # a platform under construction: its first calls choose
        return []
    return [(dtype, device) for device in devices for dtype in _USUAL_DTYPES]
