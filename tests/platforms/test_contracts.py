"""Contracts are those of the code; a package written from the text of docs/platforms.md passes the kit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from loopback_platform.platform import LoopbackPlatform

from sgl_aspects.conformance import run_checks, selected_checks
from sgl_aspects.platforms import set_current_platform
from tests.support.page_package import PAGE, write_package
from tests.support.pages import made_by
from tests.support.processes import command, output_of

ROOT = PAGE.parents[1]


def test_the_tables_are_made_of_the_code() -> None:
    module = made_by("make_contracts")
    assert module.PAGE.read_text() == module.page(), "run python docs/make_contracts.py"


@pytest.mark.slow
def test_a_package_written_from_the_page_passes_the_kit(tmp_path: Path) -> None:
    write_package(tmp_path / "site")
    words = ["--json", str(tmp_path / "found.json"), "--only"]
    only = "identity,operations,operators,kv_pools,attention,capabilities,generation"
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    done = command("conformance", *words, only, seconds=280, PYTHONPATH=path, SGLANG_PLATFORM="acme")
    output_of(done)
    found = {each["name"]: each for each in json.loads((tmp_path / "found.json").read_text())["results"]}
    assert found["capabilities.quantized"]["detail"] == "acme4"
    assert "AcmePool, AcmeAllocator, AcmeAttention" in found["identity.classes"]["detail"]
    assert found["generation.greedy"]["status"] == "passed"


@pytest.mark.slow
def test_a_graph_runner_written_from_the_page_is_used_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (PAGE.parent / "contracts" / "README.md").read_text()
    (source,) = re.findall(r"```python\n(from functools.*?)```", page, re.DOTALL)
    written: dict[str, Any] = {}
    exec(source, written)

    class Written(LoopbackPlatform):
        def get_graph_runner_cls(self) -> Any:
            return written["AcmeGraphRunner"]

    set_current_platform(Written())
    found = {result.name: result for result in run_checks(selected_checks(["graphs"]))}
    set_current_platform(None)
    assert {result.status for result in found.values()} == {"passed"}, found
    assert "replays of batches of 1, 2, 3" in found["graphs.decode_steps"].detail
