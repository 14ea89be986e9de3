"""Chooses the platform: plugins first, then the built-in ones by detected hardware.

A plugin is an entry point of group ``sgl_aspects.platforms``. Its callable returns the qualified name of an
SRTPlatform subclass (``"pkg.mod:Cls"``), or None where its hardware is absent.

    SGLANG_PLATFORM unset               every plugin is called: one result, it is chosen; several, an error;
                                        none, the built-in of highest priority whose hardware is found
    SGLANG_PLATFORM=name                only this plugin, or this built-in, is imported and called
    SGLANG_PLATFORM=name=pkg.mod:Cls    this class, without any packaging (for development)

A name that is neither is looked up in SGLang's group, ``sglang.srt.platforms``: a bridged class also runs
here.

There is no silent fallback to other hardware: a plugin that raises, an unknown name, and absent hardware that
was selected are each a PlatformError.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_aspects import env
from sgl_aspects.errors import ConfigError, PlatformError, PlatformTypeError
from sgl_aspects.packages import install_command
from sgl_aspects.platforms.bounded import DetectionTimeoutError, ask_within_bound
from sgl_aspects.platforms.builtins import BUILTIN_PLATFORMS, BuiltinPlatform
from sgl_aspects.platforms.identity import PlatformCapabilities, PlatformEnum
from sgl_aspects.platforms.misnamed import misnamed_attributes
from sgl_aspects.platforms.srt_platform import SRTPlatform

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "sgl_aspects.platforms"
SGLANG_PLATFORMS_GROUP = "sglang.srt.platforms"
PLATFORM_VARIABLE = "SGLANG_PLATFORM"
#: The identity attributes of a platform, and their types.
_IDENTITY: dict[str, type | tuple[type, ...]] = {
    "_enum": PlatformEnum,
    "device_name": str,
    "device_type": str,
    "capabilities": PlatformCapabilities,
    "supported_quantization": (tuple, list),
}


@dataclass(frozen=True)
class Candidate:
    """One platform that was found, and whether it was chosen."""

    name: str
    #: "built-in", or the distribution that provides it, or the variable that names it.
    source: str
    chosen: bool
    #: Why it was chosen, or why not.
    reason: str


@dataclass(frozen=True)
class PlatformChoice:
    """The chosen platform, and every candidate with its reason."""

    name: str
    platform: SRTPlatform
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class PlatformPlugin:
    """An installed platform plugin. Listing it imports nothing."""

    name: str
    distribution: str
    entry_point: importlib.metadata.EntryPoint

    def __str__(self) -> str:
        return f"{self.name!r} of {self.distribution}"

    def activate(self) -> str | None:
        """Import the plugin and call it: its class's qualified name, or None if the hardware is absent."""
        try:
            answer = ask_within_bound(f"Platform plugin {self}", lambda: self.entry_point.load()())
        except (DetectionTimeoutError, ConfigError):
            raise
        except KeyboardInterrupt:  # Ctrl-C
            raise
        # a plugin that exits must not end the engine without an error
        except BaseException as error:
            raise PlatformError(
                f"Platform plugin {self} failed while it was activated ({self.entry_point.value}): "
                f"{type(error).__name__}: {error}. Repair or uninstall {self.distribution}, or set "
                f"{PLATFORM_VARIABLE} to another platform."
            ) from error
        if isinstance(answer, str) and self.entry_point.group == SGLANG_PLATFORMS_GROUP and ":" not in answer:
            return ":".join(answer.rpartition(".")[::2])  # SGLang writes a dot before the class
        if answer is None or isinstance(answer, str):
            return answer
        raise PlatformTypeError(
            f"Platform plugin {self} returned {answer!r} ({type(answer).__qualname__}) from "
            f'{self.entry_point.value}: it returns a qualified class name, "pkg.mod:Cls", or None.'
        )


def find_plugins(group: str = ENTRY_POINT_GROUP) -> tuple[PlatformPlugin, ...]:
    """Return the installed platform plugins of ``group``, by name. Nothing is imported."""
    found = importlib.metadata.entry_points(group=group)
    plugins = [PlatformPlugin(point.name, _distribution_of(point), point) for point in found]
    return tuple(sorted(plugins, key=lambda plugin: (plugin.name, plugin.distribution)))


def choose_platform() -> PlatformChoice:
    """Choose by the rules above. Raises PlatformError, whose message names the packages and the variable."""
    wanted = env.text(PLATFORM_VARIABLE)
    plugins = find_plugins()
    if wanted is None:
        return _choose_by_query(plugins)
    name, separator, class_name = wanted.partition("=")
    if separator:
        return _choose_class(name.strip(), class_name.strip(), plugins)
    return _choose_by_name(wanted, plugins)


def resolve_qualified_name(name: str | type) -> type:
    """Return the class that ``"pkg.mod:Cls"`` names; a class is returned as it is.

    Raises PlatformError if module or attribute is missing, PlatformTypeError if it is not a class.
    """
    if isinstance(name, type):
        return name
    if not isinstance(name, str):
        raise PlatformTypeError(f'{name!r} is neither a class nor a qualified class name, "pkg.mod:Cls".')
    module_name, separator, attribute = name.partition(":")
    if not (separator and module_name and attribute):
        raise PlatformError(f'{name!r} is not a qualified class name: write "pkg.mod:Cls".')
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PlatformError(f"{name!r} cannot be loaded: {type(error).__name__}: {error}.") from error
    if not isinstance(found, type):
        raise PlatformTypeError(f"{name!r} is a {type(found).__qualname__}, and a class is needed.")
    return found


def _choose_by_query(plugins: Sequence[PlatformPlugin]) -> PlatformChoice:
    answers = [(plugin, plugin.activate()) for plugin in plugins]
    active = [(plugin, class_name) for plugin, class_name in answers if class_name is not None]
    if len(active) > 1:
        _check_one_provider([plugin for plugin, _ in active if plugin.name == active[0][0].name])
        listed = ", ".join(str(plugin) for plugin, _ in active)
        raise PlatformError(
            f"Several platform plugins found their hardware: {listed}. Set {PLATFORM_VARIABLE} to the "
            f"name of the one to use, for example {PLATFORM_VARIABLE}={active[0][0].name}."
        )
    absent = [
        Candidate(plugin.name, plugin.distribution, False, "its plugin found no hardware")
        for plugin, class_name in answers
        if class_name is None
    ]
    if active:
        plugin, class_name = active[0]
        chosen = Candidate(plugin.name, plugin.distribution, True, "the only plugin that found its hardware")
        not_queried = [
            Candidate(row.name, "built-in", False, "not queried: a plugin comes first")
            for row in BUILTIN_PLATFORMS
        ]
        platform = _create(class_name, f"plugin {plugin}")
        return PlatformChoice(plugin.name, platform, (chosen, *absent, *not_queried))
    return _choose_builtin(absent)


def _choose_builtin(plugins_without_hardware: Sequence[Candidate]) -> PlatformChoice:
    candidates = list(plugins_without_hardware)
    choice: BuiltinPlatform | None = None
    for row in sorted(BUILTIN_PLATFORMS, key=lambda row: -row.priority):
        if choice is not None:
            candidates.append(
                Candidate(row.name, "built-in", False, f"not queried: {choice.name} comes first")
            )
            continue
        absent = _detect(row)
        if absent is not None:
            candidates.append(Candidate(row.name, "built-in", False, absent))
            continue
        choice = row
        candidates.append(
            Candidate(row.name, "built-in", True, "the highest built-in whose hardware was found")
        )
    if choice is None:  # the CPU is always found: only a changed table comes here
        raise PlatformError(f"No platform: {'; '.join(f'{c.name}: {c.reason}' for c in candidates)}")
    return PlatformChoice(
        choice.name, _create(choice.class_name, f"built-in {choice.name!r}"), tuple(candidates)
    )


def _choose_by_name(wanted: str, plugins: Sequence[PlatformPlugin]) -> PlatformChoice:
    named = [plugin for plugin in plugins if plugin.name == wanted]
    if not named and all(row.name != wanted for row in BUILTIN_PLATFORMS):
        named = [plugin for plugin in find_plugins(SGLANG_PLATFORMS_GROUP) if plugin.name == wanted]
    _check_one_provider(named)
    reason = f"{PLATFORM_VARIABLE}={wanted}"
    others = _not_queried(plugins, except_for=wanted, because=f"not queried: {reason}")
    if named:
        plugin = named[0]
        class_name = plugin.activate()
        if class_name is None:
            raise PlatformError(
                f"{reason}: hardware not available: plugin {plugin} found none of its devices. "
                f"Check the driver, or unset {PLATFORM_VARIABLE}."
            )
        chosen = Candidate(plugin.name, plugin.distribution, True, reason)
        return PlatformChoice(plugin.name, _create(class_name, f"plugin {plugin}"), (chosen, *others))
    for row in BUILTIN_PLATFORMS:
        if row.name == wanted:
            absent = _detect(row)
            if absent is not None:
                raise PlatformError(
                    f"{reason}: hardware not available: {absent}. "
                    f"Check the driver, or unset {PLATFORM_VARIABLE}."
                )
            chosen = Candidate(row.name, "built-in", True, reason)
            return PlatformChoice(
                row.name, _create(row.class_name, f"built-in {row.name!r}"), (chosen, *others)
            )
    raise _unknown(wanted, reason)


def _check_one_provider(named: Sequence[PlatformPlugin]) -> None:
    if len(named) > 1:
        raise PlatformError(
            f"Several distributions provide a platform named {named[0].name!r}: "
            f"{', '.join(plugin.distribution for plugin in named)}. Uninstall all but one."
        )


def require_known(name: str) -> None:
    """Raises PlatformError unless ``name`` is a plugin, a built-in platform or ``name=pkg.mod:Cls``.

    Imports no plugin, queries no hardware.
    """
    known = {plugin.name for plugin in (*find_plugins(), *find_plugins(SGLANG_PLATFORMS_GROUP))}
    if "=" not in name and name not in known | {row.name for row in BUILTIN_PLATFORMS}:
        raise _unknown(name, f"Platform {name!r}")


def _unknown(wanted: str, reason: str) -> PlatformError:
    plugins = dict.fromkeys(map(str, [*find_plugins(), *find_plugins(SGLANG_PLATFORMS_GROUP)]))
    installed = ", ".join(plugins) or "none"
    builtin = ", ".join(row.name for row in BUILTIN_PLATFORMS)
    return PlatformError(
        f"{reason}: no platform has this name. Installed plugins: {installed}. Built-in: {builtin}. "
        f"Install the package that provides {wanted!r}, or write {PLATFORM_VARIABLE}={wanted}=pkg.mod:Cls "
        f"to use a class that is not packaged."
    )


def _choose_class(name: str, class_name: str, plugins: Sequence[PlatformPlugin]) -> PlatformChoice:
    reason = f"{PLATFORM_VARIABLE}={name}={class_name}"
    if not name or not class_name:
        raise PlatformError(f"{reason}: write {PLATFORM_VARIABLE}=name=pkg.mod:Cls, or a name alone.")
    chosen = Candidate(name, PLATFORM_VARIABLE, True, reason)
    others = _not_queried(plugins, except_for=None, because=f"not queried: {reason}")
    return PlatformChoice(name, _create(class_name, reason), (chosen, *others))


def _not_queried(
    plugins: Sequence[PlatformPlugin], *, except_for: str | None, because: str
) -> list[Candidate]:
    found = [(plugin.name, plugin.distribution) for plugin in plugins]
    found += [(row.name, "built-in") for row in BUILTIN_PLATFORMS]
    return [Candidate(name, source, False, because) for name, source in found if name != except_for]


def _detect(row: BuiltinPlatform) -> str | None:
    try:
        import torch  # noqa: F401  # not within the bound: loading it from a cold disk is slow and no fault

        reason: str | None = ask_within_bound(f"Built-in platform {row.name!r}", row.detect)
        return reason
    except (DetectionTimeoutError, ConfigError):
        raise
    except Exception as error:
        raise PlatformError(
            f"Built-in platform {row.name!r} failed while its hardware was detected: {type(error).__name__}: "
            f"{error}. Check the driver and PyTorch ({install_command('torch')}), or set "
            f"{PLATFORM_VARIABLE} to another platform."
        ) from error


def _create(class_name: str, provider: str) -> SRTPlatform:
    """Make the platform object; errors name the provider of the class."""
    try:
        cls = resolve_qualified_name(class_name)
    except PlatformError as error:
        raise type(error)(f"{error} Named by {provider}.") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PlatformError(
            f"{class_name} of {provider} failed while its module was imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    unbridged: type = getattr(cls, "platform_class", cls)
    cls = unbridged
    if not issubclass(cls, SRTPlatform):
        bases = ", ".join(base.__qualname__ for base in cls.__mro__[1:])
        raise PlatformTypeError(
            f"{class_name} of {provider} is not an sgl_aspects.platforms.SRTPlatform: it is a class with the "
            f"bases {bases}. Derive it from SRTPlatform: docs/migration.md."
        )
    try:
        platform = cls()
        identity = {name: getattr(platform, name) for name in _IDENTITY}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PlatformError(
            f"{class_name} of {provider} failed while it was created: {type(error).__name__}: {error}"
        ) from error
    for name, kind in _IDENTITY.items():
        if not isinstance(identity[name], kind):
            kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise PlatformTypeError(
                f"{class_name} of {provider}: {name} = {identity[name]!r}, and a {kinds} is needed."
            )
    if not (platform.device_name.strip() and platform.device_name.isprintable()):
        raise PlatformError(
            f"{class_name} of {provider}: device_name = {platform.device_name!r}, and a name that can be "
            f"printed is needed."
        )
    _check_methods(platform, f"{class_name} of {provider}")
    for name, right in misnamed_attributes(cls).items():
        logger.warning("%s of %s: no engine calls %s: write %s", class_name, provider, name, right)
    return platform


def _check_methods(platform: SRTPlatform, who: str) -> None:
    """Raise PlatformTypeError for a method that cannot be called with what engines pass."""
    for name, ours in inspect.getmembers(SRTPlatform, inspect.isfunction):
        theirs = inspect.getattr_static(type(platform), name)
        if theirs is ours or name.startswith("_"):
            continue
        method = getattr(platform, name)
        if not callable(method):
            raise PlatformTypeError(f"{who}: {name} = {method!r}, and a method is needed.")
        parameters = list(inspect.signature(ours).parameters.values())[1:]
        required = [each for each in parameters if each.default is each.empty]
        words = {each.name: None for each in required if each.kind is each.KEYWORD_ONLY}
        try:
            signature = inspect.signature(method)
        except ValueError:  # compiled, and without a signature
            continue
        try:
            signature.bind(*[None] * (len(required) - len(words)), **words)
        except TypeError as error:
            raise PlatformTypeError(
                f"{who}: {name}{signature} cannot be called as engines do: {error}. Write it "
                f"as {name}(self, {', '.join(map(str, parameters))})."
            ) from error


def _distribution_of(point: importlib.metadata.EntryPoint) -> str:
    dist = point.dist
    return f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution"
