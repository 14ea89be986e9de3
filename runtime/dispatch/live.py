"""Changes of a running process, as `sgl-aspects ops` asks for them: another policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from sgl_aspects.errors import AspectsError, ConfigError
from sgl_aspects.runtime.dispatch.configuration import POLICY_KEYS, Settings, from_words, merged
from sgl_aspects.runtime.dispatch.manager import OpManager

logger = logging.getLogger("sgl_aspects.dispatch")


def answer(request: Mapping[str, Any], manager: OpManager) -> dict[str, Any]:
    """Apply a request, and return the state then; ``error`` is why it is not applied, or None."""
    error = None
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
