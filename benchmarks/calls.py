"""The cost of a call through no-op hooks: this package against SGLang's registry, wrapt, and a closure.

Each subject hooks the same function in the same process; rounds are interleaved, and a ratio is of two times
of the same round, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import sys
import timeit
import types
from collections.abc import Callable
from typing import Any

import sgl_aspects as aspects
from benchmarks import peers

SOURCE = """
def none():
    return None

def five(a, b, c, *, d=1, e=2):
    return None

def optional(a=0, b=0, c=0, *, d=0, e=0):
    return None

class C:
    def none(self):
        return None
    def five(self, a, b, c, *, d=1, e=2):
        return None
    def optional(self, a=0, b=0, c=0, *, d=0, e=0):
        return None
    @classmethod
    def made(cls):
        return None
    @staticmethod
    def static():
        return None

c = C()
"""

CALLS = {
    "no argument": ("none", "m.none()"),
    "3 positional + 2 keyword": ("five", "m.five(1, 2, 3, d=4, e=5)"),
    "optional, none of 3 + 2": ("optional", "m.optional()"),
    "optional, 3 + 2": ("optional", "m.optional(1, 2, 3, d=4, e=5)"),
    "method, no argument": ("C.none", "m.c.none()"),
    "method, 3 + 2": ("C.five", "m.c.five(1, 2, 3, d=4, e=5)"),
    "method, optional, none of 3 + 2": ("C.optional", "m.c.optional()"),
    "method, optional, 3 + 2": ("C.optional", "m.c.optional(1, 2, 3, d=4, e=5)"),
    "classmethod": ("C.made", "m.C.made()"),
    "staticmethod": ("C.static", "m.C.static()"),
}
DEPTHS = (1, 2, 4)
ROUNDS, NUMBER = 60, 5_000


class Nothing:
    """The observer that does nothing."""

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return None

    def exit(self, token: None, result: Any, error: BaseException | None) -> None:
        return None


def _ours(hook_type: aspects.HookType, make: Callable[[], Any]) -> Callable[[str, str, int], None]:
    def hook(module: str, target: str, depth: int) -> None:
        parsed = aspects.Target.parse(f"{module}:{target}")
        aspects.weave(*(aspects.Advice(parsed, hook_type, make()) for _ in range(depth)))

    return hook


SUBJECTS: dict[str, Callable[[str, str, int], None] | None] = {
    "bare": lambda module, target, depth: None,
    "SGLang's registry": peers.sglang_hook,
    "ours, AROUND": _ours(aspects.HookType.AROUND, lambda: lambda original, *a, **k: original(*a, **k)),
    "ours, native": _ours(aspects.HookType.NATIVE, lambda: lambda proceed, a, k: proceed(a, k)),
    "ours, observer": _ours(aspects.HookType.OBSERVE, Nothing),
    "closure by hand": peers.closure_hook,
    "wrapt": peers.wrapt_hook,
}

Rounds = dict[tuple[str, str, int], list[float]]
"""Nanoseconds a call in each round, by (subject, call, depth)."""


def measure() -> Rounds:
    """Time all subjects in turn, round after round."""
    timers: dict[tuple[str, str, int], timeit.Timer] = {}
    for subject, hook in ((name, hook) for name, hook in SUBJECTS.items() if hook is not None):
        for call, (target, statement) in CALLS.items():
            for depth in DEPTHS:
                name = f"bench_{len(timers)}"
                module = types.ModuleType(name)
                sys.modules[name] = module
                exec(SOURCE, module.__dict__)
                hook(name, target, depth)
                timers[subject, call, depth] = timeit.Timer(statement, globals={"m": module})
    rounds: Rounds = {key: [] for key in timers}
    for _ in range(ROUNDS):
        for key, timer in timers.items():
            rounds[key].append(timer.timeit(NUMBER) / NUMBER * 1e9)
    return rounds


def ratios(rounds: Rounds, subject: str, base: str, call: str, depth: int) -> list[float]:
    """One subject's times by another's, round by round."""
    return [mine / its for mine, its in zip(rounds[subject, call, depth], rounds[base, call, depth])]
