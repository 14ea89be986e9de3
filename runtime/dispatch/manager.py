"""OpManager: resolves operators under the current policy, and keeps every place that calls one up to date."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from sgl_aspects.errors import OperatorError, UnsupportedCallError
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch.call_site import CallSite, Key
from sgl_aspects.runtime.dispatch.policy import ConfiguredPolicy, SelectionPolicy
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.selection import Availability, Selection, choose
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl

if TYPE_CHECKING:
    from sgl_aspects.runtime.dispatch.watching import Watch

logger = logging.getLogger("sgl_aspects.dispatch")

#: After so many failures with one type and device an implementation is not tried again under that policy.
FAILURES_BEFORE_SET_ASIDE = 3

_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()


class OpManager:
    """Safe to use from several threads and after a fork. One for the process: :func:`get_manager`."""

    def __init__(self, registry: OpRegistry, configured: ConfiguredPolicy | None = None) -> None:
        self.registry = registry
        self._availability = Availability()
        #: Grows with each change of policy: what was resolved before is void.
        self.epoch = 0
        self.watch: Watch | None = None
        self._configured = configured or ConfiguredPolicy(SelectionPolicy())
        #: The policies of this context's open scopes, the innermost last.
        self._scoped: contextvars.ContextVar[tuple[SelectionPolicy, ...]] = contextvars.ContextVar(
            "operator policies", default=()
        )
        self._open_scopes = 0
        self._sites: weakref.WeakSet[CallSite] = weakref.WeakSet()
        self._functions: dict[str, CallSite] = {}
        #: (policy, operator, implementation, tensors) → how often.
        self._failures: Counter[tuple[SelectionPolicy, str, str, Key]] = Counter()
        self._selections: dict[tuple[Any, ...], Selection] = {}
        #: (operator, layer's kind, tensors) → implementation, since the last change.
        self._resolved: dict[tuple[str, Any, Key], str] = {}
        self._logged: set[tuple[Any, ...]] = set()
        self._lock = threading.RLock()
        _managers.add(self)
        registry.users.add(self)

    # -- policy --------------------------------------------------------------------------------------

    @property
    def policy(self) -> SelectionPolicy:
        """The policy of this context: the innermost scope's, or the one that was set for the process."""
        scopes = self._scoped.get()
        return scopes[-1] if scopes else self._configured.policy

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Held while anything changes; another one in a forked child."""
        return self._lock

    @property
    def configured(self) -> ConfiguredPolicy:
        return self._configured

    @property
    def is_scoped(self) -> bool:
        """Whether the policy depends on who calls: then nothing is resolved for good."""
        return self._open_scopes > 0

    def set_policy(self, policy: SelectionPolicy | ConfiguredPolicy) -> None:
        """For the whole process, from the next call on.

        :raises ConfigError: it names an operator, vendor or implementation that is not there.
        """
        if not isinstance(policy, ConfiguredPolicy):
            policy = ConfiguredPolicy(
                policy, dict.fromkeys(SelectionPolicy.__dataclass_fields__, "set_policy")
            )
        self.registry.check_policy(policy.policy)
        with self._lock:
            self._configured = policy
            self.bump_epoch()

    @contextlib.contextmanager
    def policy_context(self, policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
        """This policy, in this thread or asyncio task, until the block ends.

        :raises ConfigError: as :meth:`set_policy`.
        """
        self.registry.check_policy(policy)
        self._scope_opened(1)
        token = self._scoped.set((*self._scoped.get(), policy))
        try:
            yield policy
        finally:
            self._scoped.reset(token)
            self._scope_opened(-1)

    def _scope_opened(self, change: int) -> None:
        with self._lock:
            self._open_scopes += change
            self.bump_epoch()

    def bump_epoch(self) -> None:
        """Void everything that was resolved: each place chooses anew at its next call."""
        with self._lock:
            self.epoch += 1
            self._selections, self._resolved = {}, {}
            for site in list(self._sites):
                site.reset()

    # -- places that call ----------------------------------------------------------------------------

    def site(self, op_name: str, layer: Any = None) -> CallSite:
        """A new place that calls ``op_name``."""
        if layer is None:
            self.registry.spec(op_name)
        site = CallSite(self, op_name, layer)
        with self._lock:
            self._sites.add(site)
            site.reset()
        return site

    def function_site(self, op_name: str) -> CallSite:
        """The place of the operator's own function; one for the process."""
        with self._lock:
            if op_name not in self._functions:
                self._functions[op_name] = self.site(op_name)
            return self._functions[op_name]

    def candidates(self, op_name: str, layer: Any = None) -> tuple[OpImpl, ...]:
        """Every implementation that could serve here: the registry's, and forms of the layer's class."""
        if layer is None:
            return self.registry.impls(op_name)
        forms: tuple[OpImpl, ...] = layer.forms()
        if not layer.takes_functions or op_name not in self.registry.op_names():
            return forms
        functions = self.registry.impls(op_name)
        if any(form.kind is ImplKind.REFERENCE for form in forms):
            # The layer's own reference is the same computation, made for the layer.
            functions = tuple(impl for impl in functions if impl.kind is not ImplKind.REFERENCE)
        return (*forms, *functions)

    def select(
        self,
        op_name: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        layer: Any = None,
        policy: SelectionPolicy | None = None,
    ) -> Selection:
        """:raises OperatorError: nothing may serve."""
        policy = policy or self.policy
        known, kind = self._selections, _kind_of(layer)
        question = (policy, op_name, kind, dtype, device, current_platform.get_dispatch_key_name())
        if question not in known:
            known[question] = self._select(policy, op_name, dtype, device, layer)
        return known[question]

    def _select(
        self, policy: SelectionPolicy, op_name: str, dtype: Any, device: Any, layer: Any
    ) -> Selection:
        failed = {
            impl_id
            for (of_policy, op, impl_id, key), count in list(self._failures.items())
            if count >= FAILURES_BEFORE_SET_ASIDE
            and (of_policy, op) == (policy, op_name)
            and (dtype is None or key == (dtype, device))
        }
        candidates = self.candidates(op_name, layer)
        return choose(op_name, candidates, policy, self._availability, dtype, device, failed)

    def resolve_op(
        self, op_name: str, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Callable[..., Any]:
        """The chosen implementation's function. Held, it stays; :func:`call_op` follows the policy."""
        return self.select(op_name, dtype, device).impl.fn

    def call_op(self, op_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call an operator by its name; its function of :mod:`~sgl_aspects.runtime.dispatch` costs less."""
        site = self._functions.get(op_name) or self.function_site(op_name)
        try:
            return site.run(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised again, or served by the next implementation
            return site.recover(error, args, kwargs)

    # -- failures, logging, watching -----------------------------------------------------------------

    def mutated_by(self, impl: OpImpl) -> tuple[str, ...]:
        """The arguments that a call of this implementation may write to."""
        if impl.op_name not in self.registry.op_names():
            return impl.mutates
        return tuple(dict.fromkeys((*self.registry.spec(impl.op_name).mutates, *impl.mutates)))

    def count_failure(
        self, site: CallSite, key: Key, impl: OpImpl, error: Exception, served_by: OpImpl
    ) -> None:
        """An implementation failed and another served. The third time it is set aside for such tensors.

        Not so for one that refused the call: it may serve the next.
        """
        said = f"{site.op_name}: {impl.impl_id} %s {key[0]} on {key[1]} ({type(error).__name__}: {error}); "
        if isinstance(error, UnsupportedCallError):
            self._log_once(("refused", site.op_name, impl.impl_id, key), said % "refused a call with")
            return
        entry = (self.policy, site.op_name, impl.impl_id, key)
        with self._lock:
            self._failures[entry] += 1
            count = self._failures[entry]
        if count in (1, FAILURES_BEFORE_SET_ASIDE):
            after = "" if count == 1 else ", and serves such calls from now on"
            logger.warning("%s%s served the call%s", said % "failed with", served_by.impl_id, after)
        if count >= FAILURES_BEFORE_SET_ASIDE:
            self.bump_epoch()

    def failures(self) -> dict[tuple[str, str], int]:
        """(operator, implementation) → failures under the current policy."""
        counts: Counter[tuple[str, str]] = Counter()
        for (policy, op, impl_id, _), count in list(self._failures.items()):
            if policy == self.policy:
                counts[op, impl_id] += count
        return dict(counts)

    def clear_failures(self) -> None:
        """Try again what was set aside."""
        with self._lock:
            self._failures.clear()
            self.bump_epoch()

    def note_selection(self, site: CallSite, key: Key, selection: Selection) -> None:
        """For :meth:`resolved`; in the log once for each operator, tensors and implementation."""
        impl_id = selection.impl.impl_id
        if not self.is_scoped:
            self._resolved[site.op_name, _kind_of(site.layer), key] = impl_id
        said = f"{site.op_name} resolves to {impl_id}"
        said += "" if key[0] is None else f" for {key[0]} on {key[1]}"
        self._log_once(("resolved", site.op_name, key, impl_id), f"{said} ({self.policy.describe()})")

    def _log_once(self, what: tuple[Any, ...], message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.info("%s", message)

    def resolved(self) -> list[tuple[str, str, str]]:
        """(operator, tensors, implementation) of everything that is resolved in this process now."""
        with self._lock:
            found = {
                (op, "any" if dtype is None else f"{dtype} on {device}", impl_id)
                for (op, _, (dtype, device)), impl_id in self._resolved.items()
            }
        return sorted(found)

    def set_watch(self, watch: Watch | None) -> None:
        """Shadow calls or summaries, from the next call on; None: nothing."""
        with self._lock:
            if self.watch is not None:
                self.watch.stop()
            self.watch = watch
            if watch is not None:
                watch.start()
            self.bump_epoch()

    def explain(
        self, op_name: str, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> str:
        """In words: what serves the operator, why, and why not the others."""
        try:
            selection = self.select(op_name, dtype, device)
        except OperatorError as error:
            return f"{op_name}: {error}"
        lines = [f"{op_name} → {selection.impl.impl_id}   ({self.policy.describe()})"]
        lines += [f"  {each.impl.impl_id}: {each.reason or 'chosen'}" for each in selection.considered]
        return "\n".join(lines)

    def begin_in_forked_child(self) -> None:
        """Locks may be held, work half done, and scopes open in threads that are not here."""
        self._lock = threading.RLock()
        self.registry.renew_lock()
        self._open_scopes = len(self._scoped.get())
        self.bump_epoch()


def _kind_of(layer: Any) -> Any:
    """Layers of one kind are served alike."""
    if layer is None:
        return None
    return (layer if isinstance(layer, type) else type(layer), layer.takes_functions)


def _begin_in_forked_child() -> None:
    for manager in list(_managers):
        manager.begin_in_forked_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_forked_child)
