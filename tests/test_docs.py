"""The docs: short lines, links that lead somewhere, code that is code, commands that exist and run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_aspects.cli.main import COMMANDS
from tests.support.pages import blocks, run_script
from tests.support.tree import ROOT

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks" / "results").glob("*.md"),
    ]
)
LONGEST_LINE = 140
# Pages whose shell blocks are run, all of a page in one shell.
RUN = ("quickstart.md", "operating.md")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.strip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def anchors(page: Path) -> set[str]:
    headings = [line.lstrip("#").strip() for _, line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    """But rows of a table, which cannot be broken."""
    faults = [
        f"{page}:{number}: {len(line)} characters"
        for number, line in prose(page)
        if len(line) > LONGEST_LINE and not line.startswith("|")
    ]
    faults += [
        f"{page}:{block.line}: code of {len(line)} characters"
        for block in blocks(page)
        for line in block.text.splitlines()
        if len(line) > LONGEST_LINE
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    faults = []
    for number, line in prose(page):
        links = re.findall(r"\]\(([^)\s]+)\)", line) + re.findall(r'(?:src|srcset|href)="([^"]+)"', line)
        for link in links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                assert link.startswith("https://"), f"{page}:{number}: {link}"
                continue
            target = page if not path else (page.parent / path).resolve()
            if not target.exists() or (anchor and anchor not in anchors(target)):
                faults.append(f"{page}:{number}: {link}")
    assert not faults, "\n".join(faults)


def test_every_page_is_linked_from_another() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for page in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"\]\((docs/)?{re.escape(page.name)}(#[a-z-]+)?\)", text), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_is_python(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{page}:{block.line}", "exec")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of ours in a block, and those in the text that have an option."""
    for page in PAGES:
        for block in blocks(page):
            if block.language not in ("", "bash", "sh"):
                continue
            for number, line in enumerate(block.text.replace("\\\n", " ").splitlines(), block.line):
                for part in re.split(r"[;&|]|(?<!\S)-- ", line.split("#")[0]):
                    if part.strip().startswith("sgl-aspects "):
                        yield f"{page}:{number}", shlex.split(part.replace("[", " ").replace("]", " "))
        for number, line in prose(page):
            for text in re.findall(r"`(sgl-aspects [a-z-]+(?: [^`]*)?)`", line):
                yield f"{page}:{number}", shlex.split(text.split(" -- ")[0])


def test_every_command_has_the_flags_that_it_is_shown_with() -> None:
    assert len(list(commands())) > 20
    modules = {command.name: command.module for command in COMMANDS}
    faults = []
    for where, words in commands():
        if len(words) < 2 or words[1].isupper():
            continue
        if words[1] not in modules:
            faults.append(f"{where}: there is no sgl-aspects {words[1]}")
            continue
        parser = argparse.ArgumentParser()
        importlib.import_module(modules[words[1]]).add_arguments(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        options = {word.split("=")[0] for word in words[2:] if word.startswith("-")} - {"--"}
        faults += [f"{where}: sgl-aspects {words[1]} has no {option}" for option in options - known]
    assert not faults, "\n".join(faults)


def test_the_migration_guide_runs(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "docs" / "migration.md") if block.language == "python"]
    subprocess.run([sys.executable, "-c", block.text], cwd=tmp_path, timeout=60, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_every_command_of_a_guide_runs(name: str, tmp_path: Path) -> None:
    """As printed, one after the other, on a machine that has the package, a model, and the port 8000 free."""
    from tests.support.tiny_models import make_llama

    make_llama(tmp_path / "model")
    script = "".join(block.text for block in blocks(ROOT / "docs" / name) if block.language == "bash")
    assert script.count("\n") > 10
    done = run_script(script, tmp_path, MODEL=str(tmp_path / "model"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(
        r"^report\.html: [1-9]\d* requests?,|^requests\.html: 3 requests", done.stdout, re.MULTILINE
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
