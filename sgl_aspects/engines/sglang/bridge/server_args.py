"""SGLang's settings as ``apply_server_args_defaults`` of a platform gets them: what the user set stays."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import Any

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms.answers import answer_of, name_of

logger = logging.getLogger("sgl_aspects")


def apply_defaults(platform: Any, server_args: Any) -> set[str]:
    """Let the platform set fields that the user left open; return the names of these.

    :raises ConfigError: it sets one that the user gave another value.
    """
    open_fields = _open_fields(server_args)
    method = platform.apply_server_args_defaults
    answer_of(object, method, _Settings(server_args, open_fields, platform.device_name, name_of(method)))
    return open_fields


class _Settings:
    """Reads and sets fields of SGLang's object, and has ``open_fields`` besides, as the embedded engine's."""

    def __init__(self, server_args: Any, open_fields: set[str], device: str, method: str) -> None:
        vars(self).update(open_fields=open_fields, _args=server_args, _whose=(device, method))

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_args"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        device, method = self._whose
        given = getattr(self._args, "_raw_input", {})
        if name in given and name not in self.open_fields and given[name] != value:
            raise ConfigError(
                f"{name}={given[name]!r}: platform {device!r} sets {name}={value!r} ({method}): leave "
                f"--{name.replace('_', '-')} out, or give that"
            )
        if not hasattr(self._args, name):
            logger.warning("platform %r set %r, which SGLang's ServerArgs does not have", device, name)
        setattr(self._args, name, value)


def _open_fields(server_args: Any) -> set[str]:
    """Return the fields that have their default: SGLang does not tell whether a user wrote it.

    Older versions do not keep what the user gave: a field that they have decided themselves is not open.
    """
    cls: Any = importlib.import_module("sglang.srt.server_args").ServerArgs
    if dataclasses.is_dataclass(cls):
        fields: Any = dataclasses.fields(cls)
    else:
        fields = importlib.import_module("msgspec.structs").fields(cls)
    given = getattr(server_args, "_raw_input", None)
    if given is None:
        # On CPUs they have chosen an attention backend.
        given = {each.name: getattr(server_args, each.name) for each in fields} | {"attention_backend": None}
    return {each.name for each in fields if _is_default(each, given.get(each.name))}


def _is_default(field: Any, value: Any) -> bool:
    try:
        return bool(value == field.default or value == field.default_factory())
    except TypeError:  # there is no factory
        return False
