"""Settings of operators: from variables, then a YAML file, then the platform's file, then the defaults.

Each key of a file is also a variable, and a key set in several places is taken from the first:

    SGL_ASPECTS_OP_PREFER=vendor                       variable
    prefer: vendor      in the file that SGL_ASPECTS_OP_CONFIG names
    prefer: vendor      in the platform's own file: SRTPlatform.get_operator_config(), or of platform_files/
    default

docs/ops.md and platform_files/sample.yaml describe each key. Any error is a ConfigError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform
from sgl_aspects.platforms.answers import answer_of
from sgl_aspects.runtime.dispatch.policy import READERS, SelectionPolicy, Value
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import check_choice

PREFIX = "SGL_ASPECTS_OP_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
PLATFORM_VARIABLE = f"{PREFIX}PLATFORM"
PLATFORM_FILES = Path(__file__).parent / "platform_files"


@dataclass(frozen=True)
class Settings:
    """The checked values of all keys."""

    policy: SelectionPolicy = field(default_factory=SelectionPolicy)
    log: str | None = None
    #: Key → where it is set; without the keys that have their defaults.
    origins: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    def origin(self, key: str) -> str:
        return self.origins.get(key, "default")


def _path(value: Value) -> str:
    if not isinstance(value.value, str) or not value.value:
        raise ConfigError(f"{value.where}: {value.value!r}: write a path")
    return value.value


#: Every key, with what reads its value. The registry checks the names in it.
KEYS: dict[str, Callable[[Value], Any]] = {**READERS, "log": _path}
POLICY_KEYS = tuple(READERS)
DEFAULTS = {each.name: each.default for each in (*fields(SelectionPolicy), *fields(Settings))}
#: The value for ``--set KEY=``: the default, whatever a file sets.
USUAL = object()
#: Aliases of variables.
_VARIABLES_ONLY = ("CONFIG", "PLATFORM", "VENDOR_PATH", "ATTACH", "CONTROL")
#: The built-in file for each platform, by its device_name.
_FILE_OF_PLATFORM = {"cuda": "nvidia", "rocm": "amd", "npu": "ascend", "cpu": "cpu"}


# -- sources ------------------------------------------------------------------------------------------------


def load_settings(registry: OpRegistry, given: Mapping[str, str] | None = None) -> Settings:
    """Load from the environment and the files it names; ``given`` (from `--set`) takes precedence over all.

    :raises ConfigError: names the file or variable, the key, the value and the choices.
    """
    sources = [from_words(given or {}), from_variables()]
    files = [str(path) for path in (env.text(CONFIG_VARIABLE), find_platform_file()) if path is not None]
    settings = merged([*sources, *map(read_file, files)], registry)
    return replace(settings, files=tuple(files))


def from_words(given: Mapping[str, Any]) -> dict[str, Value]:
    """``{key: text}``; an empty text is the default.

    :raises ConfigError: an unknown key.
    """
    for key in given:
        check_choice("--set", "key", key, list(KEYS))
    return {key: Value(USUAL if value == "" else value, f"--set {key}") for key, value in given.items()}


def from_variables() -> dict[str, Value]:
    """Read the variables.

    :raises ConfigError: a variable has the prefix and is unknown.
    """
    # The prefix already contains OP: op_whitelist is SGL_ASPECTS_OP_WHITELIST.
    variables = {key: PREFIX + key.removeprefix("op_").upper() for key in KEYS}
    known = [*variables.values(), *(PREFIX + name for name in _VARIABLES_ONLY)]
    for variable in env.shortened(os.environ):
        if f"SGL_{variable}".startswith(PREFIX):
            check_choice("environment", "variable", f"SGL_{variable}", known)
    said = {key: (env.text(variable), variable) for key, variable in variables.items()}
    return {key: Value(text, variable) for key, (text, variable) in said.items() if text is not None}


def read_file(path: str | Path) -> dict[str, Value]:
    """Read a file.

    :raises ConfigError: missing, not YAML, not a mapping, or with an unknown key.
    """
    import yaml

    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"operator configuration {path} cannot be read ({error}): name a YAML file that exists"
        ) from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"operator configuration {path} is not YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"operator configuration {path} holds a {type(document).__name__}: write 'key: value' lines with "
            f"the keys {', '.join(KEYS)}"
        )
    for key in document:
        check_choice(str(path), "key", key, list(KEYS))
    return {key: Value(value, f"{path}: {key}") for key, value in document.items()}


def find_platform_file() -> Path | None:
    """Return the platform's own file; else the built-in one of its name or SGL_ASPECTS_OP_PLATFORM."""
    wanted = env.text(PLATFORM_VARIABLE)
    if wanted is not None:
        check_choice(
            PLATFORM_VARIABLE, "platform file", wanted, [*sorted(_FILE_OF_PLATFORM.values()), "none"]
        )
    else:
        own = answer_of((str, os.PathLike, type(None)), current_platform.get_operator_config)
        if own is not None:
            return Path(own)
        wanted = _FILE_OF_PLATFORM.get(current_platform.device_name, "none")
    return None if wanted == "none" else PLATFORM_FILES / f"{wanted}.yaml"


def merged(sources: list[dict[str, Value]], registry: OpRegistry, base: Settings | None = None) -> Settings:
    """Merge: each key from the first source that sets it, else from ``base``; all are checked."""
    base = base or Settings()
    values: dict[str, Any] = {}
    first: dict[str, Value] = {}
    rank: dict[str, int] = {}
    for number, source in enumerate(sources):
        for key, value in source.items():
            checked = DEFAULTS[key] if value.value is USUAL else KEYS[key](value)
            registry.check_names(key, checked, value.where)
            if key not in values:
                values[key], first[key], rank[key] = checked, value, number
    # A list in one source replaces a later source's other list; in one source they exclude each other.
    other = {"op_whitelist": "op_blacklist", "op_blacklist": "op_whitelist"}
    lists = [key for key in other if key in values and values[key] != DEFAULTS[key]]
    if len({rank[key] for key in lists}) < len(lists):
        both = " and ".join(f"{first[key].where}: {first[key].value!r}" for key in lists)
        raise ConfigError(f"{both} exclude each other: keep one")
    if lists:
        replaced = other[min(lists, key=rank.__getitem__)]
        values[replaced] = DEFAULTS[replaced]
        first.pop(replaced, None)
    policy = replace(base.policy, **{key: values.pop(key) for key in POLICY_KEYS if key in values})
    origins = {**base.origins, **{key: value.where for key, value in first.items()}}
    return replace(base, policy=policy, origins=origins, **values)
