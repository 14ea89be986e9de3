"""docs/conformance/README.md has the contents of the conformance kit's reports, and no more."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.conformance.report import ReportHead
from sgl_aspects.platforms import set_current_platform

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def make_hardware() -> Any:
    spec = importlib.util.spec_from_file_location("make_hardware", DOCS / "make_hardware.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_reports(make_hardware: Any) -> None:
    page = (DOCS / "conformance" / "README.md").read_text()
    assert page == make_hardware.page(), "run python docs/make_hardware.py"


def test_what_has_no_report_was_never_run(
    make_hardware: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu")
    set_current_platform(None)
    report = tmp_path / "cpu.md"
    words = ["conformance", "--platform", "cpu", "--only", "identity", "--report", str(report)]
    assert main(words) == 0
    set_current_platform(None)
    head = ReportHead.read(report)
    assert (head.platform, head.engine) == ("cpu", "embedded")
    assert head.implementation == "sgl_aspects.platforms.cpu:CpuPlatform"
    assert head.result.endswith("0 failed, 0 skipped")
    ran, never = make_hardware.page(tmp_path).split("## Never run")
    assert f"| [cpu](cpu.md) | embedded | {head.device} | {head.date} |" in ran
    assert "0 failed, 0 skipped | none |" in ran
    assert "pass  identity.family" in report.read_text()
    assert "`sgl_aspects.platforms.cuda:CudaPlatform`" in never
    assert "| cpu |" not in never


def test_a_page_that_is_not_a_report_is_named(tmp_path: Path) -> None:
    page = tmp_path / "old.md"
    page.write_text("# Conformance\n")
    with pytest.raises(ValueError, match=r"old\.md lacks platform"):
        ReportHead.read(page)
