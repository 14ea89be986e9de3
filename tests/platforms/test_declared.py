"""What the built-in platforms declare: nothing that has not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sgl_aspects.conformance import selected_checks
from sgl_aspects.conformance.check import Bench, run_check
from sgl_aspects.platforms import PlatformCapabilities, SRTPlatform
from sgl_aspects.platforms.builtins import BUILTIN_PLATFORMS, BuiltinPlatform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.platforms.device_mixin import DeviceMixin
from sgl_aspects.platforms.discovery import resolve_qualified_name

RUN = {"cuda", "cpu"}


@pytest.mark.parametrize(
    "row", [row for row in BUILTIN_PLATFORMS if row.name not in RUN], ids=lambda row: row.name
)
def test_a_device_that_nobody_has_run_declares_nothing(row: BuiltinPlatform) -> None:
    platform: SRTPlatform = resolve_qualified_name(row.class_name)()
    assert platform.capabilities == PlatformCapabilities()
    assert platform.get_default_attention_backend() == "torch_native"
    with pytest.raises(NotImplementedError):
        platform.get_graph_runner_cls()


class WithoutEvents(CpuPlatform):
    """As a TPU: work is done when a result is needed, and there are no events."""

    create_event = DeviceMixin.create_event


class QueuesWithoutEvents(WithoutEvents):
    def is_asynchronous(self) -> bool:
        return True


def outcome(platform: SRTPlatform, folder: Path) -> dict[str, str]:
    bench = Bench(platform, torch.device("cpu"), folder)
    return {check.name: run_check(check, bench).status for check in selected_checks(["events"])}


def test_a_synchronous_device_needs_no_events(tmp_path: Path) -> None:
    assert set(outcome(WithoutEvents(), tmp_path).values()) == {"skipped"}
    assert set(outcome(QueuesWithoutEvents(), tmp_path).values()) == {"failed"}
    bench = Bench(WithoutEvents(), torch.device("cpu"), tmp_path)
    result = run_check(selected_checks(["events.elapsed"])[0], bench)
    assert "no device time" in result.detail
