"""Tests that stop processes are skipped where the machine refuses ptrace."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from sgl_aspects.attach.ptrace import stopped
from tests.support.other_user import Shared, require_two_users, shared_folders


@pytest.fixture(scope="session")
def ptrace() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            with stopped(process.pid):
                pass
        except PermissionError as error:
            pytest.skip(f"this machine refuses ptrace: {error}")
        finally:
            process.kill()


@pytest.fixture
def interpreter() -> str:
    """A Python that root and another user can run."""
    return require_two_users()


@pytest.fixture
def folders(interpreter: str) -> Iterator[Shared]:
    with shared_folders() as found:
        yield found
