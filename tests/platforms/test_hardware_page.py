"""docs/conformance/README.md has the contents of the conformance kit's reports, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.conformance.report import ReportHead
from sgl_aspects.platforms import set_current_platform
from tests.support.pages import made_by

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_of_the_reports() -> None:
    page = (DOCS / "conformance" / "README.md").read_text()
    assert page == made_by("make_hardware").page(), "run python docs/make_hardware.py"


def test_what_has_no_report_was_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ran, never = made_by("make_hardware").page(tmp_path).split("## Never run")
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
