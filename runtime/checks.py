"""Type checks of settings: True and False are not numbers."""

from __future__ import annotations

from typing import TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_seed(value: object) -> bool:
    """The range of torch's seeds: 64 bits, with a sign or without."""
    return is_integer(value) and -(2**63) <= value < 2**64


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
