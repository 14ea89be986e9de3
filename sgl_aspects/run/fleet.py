"""Levels for a fleet: rules in a file or at an HTTP address, which collectors read every two seconds.

    {"rules": [{"service": "mini-*", "host": "node-1*", "role": "decode", "level": 2, "sample": 0.1},
               {"level": 1}]}

The first rule that fits a run says its level and its share of requests; what a rule leaves out stays as it
is. Whoever can write the file, or answers at the address, decides: a file must belong to the run's user or to
root, and nobody else may write it. Engines read neither: their collectors write the control blocks of their
rings.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import stat
import struct
import threading
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.client import HTTPException
from pathlib import Path
from typing import Any

from sgl_aspects.errors import ConfigError
from sgl_aspects.run.control import read_control, run_control, write_control, write_run_control

VARIABLE = "SGL_ASPECTS_CONTROL_FROM"
#: Attributes of a run that rules select by, with `*` and `?` as wildcards.
SELECTORS = ("service", "host", "role")
_SECONDS = 2.0
_PATIENCE_SECONDS = 10.0
_LONGEST = 1 << 20  # bytes of rules
_MOST_RULES, _LONGEST_PATTERN = 1000, 256  # all are matched every two seconds


@dataclass(frozen=True)
class Rule:
    """What runs that fit the patterns record. ``level`` and ``sample``: None leaves it as it is."""

    patterns: Mapping[str, str]
    level: int | None
    sample: float | None

    def fits(self, attributes: Mapping[str, str]) -> bool:
        """Return whether every pattern matches; an attribute that the run does not have is empty."""
        return all(fnmatchcase(attributes.get(name, ""), pattern) for name, pattern in self.patterns.items())


def parse(text: bytes) -> list[Rule]:
    """Read the rules; raises ``ConfigError`` that names the rule and what is wrong with it."""
    try:
        rules = json.loads(text)["rules"]
        found = [_rule(number, one) for number, one in enumerate(rules, 1)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f'not rules: write {{"rules": [{{"level": 1}}]}} ({error})') from error
    if len(found) > _MOST_RULES:
        raise ConfigError(f"{len(found)} rules: write at most {_MOST_RULES}, with * for any characters")
    return found


def _rule(number: int, one: Any) -> Rule:
    if not isinstance(one, dict) or (unknown := set(one) - {*SELECTORS, "level", "sample"}):
        what = f"unknown {', '.join(sorted(unknown))}" if isinstance(one, dict) else "not an object"
        raise ConfigError(f"rule {number}: {what}; choose from {', '.join(SELECTORS)}, level, sample")
    level, sample = one.get("level"), one.get("sample")
    if not (level is None or (type(level) is int and 0 <= level <= 4)):
        raise ConfigError(f"rule {number}: level {level!r}: choose 0 (off) to 4")
    if not (sample is None or (type(sample) in (int, float) and 0 <= sample <= 1)):
        raise ConfigError(f"rule {number}: sample {sample!r}: write a number from 0 to 1")
    patterns = {name: one[name] for name in SELECTORS if name in one}
    for name, pattern in patterns.items():
        if not isinstance(pattern, str) or len(pattern) > _LONGEST_PATTERN:
            raise ConfigError(
                f"rule {number}: {name} {repr(pattern)[:_LONGEST_PATTERN]}: write a text of at most "
                f"{_LONGEST_PATTERN} characters, with * for any characters"
            )
    return Rule(patterns, level, sample)


class FleetControl:
    """Applies the rules at ``source`` to the run in ``folder``, in threads of its own, until it is closed.

    :param attributes: returns the run's service, host and role.
    :param report: called with each problem once; the earlier rules stay in force.
    """

    def __init__(
        self,
        folder: str,
        source: str,
        attributes: Callable[[], Mapping[str, str]],
        report: Callable[[str], None],
    ) -> None:
        self._folder, self._source = Path(folder), source
        self._attributes, self._report = attributes, report
        self._rules: list[Rule] = []
        self._problem = ""
        self._ended = threading.Event()
        self._answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        for work in (self._ask, self._follow):
            threading.Thread(target=work, name="sgl-aspects-fleet", daemon=True).start()

    def close(self) -> None:
        """Stop; does not wait for an answer under way."""
        self._ended.set()

    def _ask(self) -> None:
        """Read the source again and again, however long it takes to answer."""
        while True:
            try:
                self._answers.put(_contents(self._source))
            except (OSError, ValueError, HTTPException) as error:  # ConfigError is a ValueError
                self._answers.put(error)
            if self._ended.wait(_SECONDS):
                return

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                answer = self._answers.get(timeout=_PATIENCE_SECONDS)
                if isinstance(answer, Exception):
                    raise answer
                self._rules = parse(answer)
                self._problem = ""
            except queue.Empty:
                self._tell(f"no whole answer within {_PATIENCE_SECONDS:g} s")
            except (OSError, ValueError, HTTPException) as error:
                self._tell(str(error))
            self._apply()

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._report(f"{VARIABLE}={self._source}: {problem}; what is recorded stays as it is")

    def _apply(self) -> None:
        attributes = self._attributes()
        rule = next((one for one in self._rules if one.fits(attributes)), None)
        if rule is None:
            return
        known = later = run_control(str(self._folder))
        for ring in self._folder.glob("*.ring"):
            with contextlib.suppress(OSError, struct.error):  # it has just ended, or its ring is damaged
                control = read_control(ring)
                later = later or control
                wanted = control.changed(level=rule.level, sample=rule.sample)
                if wanted.words != control.words:
                    write_control(ring, wanted)
        if later is not None:
            later = later.changed(level=rule.level, sample=rule.sample)
            if known is None or known.words != later.words:
                with contextlib.suppress(OSError):
                    write_run_control(self._folder, later)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another address than the one that the user named is not asked."""

    def redirect_request(self, *_: Any) -> None:
        return None


opener = urllib.request.build_opener(_NoRedirects)


def _contents(source: str) -> bytes:
    if source.startswith(("http://", "https://")):
        with opener.open(source, timeout=_SECONDS) as answer:
            text: bytes = answer.read(_LONGEST + 1)
    else:
        with open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError("not a file")
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise ConfigError("others than this user and root may write it: chown and chmod go-w it")
            text = file.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        raise ConfigError(f"longer than {_LONGEST} bytes")
    return text
