"""The definition of a check: it tests one promise, and names the method to write if the promise is broken."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from sgl_aspects.platforms import SRTPlatform

F = TypeVar("F", bound=Callable[..., str])
T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """The environment of the checks."""

    platform: SRTPlatform
    #: ``platform.get_device(0)``.
    device: torch.device
    #: A folder for files, until the end of the run.
    folder: Path
    #: The reference of generated texts: "transformers" or "float64".
    reference: str = "float64"


class BrokenPromiseError(Exception):
    """Raised by a check that fails. ``write``: the method to look at, if not the check's."""

    def __init__(self, expected: str, found: str, write: str) -> None:
        super().__init__(f"expected {expected}; found {found}")
        self.expected, self.found, self.write = expected, found, write


class NotApplicableError(Exception):
    """Raised by a check of something that the platform does not declare, with its name."""


def if_declared(question: Callable[[], T], otherwise: str = "not declared", *, needed: bool = False) -> T:
    """Return a platform's answer. Where it has none the check is skipped, or fails if it is ``needed``."""
    try:
        return question()
    except NotImplementedError as error:
        if needed:
            raise
        raise NotApplicableError(otherwise) from error


@dataclass(frozen=True)
class Check:
    """One row of the table. ``run`` returns its finding in a few words."""

    name: str
    #: The method for a vendor to look at first if the check fails.
    write: str
    #: The promise, in a few words.
    expects: str
    run: Callable[[Any], str]

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Result:
    """The result of a check."""

    name: str
    #: "passed", "failed" or "skipped".
    status: str
    #: The finding; for a skipped check the reason.
    detail: str
    seconds: float
    #: For a failure: the method to write, and its expected behaviour.
    write: str = ""
    expected: str = ""


#: In the order in which their modules are imported.
CHECKS: list[Check] = []


def check(*, write: str, expects: str, name: str = "") -> Callable[[F], F]:
    """Add the function to the table of checks, by its own name. It is called with a Bench alone."""

    def add(function: F) -> F:
        group = function.__module__.rpartition(".")[2]
        CHECKS.append(Check(f"{group}.{name or function.__name__}", write, expects, function))
        return function

    return add


def require(condition: bool, expected: str, found: object, write: str = "") -> None:
    """Fail the check if ``condition`` is False; ``write``: the method to write, if not the check's."""
    if not condition:
        raise BrokenPromiseError(expected, str(found), write)


def run_check(check: Check, bench: Bench | None) -> Result:
    """Run a check; an exception is its result, and the next check runs."""
    start = time.perf_counter()

    def result(status: str, detail: str, write: str = "", expected: str = "") -> Result:
        return Result(check.name, status, detail, time.perf_counter() - start, write, expected)

    try:
        return result("passed", check.run(bench))
    except NotApplicableError as reason:
        return result("skipped", str(reason))
    except BrokenPromiseError as fault:
        return result("failed", fault.found, fault.write or check.write, fault.expected)
    except NotImplementedError as error:
        return result("failed", str(error) or "NotImplementedError", check.write, check.expects)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # SystemExit, too: reported as the check's result
        return result("failed", described(error), check.write, check.expects)


def described(error: BaseException) -> str:
    """Return the error, with the line that raised it."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(line.filename).name}:{line.lineno})"
