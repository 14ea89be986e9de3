"""Checks of settings: True and False are not numbers."""

from __future__ import annotations

import reprlib
from typing import TypeGuard

from sgl_aspects.errors import AspectsError


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_seed(value: object) -> bool:
    """The range of torch's seeds: 64 bits, with a sign or without."""
    return is_integer(value) and -(2**63) <= value < 2**64


def check_integer(
    error: type[AspectsError], settings: object, name: str, least: int, most: int | None = None
) -> None:
    """Raise ``error`` if a setting is not a whole number in this range."""
    value = getattr(settings, name)
    if not is_integer(value) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name}={reprlib.repr(value)}: write a whole number {limits}")


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
