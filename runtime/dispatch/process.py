"""The process's manager: made at the first use, from the registered backends and the configuration.

A running process changes its policy as `sgl-aspects ops` asks for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from sgl_aspects.errors import AspectsError, ConfigError
from sgl_aspects.runtime.dispatch import operators  # noqa: F401  # defines the operators
from sgl_aspects.runtime.dispatch.backends import register_backends
from sgl_aspects.runtime.dispatch.configuration import (
    POLICY_KEYS,
    Settings,
    from_words,
    load_settings,
    merged,
)
from sgl_aspects.runtime.dispatch.define import OPERATORS, unbind
from sgl_aspects.runtime.dispatch.manager import OpManager
from sgl_aspects.runtime.dispatch.policy import SelectionPolicy, listed
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import Token

logger = logging.getLogger("sgl_aspects.dispatch")

Scope = AbstractContextManager[SelectionPolicy]

_lock = threading.RLock()
_manager: OpManager | None = None


def get_manager() -> OpManager:
    """:raises ConfigError: a setting is wrong; names file or variable, key, value and choices."""
    global _manager
    manager = _manager
    if manager is not None:
        return manager
    with _lock:
        if _manager is None:
            registry = new_registry()
            settings = load_settings(registry)
            manager = OpManager(registry, settings.policy)
            if settings.log is not None:
                log_to(settings.log)
            for op_name in registry.op_names():  # `sgl-aspects ops` shows each operator, called or not
                manager.site(op_name)
            _manager = manager
        return _manager


def new_registry() -> OpRegistry:
    """Every operator, and every implementation that is installed."""
    registry = OpRegistry()
    for spec in OPERATORS.values():
        registry.define(spec)
    register_backends(registry)
    return registry


def process_manager() -> OpManager | None:
    """Return the manager, if it exists yet."""
    return _manager


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a request of `sgl-aspects ops`, and return the state then; empty if there are no operators.

    ``error`` is why it is not applied, or None.
    """
    manager, error = _manager, None
    if manager is None:
        return {}
    try:
        apply(request, manager)
    except AspectsError as wrong:
        error = str(wrong)
        logger.warning("a request is not done: %s", wrong)
    return {**state(manager), "error": error}


def apply(request: Mapping[str, Any], manager: OpManager) -> None:
    """Apply the keys and values in ``set``: all of them, or nothing.

    :raises ConfigError: an unknown key, one that is read at start only, or a value that is not allowed.
    """
    changes = from_words(request.get("set") or {})
    for key in changes:
        if key not in POLICY_KEYS:
            raise ConfigError(f"--set {key}: it is read at start only; choose from {', '.join(POLICY_KEYS)}")
    wanted = merged([changes], manager.registry, Settings(manager.process_policy))
    if wanted.policy != manager.process_policy:
        manager.set_policy(wanted.policy)


def state(manager: OpManager) -> dict[str, Any]:
    """Return what this process has resolved, in plain values."""
    return {
        "pid": os.getpid(),
        "policy": manager.process_policy.describe(),
        "resolved": [list(row) for row in manager.resolved()],
        "failures": [[op, impl, count] for (op, impl), count in manager.failures().items()],
    }


def log_to(path: str) -> None:
    """Append each resolution to a file, a line each.

    :raises ConfigError: the file cannot be opened.
    """
    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"SGL_ASPECTS_OP_LOG: {path!r} cannot be opened: {error}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(min(logger.level or logging.INFO, logging.INFO))


def reset_manager() -> None:
    """Discard the process's manager, for tests: the next use reads the configuration again."""
    global _manager
    with _lock:
        _manager = None
        unbind()


def call_op(op_name: str, *args: Any, **kwargs: Any) -> Any:
    """:meth:`OpManager.call_op` of the process's manager."""
    return get_manager().call_op(op_name, *args, **kwargs)


# -- another policy for a while: each is a context manager that gives the policy ---------------------------


def policy_context(policy: SelectionPolicy) -> Scope:
    """:meth:`OpManager.policy_context` of the process's manager."""
    return get_manager().policy_context(policy)


def with_preference(token: str) -> Scope:
    """``with with_preference("reference"): …``"""
    return policy_context(replace(get_manager().policy, prefer=Token.parse(token, "with_preference")))


def with_strict_mode(strict: bool = True) -> Scope:
    return policy_context(replace(get_manager().policy, strict=strict))


def with_allowed_vendors(vendors: str | Iterable[str]) -> Scope:
    return policy_context(replace(get_manager().policy, allow_vendors=frozenset(listed(vendors))))


def with_denied_vendors(vendors: str | Iterable[str]) -> Scope:
    """Deny these in addition to those already denied."""
    policy = get_manager().policy
    return policy_context(replace(policy, deny_vendors=policy.deny_vendors.union(listed(vendors))))


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
