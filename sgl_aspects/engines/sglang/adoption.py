"""SGLang's other plugins: the hooks that they register with SGLang's registry are woven by ours.

SGLang applies a hook by importing its target and setting one attribute. With ours in its place nothing is
imported, and copies are found wherever they are. Asked, SGLang's registry answers as before: what it
refuses, forgets, warns of and lists as patched is the same, and a hook gets its arguments as they were
written. ``SGL_ASPECTS_ADOPT=0`` leaves everything to SGLang.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

from sgl_aspects import bootstrap, env
from sgl_aspects.errors import AspectsError, HookError
from sgl_aspects.weaving import Advice, HookRegistry, HookSource, HookType, State, Target, weaver

logger = logging.getLogger("sgl_aspects")

_MODULE = "sglang.srt.plugins.hook_registry"
# A hook's error is reported where its author looks for it.
_their_logger = logging.getLogger(_MODULE)

# What SGLang's registry holds of a hook: its type, the hook, its source; newer ones may add to that.
Entry = tuple[Any, ...]
# By registry (SGLang has a second one for diffusion models) and target, what we made of its entries. What a
# registry has forgotten since is still here, because it still is in place.
_adopted: dict[type, dict[str, list[tuple[Entry, Advice]]]] = {}
_is_asked = False


def adopt() -> None:
    """Take over what SGLang's registry applies from now on, as soon as there is such a registry."""
    global _is_asked
    if _is_asked or not env.flag("SGL_ASPECTS_ADOPT", True):
        return
    if "sglang" in sys.modules or importlib.util.find_spec("sglang") is not None:
        _is_asked = True
        weaver.when_loaded(_MODULE, _take_over)


def apply_orphans() -> None:
    """Apply what plugins have registered with SGLang's registry where SGLang itself never will.

    That is in another engine's process, which runs plugins that were written for SGLang.
    """
    plugins = sys.modules.get("sglang.srt.plugins")
    if plugins is not None and _MODULE in sys.modules and not getattr(plugins, "_plugins_loaded", True):
        sys.modules[_MODULE].HookRegistry.apply_hooks()


def reach_children() -> None:
    """Have the interpreters that SGLang starts from now on hooked from their start.

    Its registry is asked in some of them only: not in the workers of its HTTP server, and before 0.5.23
    neither in the detokenizer nor in the controller of data parallelism.
    """
    if "sglang" in sys.modules and bootstrap.SWITCH not in os.environ and weaver.advices:
        os.environ.update(bootstrap.prepared(os.environ))


def _take_over(module: Any) -> None:
    registry: Any = getattr(module, "HookRegistry", None)
    lacking = [name for name in ("_hooks", "_patched", "apply_hooks") if not hasattr(registry, name)]
    if lacking:
        logger.warning(
            "SGLang's hook registry has no %s in this version: hooks of other plugins are left to SGLang",
            ", ".join(lacking),
        )
        return
    # Assigned, not woven: these methods have no other referrers, and searching for them takes time.
    registry.apply_hooks = classmethod(_apply_hooks)
    if hasattr(registry, "is_hook_applied"):  # in SGLang after 0.5.23
        registry.is_hook_applied = classmethod(_is_hook_applied_by(registry.is_hook_applied.__func__))


def _apply_hooks(registry: Any) -> None:
    """In place of SGLang's: the hooks of every target that it does not list as patched."""
    adopted = _adopted.setdefault(registry, {})
    fresh = {name: list(found) for name, found in registry._hooks.items() if name not in registry._patched}
    faults: dict[str, AspectsError] = {}
    for target, entries in fresh.items():
        try:
            advices = [_advice(target, *entry[:3]) for entry in entries]
        except AspectsError as error:
            faults[target] = error
            continue
        before = adopted.get(target, [])
        # What failed before is tried again. A registry that was reset has forgotten its hooks and left them
        # in place: a REPLACE hook covers them.
        covers = any(advice.hook_type is HookType.REPLACE for advice in advices)
        gone = [pair for pair in before if covers or _holds(entries, pair[0])]
        HookRegistry.disown(advice for _, advice in gone)
        adopted[target] = [pair for pair in before if pair not in gone] + list(zip(entries, advices))
        HookRegistry.adopt(advices)
    HookRegistry.apply_hooks()
    for target, entries in fresh.items():
        mine = [advice for entry, advice in adopted.get(target, ()) if _holds(entries, entry)]
        fault = faults.get(target) or next(filter(None, map(_fault, mine)), None)
        if fault is None:
            registry._patched.add(target)
        else:
            # All of them or none, as in SGLang; they stay in the report.
            weaver.set_enabled([advice for advice in mine if advice.state is State.WOVEN], False)
            _their_logger.error("the hooks of %s are not in place: %s", target, fault)
    for target, entries in fresh.items():
        if target in registry._patched:
            _tell(registry, target, entries)


def _holds(entries: list[Entry], entry: Entry) -> bool:
    return any(entry is other for other in entries)


def _advice(target: str, hook_type: Any, hook: Any, source: Any) -> Advice:
    try:
        ours = HookType(hook_type.value)
    except (AttributeError, ValueError):
        raise HookError(f"{target}: {hook_type!r} is not a HookType") from None
    origin = HookSource(*source) if source else None
    return Advice(Target.parse(target), ours, hook, source=origin)


def _fault(advice: Advice) -> HookError | None:
    """Why SGLang would not count the hook as applied; one that waits for its module will be."""
    if advice.state in (State.MISSING, State.FAILED):
        return HookError(advice.detail)
    if advice.state is State.PENDING and not _has_module(str(advice.target).replace(":", ".")):
        return HookError("there is no such module")
    return None


def _has_module(target: str) -> bool:
    """Whether there is a module to wait for.

    Nothing is imported for that, so that what a package makes up when it is asked is not known.
    """
    first, *rest = target.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # somebody made the module by hand
        return True
    while spec is not None and spec.submodule_search_locations is not None and rest:
        # By its last name: of a dotted one the finder may want the parent imported.
        inner = PathFinder.find_spec(rest[0], list(spec.submodule_search_locations))
        if inner is None:
            break
        spec, rest = inner, rest[1:]
    # In a package itself there may be `function` or `Class.method`; deeper paths miss a module.
    deepest = 2 if spec is not None and spec.submodule_search_locations is not None else len(rest)
    return spec is not None and 1 <= len(rest) <= deepest


def _is_hook_applied_by(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_hook_applied(registry: Any, target: str, hook: Any, *args: Any, **kwargs: Any) -> bool:
        adopted = _adopted.get(registry, {}).get(target)
        if target not in registry._patched or not adopted:
            return original(registry, target, hook, *args, **kwargs)
        hook_type = next(iter([*args, *kwargs.values()]), HookType.AFTER)
        entries = registry._hooks.get(target, [])
        return any(
            entry[1] is hook and advice.hook_type.value == hook_type.value and _holds(entries, entry)
            for entry, advice in adopted
        )

    return is_hook_applied


# -- what SGLang says of hooks that get into each other's way --------------------------------------------


def _tell(registry: Any, target: str, entries: list[Entry]) -> None:
    types = [entry[0].value for entry in entries]
    sources = ", ".join(dict.fromkeys(_named(entry[2]) for entry in entries))
    owner, _, name = target.rpartition(".")
    classes = [entry[1] for entry in registry._hooks.get(owner, ()) if isinstance(entry[1], type)]
    if "replace" in types and classes and owner in registry._patched and name in vars(classes[-1]):
        _their_logger.warning(
            # SGLang's tests, and perhaps somebody's alarm, look for the words "will override".
            "the REPLACE hook of %s (from: %s) will override %s of %s, the class in the place of %s: wrap it "
            "with an AROUND hook, or change that class",
            target,
            sources,
            name,
            classes[-1].__name__,
            owner,
        )
    if types.count("around") > 1:
        _their_logger.warning(
            "%s has %d AROUND hooks (from: %s): one that does not call original_fn leaves out those below it",
            target,
            types.count("around"),
            sources,
        )
    _their_logger.info("adopted %d hooks of %s (from: %s)", len(entries), target, sources)


def _named(source: Any) -> str:
    return str(HookSource(*source)) if source else "unknown"
