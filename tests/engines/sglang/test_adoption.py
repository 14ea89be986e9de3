"""Hooks that plugins register with SGLang's registry are woven; the registry's answers are unchanged."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import output_of, python

pytest.importorskip("sglang")

from sgl_aspects import env

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]


def run_python(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return python("-W", "ignore", *words, without=("SGL", "ASPECTS_", "OTEL_"), **settings)


def answer_of(*words: str, **settings: str) -> Any:
    printed = output_of(run_python(*words, **settings))
    return json.loads(printed.splitlines()[-1])


@lru_cache(maxsize=3)
def answers(how: str) -> dict[str, Any]:
    cases = "tests.support.sglang_registry_cases"
    program = f"import runpy, tests.support.sglang_api; runpy.run_module('{cases}', run_name='__main__')"
    words = ("-c", program) if how == "api" else ("-m", cases)
    found: dict[str, Any] = answer_of(*words, how)
    return found


# Its target is decorated: code that calls `__wrapped__` to get round the decorator still does.
OWN_WRAPPED = "a_hooked_function_looks_like_its_target"


def test_the_registry_answers_as_it_does_alone() -> None:
    alone, adopted = answers("alone"), answers("adopted")
    different = {name: (alone[name], adopted[name]) for name in alone if alone[name] != adopted[name]}
    assert different.keys() == {OWN_WRAPPED}
    assert len(alone) > 40
    raised = [name for name, found in alone.items() if str(found["answer"]).startswith("raises")]
    assert raised == []  # nothing is equal only because both are broken


# What differs through our names: the words of docs/migration.md's row, by case.
DIFFERENT_CASES = {
    OWN_WRAPPED: "it stays the undecorated one",
    "a_late_hook_on_a_patched_target_is_not_applied": "hooks stack",
    "hooks_of_a_target_are_applied_together_or_not_at_all": "each hook for itself",
    "reset_forgets_and_leaves_what_is_in_place": "give the original objects back",
    "hooks_after_a_reset_come_on_top": "give the original objects back",
    "a_class_is_a_replace_hook_only": "when it is registered",
    "a_type_that_is_none": "when it is registered",
    "odd_targets_leave_the_others_alone": "when it is registered",
    "a_second_registry_has_hooks_of_its_own": "one registry a process",
}


def test_our_registry_answers_like_sglangs_except_for_the_table() -> None:
    alone, ours = answers("alone"), answers("api")
    assert {name for name in alone if alone[name]["answer"] != ours[name]["answer"]} == DIFFERENT_CASES.keys()
    table = (ROOT / "docs/migration.md").read_text()
    assert [words for words in DIFFERENT_CASES.values() if words not in table] == []


ADOPTION = """
import json, logging, sys
from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
import sgl_aspects as aspects

def around(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs)

late, known, missing = (
    "sglang.srt.layers.rotary_embedding.factory.get_rope",
    "sglang.srt.plugins._get_excluded_dists",
    "sglang.srt.environ.nothing",
)
source = HookSource("neighbour", "neighbour-dist")
for target in (late, known, missing):
    HookRegistry.register(target, around, HookType.AROUND, source=source)
before = set(sys.modules)
plugins.load_plugins()
answer = {
    "patched": sorted(HookRegistry._patched),
    "registered": sorted(HookRegistry._hooks),
    "states": {hook.target: hook.state.value for hook in aspects.report().hooks},
    "sources": [list(hook.source) for hook in aspects.report().hooks],
    "imported": [name for name in set(sys.modules) - before if name.startswith("sglang")],
}
aspects.HookRegistry.reset()
answer["after our reset"] = [len(aspects.report().hooks), hasattr(plugins._get_excluded_dists, "__wrapped__")]
print(json.dumps(answer, default=list))
"""
LATE = "sglang.srt.layers.rotary_embedding.factory.get_rope"
KNOWN = "sglang.srt.plugins._get_excluded_dists"
MISSING = "sglang.srt.environ.nothing"


def test_hooks_of_other_plugins_are_woven_by_ours_without_an_import() -> None:
    answer = answer_of("-c", ADOPTION)
    assert answer["patched"] == [LATE, KNOWN]  # the first one as soon as its module is there
    assert answer["registered"] == sorted([LATE, KNOWN, MISSING])
    assert answer["states"] == {LATE: "pending", KNOWN: "woven", MISSING: "missing"}
    assert answer["sources"] == [["neighbour", "neighbour-dist"]] * 3
    assert answer["imported"] == []
    assert answer["after our reset"] == [0, False]


def test_adoption_can_be_declined() -> None:
    answer = answer_of("-c", ADOPTION, SGL_ASPECTS_ADOPT="0")
    assert answer["states"] == {}
    assert len(answer["patched"]) == 2
    assert answer["imported"]


# SGLang's registry after 0.5.23 can be queried for one hook.
QUERY = """
import json, sys, types
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
import sgl_aspects

if not hasattr(HookRegistry, "is_hook_applied"):
    HookRegistry.is_hook_applied = classmethod(lambda cls, target, hook, hook_type=HookType.AFTER: False)
sgl_aspects.load_plugins()
module = sys.modules["module_to_ask"] = types.ModuleType("module_to_ask")
module.f = lambda x: x
first, late = (lambda result, x: result + 1), (lambda result, x: result + 9)
asked, answers = HookRegistry.is_hook_applied, []
def ask(target="module_to_ask.f"):
    answers.append([asked(target, first), asked(target, late), asked(target, first, HookType.BEFORE)])
ask()
HookRegistry.register("module_to_ask.f", first)
ask()
HookRegistry.apply_hooks()
ask()
HookRegistry.register("module_to_ask.f", late)
HookRegistry.apply_hooks()
ask()
HookRegistry.register("module_to_ask.g", first)
HookRegistry.apply_hooks()
ask("module_to_ask.g")
module.g = lambda x: x
HookRegistry.apply_hooks()
ask("module_to_ask.g")
HookRegistry.reset()
ask()
print(json.dumps([answers, module.f(1), module.g(1)]))
"""


def test_the_registry_reports_which_hook_is_applied() -> None:
    no, yes = [False, False, False], [True, False, False]
    asked, f, g = answer_of("-c", QUERY)
    assert asked == [no, no, yes, yes, no, yes, no]
    assert [f, g] == [2, 2]


# -- SGLang's own tests -----------------------------------------------------------------------------------


def own_tests() -> list[Path]:
    """Test files about plugins: those in SGLang's wheel, and those of a checkout named in SGLANG_CHECKOUT."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    unit = Path(str(package.origin)).parent / "multimodal_gen" / "test" / "unit"
    return [*sorted(unit.glob("test_*plugin*.py")), *checked_out("p*/test_*.py")]


def checked_out(pattern: str) -> list[Path]:
    checkout = env.text("SGLANG_CHECKOUT")
    return sorted(Path(checkout).glob(f"test/registered/unit/{pattern}")) if checkout else []


def outcomes(
    file: Path, *options: str, launcher: tuple[str, ...] = (), **settings: str
) -> list[tuple[str, str]]:
    """(PASSED, FAILED or ERROR, name) of each test in one of SGLang's files, and of none of our settings."""
    command = ["-W", "ignore", "-m", "pytest", "-c", os.devnull, f"--rootdir={file.parent}", "-q", "-rA"]
    command += ["-p", "no:cacheprovider", "--noconftest", *options, str(file)]
    done = run_python(*launcher, *command, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **settings)
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S*?(::\S+|$)", done.stdout, re.M)
    assert found, done.stdout[-4000:]
    assert not [result for result, _ in found if result == "ERROR"], done.stdout[-4000:]
    return sorted(found)


@pytest.mark.parametrize("file", own_tests(), ids=lambda file: file.stem)
def test_sglangs_own_tests_go_as_they_do_without_us(file: Path, tmp_path: Path) -> None:
    """Cases that pass alone pass under the launcher, traced and with adoption."""
    run = ("-m", "sgl_aspects", "run", "--level", "3", "--file", str(tmp_path / "spans.jsonl"), "--")
    alone = outcomes(file, SGL_ASPECTS_ADOPT="0")
    assert outcomes(file, launcher=(*run, sys.executable), SGL_ASPECTS_ADOPT="1") == alone


# What differs through our names, each a row of docs/migration.md: hooks stack; messages have our logger.
DIFFERENT = {
    "test_class_replace_then_method_replace_warns",
    "test_failed_target_reports_false_until_successful_retry",
    "test_late_registration_is_not_applied_when_target_was_already_patched",
    "test_plugin_exception_does_not_crash",
}
OWN_TESTS = [*checked_out("plugins/test_hook_registry*.py"), *checked_out("plugins/test_load_plugins.py")]


@pytest.mark.parametrize("file", OWN_TESTS, ids=lambda file: file.stem)
def test_sglangs_tests_of_its_plugins_pass_through_our_names(file: Path) -> None:
    found = outcomes(file, "-p", "tests.support.sglang_api", SGL_ASPECTS_ADOPT="0")
    assert {name.rpartition("::")[2] for result, name in found if result != "PASSED"} <= DIFFERENT
