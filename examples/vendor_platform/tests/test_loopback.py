"""The package, installed: found, chosen, and as good as its word."""

from __future__ import annotations

import pytest

from sgl_aspects.conformance import run_checks, selected_checks
from sgl_aspects.platforms import current_platform_choice


@pytest.fixture(autouse=True)
def _choose_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "loopback")


def test_it_is_found_and_chosen() -> None:
    choice = current_platform_choice()
    assert choice.platform.device_name == "loopback"
    assert choice.platform.get_device_name(1) == "Loopback L101"


def test_one_device_serves_both_engines() -> None:
    from loopback_platform.platform import LoopbackMMPlatform

    assert LoopbackMMPlatform().device_count() == current_platform_choice().platform.device_count()


@pytest.mark.parametrize("check", selected_checks(["operators", "kv_pools", "attention", "graphs", "events"]))
def test_conformance(check) -> None:  # type: ignore[no-untyped-def]
    (result,) = run_checks([check])
    assert result.status != "failed", result
