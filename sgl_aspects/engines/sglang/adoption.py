"""SGLang's other plugins: weaves the hooks that they register with SGLang's registry.

SGLang applies a hook by importing its target and setting one attribute. Woven hooks import nothing, and
copies of the target are found wherever they are. SGLang's registry gives the same answers as before: the
hooks it rejects, forgets, warns of and lists as patched are the same, and a hook gets its arguments as the
caller passed them. ``SGL_ASPECTS_ADOPT=0`` leaves everything to SGLang.
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
# Report a hook's error in the log where its author looks for it.
_their_logger = logging.getLogger(_MODULE)

# The fields of an entry in SGLang's registry: type, hook, source; newer versions may add to that.
Entry = tuple[Any, ...]
# By registry (SGLang has a second one for diffusion models) and target, the advice for its entries. Entries
# that a registry has forgotten since are kept: their hooks are still in place.
_adopted: dict[type, dict[str, list[tuple[Entry, Advice]]]] = {}
_is_installed = False


def adopt() -> None:
    """Replace the application of hooks in SGLang's registry, as soon as it exists."""
    global _is_installed
    if _is_installed or not env.flag("SGL_ASPECTS_ADOPT", True):
        return
    if "sglang" in sys.modules or importlib.util.find_spec("sglang") is not None:
        _is_installed = True
        weaver.when_loaded(_MODULE, _take_over)


def apply_orphans() -> None:
    """Apply hooks of SGLang's registry in another engine's process, where SGLang itself never does.

    Such a process also runs plugins that were written for SGLang.
    """
    plugins = sys.modules.get("sglang.srt.plugins")
    if plugins is not None and _MODULE in sys.modules and not getattr(plugins, "_plugins_loaded", True):
        sys.modules[_MODULE].HookRegistry.apply_hooks()


def reach_children() -> None:
    """Hook the interpreters that SGLang starts from now on from their start.

    SGLang applies its registry in some of them only: not in the workers of its HTTP server, and before 0.5.23
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
    """Replace SGLang's method: weave the hooks of every target that it does not list as patched."""
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
        # Failed hooks are retried. A registry that was reset has forgotten its hooks but left them in place:
        # a REPLACE hook covers them.
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
    """Return why SGLang would not count the hook as applied; one that waits for its module will be."""
    if advice.state in (State.MISSING, State.FAILED):
        return HookError(advice.detail)
    if advice.state is State.PENDING and not _has_module(str(advice.target).replace(":", ".")):
        return HookError("there is no such module")
    return None


def _has_module(target: str) -> bool:
    """Return whether there is a module to wait for.

    Nothing is imported for that, so attributes that a package creates on access are not found.
    """
    first, *rest = target.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # a module without a spec, created by hand
        return True
    while spec is not None and spec.submodule_search_locations is not None and rest:
        # By its last name: for a dotted one the finder may import the parent.
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


# -- SGLang's messages about conflicting hooks ------------------------------------------------------------


def _tell(registry: Any, target: str, entries: list[Entry]) -> None:
    types = [entry[0].value for entry in entries]
    sources = ", ".join(dict.fromkeys(_named(entry[2]) for entry in entries))
    owner, _, name = target.rpartition(".")
    classes = [entry[1] for entry in registry._hooks.get(owner, ()) if isinstance(entry[1], type)]
    if "replace" in types and classes and owner in registry._patched and name in vars(classes[-1]):
        _their_logger.warning(
            # SGLang's tests, and possibly log alerts, search for the words "will override".
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
