"""OpManager: resolves operators under the current policy, and keeps their call sites up to date."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sgl_aspects.errors import OperatorError, UnsupportedCallError
from sgl_aspects.platforms import current_platform
from sgl_aspects.platforms.current import call_after_changes
from sgl_aspects.runtime.dispatch.call_site import CallSite, Key
from sgl_aspects.runtime.dispatch.policy import SelectionPolicy
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.selection import Availability, Selection, choose
from sgl_aspects.runtime.dispatch.types import OpImpl

logger = logging.getLogger("sgl_aspects.dispatch")

#: An implementation that failed this often with one type and device is not tried again under that policy.
FAILURES_BEFORE_SET_ASIDE = 3

_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()


class OpManager:
    """Safe to use from several threads and after a fork. One for the process: :func:`get_manager`."""

    def __init__(self, registry: OpRegistry, policy: SelectionPolicy | None = None) -> None:
        self.registry = registry
        #: The policy outside of scopes.
        self.process_policy = policy or SelectionPolicy()
        #: Held while anything changes; another one in a forked child.
        self.lock = threading.RLock()
        #: Scope → its policy, for all open ones; and those that this context is in, the innermost last. A
        #: task that began in a scope may outlive it.
        self._scopes: dict[object, SelectionPolicy] = {}
        self._entered: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar(
            "operator scopes", default=()
        )
        self._sites: dict[str, CallSite] = {}
        #: Dispatch key → what is available on a platform of that key.
        self._availability: defaultdict[str, Availability] = defaultdict(Availability)
        #: (policy, operator, dtype, device, dispatch key) → implementation, since the last change.
        self._selections: dict[tuple[Any, ...], Selection] = {}
        #: (policy, operator, implementation, tensors) → how often.
        self._failures: Counter[tuple[SelectionPolicy, str, str, Key]] = Counter()
        self._logged: set[tuple[Any, ...]] = set()
        _managers.add(self)
        registry.users.add(self)

    # -- policy --------------------------------------------------------------------------------------

    @property
    def policy(self) -> SelectionPolicy:
        """The policy of this context: the innermost open scope's, or the one that was set for the process."""
        for scope in reversed(self._entered.get()):
            if scope in self._scopes:
                return self._scopes[scope]
        return self.process_policy

    @property
    def is_scoped(self) -> bool:
        """Return whether the policy depends on the context: then no choice is permanent."""
        return bool(self._scopes)

    def set_policy(self, policy: SelectionPolicy) -> None:
        """Set the policy for the whole process, from the next call on.

        :raises ConfigError: it names an unknown operator, vendor or implementation.
        """
        self.registry.check_policy(policy)
        with self.lock:
            self.process_policy = policy
            self.choose_anew()

    @contextlib.contextmanager
    def policy_context(self, policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
        """This policy, in this thread or asyncio task, until the block ends.

        :raises ConfigError: as :meth:`set_policy`.
        """
        self.registry.check_policy(policy)
        scope = object()
        with self.lock:
            self._scopes[scope] = policy
            self.choose_anew()
        token = self._entered.set((*self._entered.get(), scope))
        try:
            yield policy
        finally:
            with self.lock:
                del self._scopes[scope]
                self.choose_anew()
            self._entered.reset(token)

    def choose_anew(self) -> None:
        """Discard all choices: each call site chooses again at its next call."""
        with self.lock:
            self._selections = {}
            for site in list(self._sites.values()):
                site.reset()

    def discard_choices(self) -> None:
        """Discard all choices, for another platform: what is available is another thing there, too."""
        with self.lock:
            self._selections = {}
            self._availability.clear()
            for site in list(self._sites.values()):
                site.discard()

    # -- call sites ----------------------------------------------------------------------------------

    def site(self, op_name: str) -> CallSite:
        """Return the call site of the operator, one per manager.

        :raises OperatorError: no operator has this name.
        """
        with self.lock:
            if op_name not in self._sites:
                self._sites[op_name] = site = CallSite(self, op_name)
                site.reset()
            return self._sites[op_name]

    def select(
        self, op_name: str, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Selection:
        """Choose the implementation.

        :raises OperatorError: none is allowed and able.
        """
        policy, known = self.policy, self._selections
        key = current_platform.get_dispatch_key_name()
        question = (policy, op_name, dtype, device, key)
        selection = known.get(question)
        if selection is None:
            failed = {
                impl_id
                for (of_policy, op, impl_id, tensors), count in list(self._failures.items())
                if count >= FAILURES_BEFORE_SET_ASIDE
                and (of_policy, op) == (policy, op_name)
                and (dtype is None or tensors == (dtype, device))
            }
            candidates, availability = self.registry.impls(op_name), self._availability[key]
            selection = choose(op_name, candidates, policy, availability, dtype, device, failed)
            known[question] = selection
        return selection

    def resolve_op(
        self, op_name: str, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Callable[..., Any]:
        """Return the chosen implementation's function. :func:`call_op` instead follows the policy."""
        return self.select(op_name, dtype, device).impl.function

    def call_op(self, op_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call an operator by its name; its function of :mod:`~sgl_aspects.runtime.dispatch` costs less."""
        site = self._sites.get(op_name) or self.site(op_name)
        try:
            return site.run(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised again, or served by the next implementation
            return site.recover(error, args, kwargs)

    # -- failures, logging --------------------------------------------------------------------------

    def mutated_by(self, impl: OpImpl) -> tuple[str, ...]:
        """The arguments that a call of this implementation may write to."""
        always = self.registry.spec(impl.op_name).mutates if impl.op_name in self.registry else ()
        return tuple(dict.fromkeys((*always, *impl.mutates)))

    def count_failure(
        self, site: CallSite, key: Key, impl: OpImpl, error: Exception, served_by: OpImpl
    ) -> None:
        """Record that an implementation failed and another ran. The third time it is excluded for such
        tensors.

        One that rejected the call is not: it may support the next.
        """
        dtype, device = key
        tensors, why = f"{dtype} on {device}", f"{type(error).__name__}: {error}"
        if isinstance(error, UnsupportedCallError):
            self._log_once(
                ("refused", site.op_name, impl.impl_id, key),
                f"{site.op_name}: {impl.impl_id} refused a call with {tensors} ({why}); "
                f"{served_by.impl_id} served it",
            )
            return
        entry = (self.policy, site.op_name, impl.impl_id, key)
        with self.lock:
            self._failures[entry] += 1
            count = self._failures[entry]
        if count in (1, FAILURES_BEFORE_SET_ASIDE):
            logger.warning(
                "%s: %s failed with %s (%s); %s served the call%s",
                site.op_name,
                impl.impl_id,
                tensors,
                why,
                served_by.impl_id,
                "" if count == 1 else ", and serves such calls from now on",
            )
        if count >= FAILURES_BEFORE_SET_ASIDE:
            self.choose_anew()

    def failures(self) -> dict[tuple[str, str], int]:
        """(operator, implementation) → failures under the current policy."""
        counts: Counter[tuple[str, str]] = Counter()
        for (policy, op, impl_id, _), count in list(self._failures.items()):
            if policy == self.policy:
                counts[op, impl_id] += count
        return dict(counts)

    def clear_failures(self) -> None:
        """Allow excluded implementations again."""
        with self.lock:
            self._failures.clear()
            self.choose_anew()

    def log_selection(self, site: CallSite, key: Key, impl: OpImpl) -> None:
        """Log once for each operator, tensors and implementation."""
        tensors = "" if key[0] is None else f" for {key[0]} on {key[1]}"
        self._log_once(
            ("resolved", site.op_name, key, impl.impl_id),
            f"{site.op_name} resolves to {impl.impl_id}{tensors} ({self.policy.describe()})",
        )

    def _log_once(self, what: tuple[Any, ...], message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.info("%s", message)

    def resolved(self) -> list[tuple[str, str, str]]:
        """Return (operator, tensors, implementation) of all choices under the process's policy."""
        found = set()
        for (policy, op, dtype, device, _), selection in list(self._selections.items()):
            if policy != self.process_policy:
                continue
            if not selection.depends_on_tensors:
                found.add((op, "any", selection.impl.impl_id))
            elif dtype is not None and device is not None:
                found.add((op, f"{dtype} on {device}", selection.impl.impl_id))
        return sorted(found)

    def explain(
        self, op_name: str, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> str:
        """Describe the choice for the operator, and why not the others."""
        try:
            selection = self.select(op_name, dtype, device)
        except OperatorError as error:
            return f"{op_name}: {error}"
        lines = [f"{op_name} → {selection.impl.impl_id}   ({self.policy.describe()})"]
        lines += [f"  {each.impl.impl_id}: {each.reason or 'chosen'}" for each in selection.considered]
        return "\n".join(lines)

    def begin_in_forked_child(self) -> None:
        """Reset after a fork: locks may be held, work half done, and scopes open in threads that no longer
        exist.
        """
        self.lock, self.registry.lock = threading.RLock(), threading.RLock()
        entered = self._entered.get()
        self._scopes = {scope: policy for scope, policy in self._scopes.items() if scope in entered}
        self.choose_anew()


def _begin_in_forked_child() -> None:
    for manager in list(_managers):
        manager.begin_in_forked_child()


def _begin_on_another_platform() -> None:
    for manager in list(_managers):
        manager.discard_choices()


call_after_changes(_begin_on_another_platform)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_forked_child)
