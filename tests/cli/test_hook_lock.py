"""`sgl-aspects hooks lock` and `lint`: which hooks another version of a package breaks, from source alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.distributions import install_plugin, wheel
from tests.support.processes import command, error_of, output_of
from tests.support.tree import ROOT

FIRST = '''
"""A shop."""
class Base:
    def inherited(self): return 1
class Shop(Base):
    def same(self, item): return item
    def body(self, item): return item
    def parameter(self, item): return item
    def optional(self, item): return item
    def moved(self, item): return item
    def gone(self, item): return item
async def waits(): ...
def replaced(item): return item
raise_if_imported = None
'''
SECOND = '''
raise SystemExit("this was run")
class Base:
    def inherited(self): return 1
class Shop(Base):
    def same(self, item: "annotated") -> int:
        """Say it in other words, with comments."""
        return item  # as before
    def body(self, item): return item + 1
    def parameter(self, discount, item): return item
    def optional(self, item, *, discount=0): return item
def waits(): ...
def replaced(item): return item + 1
'''
STORE = "class Shop:\n    def moved(self, item): return item\n"
PLUGIN = """
from sgl_aspects import HookRegistry, HookType
def watch(original_fn, *args, **kwargs): return original_fn(*args, **kwargs)
def other(item): return item
def activate():
    for name in ("same", "body", "parameter", "optional", "moved", "gone", "inherited"):
        HookRegistry.register(f"market.shop:Shop.{name}", watch, HookType.AROUND)
    HookRegistry.register("market.shop.waits", watch, HookType.AROUND)
    HookRegistry.register("market.shop:replaced", other, HookType.REPLACE)
    HookRegistry.register("market.old:f | market.shop:Shop.same", watch, HookType.BEFORE)
    HookRegistry.register("market.**:*Shop.b*", watch, HookType.AFTER)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed package, a plugin that hooks it, its lock file, and a wheel of the next version."""
    folder = tmp_path_factory.mktemp("lock")
    (folder / "site" / "market").mkdir(parents=True)
    (folder / "site" / "market" / "__init__.py").write_text("")
    (folder / "site" / "market" / "shop.py").write_text(FIRST)
    install_plugin(folder / "site", "watcher", PLUGIN)
    modules = {"market/__init__.py": "", "market/shop.py": SECOND, "market/store.py": STORE}
    wheel(folder, "market-2.0-py3-none-any.whl", modules)
    assert output_of(hooks(folder, "lock")) == "hooks.lock: 11 hooks at 11 places\n"
    assert (folder / "hooks.lock").read_text().endswith("}\n")
    return folder


def hooks(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder / "site"), str(ROOT)])
    return command("hooks", *words, cwd=folder, PYTHONPATH=paths)


def test_every_kind_of_change_is_told_apart(folder: Path) -> None:
    done = hooks(folder, "lint", "--against", "market-2.0-py3-none-any.whl", "--json")
    assert done.returncode == 1, done.stderr
    found = {(one["place"], one["change"], one["fails"]) for one in json.loads(done.stdout)["2.0"]}
    assert found == {
        ("market.shop:Shop.same", "unchanged", False),
        ("market.shop:Shop.inherited", "unchanged", False),
        ("market.shop:Shop.body", "body changed", False),
        ("market.shop:Shop.parameter", "signature changed", True),
        ("market.shop:Shop.optional", "optional parameters added", False),
        ("market.shop:Shop.moved", "moved", True),
        ("market.shop:Shop.gone", "gone", True),
        ("market.shop.waits", "signature changed", True),
        ("market.shop:replaced", "body changed", True),
    }


def test_the_text_says_what_is_to_do(folder: Path) -> None:
    printed = hooks(folder, "lint", "--against", "market-2.0-py3-none-any.whl").stdout
    counts = "3 unchanged, 3 body changed, 1 optional parameters added, 2 signature changed, 1 moved, 1 gone"
    assert printed.startswith(f"2.0: {counts}\n")
    assert "! signature changed         market.shop:Shop.parameter  <- watcher.watch\n" in printed
    assert "    (self, item) -> (self, discount, item)\n" in printed
    assert "    to market.store:Shop.moved\n" in printed


def test_the_same_version_has_no_finding(folder: Path) -> None:
    assert output_of(hooks(folder, "lint", "--against", "site")) == "site: 11 unchanged\n"


def test_two_replacements_of_one_function_are_in_conflict(folder: Path) -> None:
    content = json.loads((folder / "hooks.lock").read_text())
    (one,) = [hook for hook in content["hooks"] if hook["target"] == "market.shop:replaced"]
    content["hooks"] = [one, {**one, "hook": "another.plugin"}]
    (folder / "two.lock").write_text(json.dumps(content))
    done = hooks(folder, "lint", "--lock", "two.lock", "--against", "site")
    assert done.returncode == 1
    assert "! in conflict               market.shop:replaced  <- another.plugin\n" in done.stdout
    assert "    watcher.other replaces it, too\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("lint",), "name wheels or folders with --against"),
        (("lint", "--lock", "gone.lock", "--against", "site"), "gone.lock is not there"),
        (
            ("lint", "--lock", "site/watcher.py", "--against", "site"),
            "was not written by sgl-aspects hooks lock",
        ),
        (("lint", "--against", "gone.whl"), "neither a wheel nor a folder"),
    ],
)
def test_mistakes_are_named(folder: Path, words: tuple[str, ...], error: str) -> None:
    assert error in error_of(hooks(folder, *words))
