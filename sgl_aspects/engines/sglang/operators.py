"""Dispatch for SGLang's fused operators: runs the implementations that the policy selects, else SGLang's.

On a platform outside SGLang's tree the forwards are registered with SGLang, as it provides for: by
:func:`register_own` those of the platform itself, by :func:`attach` all. On SGLang's own platforms a hook
replaces the result of a layer's resolver. Either way once per layer: then it is a plain call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from sgl_aspects.engines.sglang.operator_targets import (
    FUNCTIONS,
    LAYERS,
    METHOD_OPERATORS,
    METHODS,
    REGISTRATIONS,
    RESOLVERS,
)
from sgl_aspects.errors import AspectsError, Stop
from sgl_aspects.weaving import HookRegistry, HookType, weaver

#: Exactly these classes: a subclass may compute something else.
_OPERATORS = {target: op_name for op_name, target in LAYERS.items()}

_attached = False


def attach() -> None:
    """Weave the hooks, once in each process; imports nothing of SGLang."""
    global _attached
    if _attached:
        return
    _attached = True
    for module in {target.partition(":")[0] for target in LAYERS.values()}:
        weaver.when_loaded(module, _layers_loaded)
    HookRegistry.register(RESOLVERS, _resolved, HookType.AFTER)
    for op_name, targets in FUNCTIONS.items():
        for target in targets:
            HookRegistry.register(target, _function_hook(op_name, op_name), HookType.AROUND)
    for function, target in METHODS.items():
        hook = _function_hook(METHOD_OPERATORS[function], function)
        HookRegistry.register(target, hook, HookType.AROUND)


def _layers_loaded(module: Any) -> None:
    """Check the configuration: a module with fused layers was imported."""
    try:
        manager = _manager()
    except AspectsError as error:
        raise Stop(f"operators cannot be attached: {error}") from error
    key = _out_of_tree_key()
    if key is None:
        return
    for op_name in LAYERS:
        if manager.policy.is_dispatched(op_name):
            _register_forwards(op_name, key)


def register_own(key: str) -> None:
    """Register with SGLang the forwards of layers for whose operators the platform of this dispatch key has
    registered implementations (``register_oot_forward``); other layers stay SGLang's.
    """
    from sgl_aspects.runtime.dispatch.process import process_manager

    manager = process_manager()
    if manager is None:
        return
    for op_name, target in LAYERS.items():
        if any(impl.impl_id == f"oot.{key}.{op_name}" for impl in manager.registry.impls(op_name)):
            weaver.when_loaded(target.partition(":")[0], partial(_register_forwards, op_name, key))


def _register_forwards(op_name: str, key: str, module: Any = None) -> None:
    """Register an out-of-tree forward of the operator's layer if it is loaded, where SGLang has such."""
    bases = [_loaded(target) for target in REGISTRATIONS]
    base = next((base for base in bases if hasattr(base, "register_oot_forward")), None)
    layer_class = _loaded(LAYERS[op_name])
    if base is not None and layer_class is not None:
        base.register_oot_forward(layer_class, _before(_native, op_name), key)


def _before(own: Callable[..., Any], function: str) -> Callable[..., Any]:
    """Return that function of layers.py, falling back to ``own`` if it does not support the call."""
    from sgl_aspects.engines.sglang import layers

    ours: Callable[..., Any] = getattr(layers, function)

    def forward_dispatched(*args: Any, **kwargs: Any) -> Any:
        outcome = ours(*args, **kwargs)
        return own(*args, **kwargs) if outcome is NotImplemented else outcome

    return forward_dispatched


def _native(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer.forward_native(*args, **kwargs)


def _resolved(result: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
    """AFTER hook on the resolver: the selected implementation instead of SGLang's choice."""
    op_name = _OPERATORS.get(_name_of(type(self)))
    if op_name is None or getattr(result, "__name__", "") == "forward_dispatched":
        return None
    if not _manager().policy.is_dispatched(op_name):
        return None
    return MethodType(_before(lambda layer, *args, **kwargs: result(*args, **kwargs), op_name), self)


def _function_hook(op_name: str, function: str) -> Callable[..., Any]:
    def dispatched(original_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _manager().policy.is_dispatched(op_name):
            return original_fn(*args, **kwargs)
        return _before(original_fn, function)(*args, **kwargs)

    return dispatched


def _name_of(layer_class: type) -> str:
    return f"{layer_class.__module__}:{layer_class.__qualname__}"


def _loaded(target: str) -> Any:
    """Return the target if it exists, without importing anything."""
    module_name, _, name = target.partition(":")
    return getattr(sys.modules.get(module_name), name, None)


def _out_of_tree_key() -> str | None:
    """Return SGLang's dispatch key for the platform; None on its own platforms."""
    platforms = sys.modules.get("sglang.srt.platforms")
    platform = getattr(platforms, "current_platform", None)
    return (
        str(platform.get_dispatch_key_name()) if platform is not None and platform.is_out_of_tree() else None
    )


def _manager() -> Any:
    """Return the process's manager, on the platform that SGLang has chosen."""
    from sgl_aspects.runtime import dispatch
    from sgl_aspects.runtime.dispatch.process import process_manager

    manager = process_manager()
    if manager is None:
        _adopt_platform()
        manager = dispatch.get_manager()
    return manager


def _adopt_platform() -> None:
    """Set the bridged platform behind SGLang's; the built-in one of its device otherwise."""
    from sgl_aspects.platforms import SRTPlatform, resolve_qualified_name, set_current_platform
    from sgl_aspects.platforms.builtins import BUILTIN_PLATFORMS

    theirs = getattr(sys.modules.get("sglang.srt.platforms"), "current_platform", None)
    ours = getattr(theirs, "platform", None)
    if isinstance(ours, SRTPlatform):
        set_current_platform(ours)
        return
    device = getattr(theirs, "device_type", None)
    for row in BUILTIN_PLATFORMS:
        if row.name == device:
            set_current_platform(resolve_qualified_name(row.class_name)())
            return
