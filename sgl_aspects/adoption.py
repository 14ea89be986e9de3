"""SGLang's other plugins: the hooks that they register with SGLang's registry are woven by ours.

SGLang applies a hook by importing its target and setting one attribute. With ours in its place nothing is
imported, and copies are found wherever they are. The registry keeps what it was told: ``_hooks`` as they were
registered, ``_patched`` with the targets that are taken care of; ``reset()`` takes the hooks away, too.
``SGL_ASPECTS_ADOPT=0`` leaves everything to SGLang.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

import wrapt

from sgl_aspects import bootstrap, env
from sgl_aspects.errors import AspectsError
from sgl_aspects.weaving.faces import HookRegistry, weaver
from sgl_aspects.weaving.hooks import Advice, HookSource, HookType, State
from sgl_aspects.weaving.targets import Target

logger = logging.getLogger("sgl_aspects")

_MODULE = "sglang.srt.plugins.hook_registry"

# What SGLang's registry holds of a hook, and ours; None for one that can be none of ours.
Entry = tuple[Any, "Advice | None"]
# By registry (SGLang has a second one for diffusion models) and target.
_adopted: dict[type, dict[str, list[Entry]]] = {}
_is_asked = False


def adopt() -> None:
    """Take over what SGLang's registry applies from now on, as soon as there is such a registry."""
    global _is_asked
    if _is_asked or not env.flag("SGL_ASPECTS_ADOPT", True):
        return
    if "sglang" in sys.modules or importlib.util.find_spec("sglang") is not None:
        _is_asked = True
        wrapt.register_post_import_hook(_take_over, _MODULE)


def reach_children() -> None:
    """Have the interpreters that SGLang starts from now on hooked from their start.

    Its registry is asked in some of them only: not in the workers of its HTTP server, and before 0.5.23
    neither in the detokenizer nor in the controller of data parallelism.
    """
    if "sglang" in sys.modules and bootstrap.SWITCH not in os.environ and weaver.advices:
        os.environ.update(bootstrap.prepared(os.environ))


def _take_over(module: Any) -> None:
    registry: Any = getattr(module, "HookRegistry", None)
    lacking = [name for name in ("_hooks", "_patched", "apply_hooks", "reset") if not hasattr(registry, name)]
    if lacking:
        logger.warning(
            "SGLang's hook registry has no %s in this version: hooks of other plugins are left to SGLang",
            ", ".join(lacking),
        )
        return
    # Its two methods are set, and not woven: nobody holds them, and looking for holders takes its time.
    forget = registry.reset.__func__

    def reset(registry: Any) -> None:
        _give_up(registry)
        forget(registry)

    registry.apply_hooks = classmethod(_apply_hooks)
    registry.reset = classmethod(reset)


def _apply_hooks(registry: Any) -> None:
    """In place of SGLang's: everything that is registered, but what SGLang had applied before we came."""
    adopted = _adopted.setdefault(registry, {})
    fresh = [
        (target, entry)
        for target, entries in registry._hooks.items()
        if target in adopted or target not in registry._patched
        for entry in entries
        if not any(entry is known for known, _ in adopted.get(target, ()))
    ]
    for target, entry in fresh:
        advice = _advice(target, *entry)
        adopted.setdefault(target, []).append((entry, advice))
        if advice is not None:
            HookRegistry.adopt(advice)
    HookRegistry.apply_hooks()
    registry._patched.update(target for target, entries in adopted.items() if any(map(_is_in_place, entries)))
    if fresh:
        logger.info("adopted %d hooks of other SGLang plugins", len(fresh))


def _give_up(registry: Any) -> None:
    for entries in _adopted.pop(registry, {}).values():
        for _, advice in entries:
            if advice is not None:
                HookRegistry.disown(advice)


def _advice(target: str, hook_type: Any, hook: Any, source: Any) -> Advice | None:
    try:
        ours = HookType(hook_type.value)
        return Advice(Target.parse(target), ours, hook, source=HookSource(*source) if source else None)
    except AspectsError as fault:
        logger.warning("hook %r of %s is not woven: %s", hook, source, fault)
        return None


def _is_in_place(entry: Entry) -> bool:
    """Whether SGLang would count the target as patched; one that waits for its module will be."""
    _, advice = entry
    if advice is None or advice.state in (State.MISSING, State.FAILED):
        return False
    return advice.state is not State.PENDING or _has_module(str(advice.target))


def _has_module(target: str) -> bool:
    """Whether there is a module to wait for: what follows it may be ``function`` or ``Class.method``.

    Nothing is imported for that, so that what a package makes up when it is asked is not known.
    """
    first, *rest = target.split(".")
    spec = importlib.util.find_spec(first)
    while spec is not None and spec.submodule_search_locations is not None and rest:
        # By its last name: of a dotted one the finder may want the parent imported.
        inner = PathFinder.find_spec(rest[0], list(spec.submodule_search_locations))
        if inner is None:
            break
        spec, rest = inner, rest[1:]
    return spec is not None and 1 <= len(rest) <= 2
