"""Mistakes of an author of hooks: each is named, with what to write instead."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookSource, HookType
from sgl_aspects.errors import HookError, TargetError
from tests.support.processes import python
from tests.support.woven_modules import advice, around, hand_on, module_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("jsn:dumps", "no module jsn can be imported; close names: json"),
        ("json.decodr:JSONDecoder.decode", "no module json.decodr can be imported; close names: decoder"),
        ("jsn.**:dumps", "no module jsn can be imported; close names: json"),
        ("jsn.x*.**:dumps", "no module jsn can be imported; close names: json"),
        ("string.templates:f", "string is not a package, so no module string.templates can be imported"),
        ("jsn:dumps | simplejsn:dumps", "no module jsn can be imported"),
    ],
)
def test_a_module_that_cannot_exist_is_named(target: str, words: str) -> None:
    assert words in aspects.explain(target)
    aspects.weave(around(target))
    assert words in aspects.explain(target)
    assert words in aspects.report().hooks[0].detail


def test_explain_names_what_a_loaded_module_lacks() -> None:
    told = aspects.explain("json.decoder:JSONDecoder.decod")
    assert "no hooks (module json.decoder is loaded and has no JSONDecoder.decod; close names:" in told
    assert aspects.explain("json.decod:f | json.decoder:JSONDecoder.decode").endswith(": no hooks")


@pytest.mark.parametrize("begin", ["import json.tool\n", ""])
def test_a_target_that_is_a_module_says_so(begin: str) -> None:
    program = f"""{begin}import sgl_aspects as a
a.weave(a.around("json.tool")(lambda original_fn, *args: None))
import json.tool
print(a.report())
"""
    done = python("-c", program, cwd=ROOT)
    assert "(json.tool is a module: write 'json.tool:name')" in done.stdout
    assert "is not woven: json.tool is a module: write 'json.tool:name'" in done.stderr


@pytest.mark.parametrize("file", ["beside_a.py", "beside_b/__init__.py"])
def test_a_module_in_a_folder_that_python_does_not_look_into_is_found(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    told = f"can be imported; Python does not look into {tmp_path}, which has it: add it to PYTHONPATH"
    assert told in aspects.explain(f"{file[:8]}:f")


def test_a_handle_shows_its_hooks_as_the_report_does() -> None:
    with module_of("def f(): pass\ndef g(): pass") as engine:
        handle = aspects.weave(around("engine:f"))
        other = aspects.weave(around("engine:g"))
        engine.f()
        first, second = str(aspects.report()).splitlines()
        assert (repr(handle), repr(other)) == (first, second)
        assert " 1 calls " in first
        other.remove()
        handle.remove()
        assert repr(handle).startswith("removed ")


@pytest.mark.parametrize("target", [":f", "pkg.:f", ".pkg:f", "pkg:", "pkg..f"])
def test_a_name_that_is_missing_is_said_to_be(target: str) -> None:
    with pytest.raises(
        TargetError, match=rf"^target {re.escape(repr(target))}: a name is missing; write 'pkg"
    ):
        aspects.explain(target)


@pytest.mark.parametrize(
    "target",
    [
        "this:f",
        "jsn:dumps | this:f",
        "xml.etree.cElementTree2.f",
        # Patterns whose packages exist, or that have none before their first wildcard.
        "**:no_such_name",
        "*:no_such_name",
        "*.sub:f",
        "jso*:no_such_name",
        "json.d*:no_such_name",
    ],
)
def test_a_module_that_may_exist_is_not_complained_of(target: str) -> None:
    assert "can be imported" not in aspects.explain(target)
    aspects.weave(around(target))
    assert "can be imported" not in aspects.explain(target)
    assert "can be imported" not in aspects.report().hooks[0].detail


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "jsn:dumps",
            "was never woven: its module is not loaded yet: no module jsn can be imported; close names: json",
        ),
        ("json.**:dumpz", "was never woven: no loaded module has what the pattern names yet\n"),
        ("**:no_such_name", "was never woven: no loaded module has what the pattern names yet\n"),
        ("this:f", ""),
    ],
)
def test_a_program_says_at_its_end_which_hooks_could_never_work(target: str, words: str) -> None:
    program = f"import sgl_aspects as a, json; a.weave(a.around({target!r})(lambda original_fn, *args: None))"
    done = python("-c", program, cwd=ROOT)
    assert done.returncode == 0
    assert words in done.stderr
    assert bool(done.stderr) is bool(words)


def test_hooks_of_an_installed_package_may_be_for_engines_that_are_not() -> None:
    program = """
import sgl_aspects as a
advice = a.Advice(a.Target.parse("jsn:dumps"), a.HookType.AROUND, print, source=a.HookSource("p", "package"))
a.weave(advice)
"""
    done = python("-c", program, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        (HookType.AROUND, lambda: None),
        (HookType.AROUND, lambda *, batch: None),
        (HookType.AFTER, lambda **kwargs: None),
        (HookType.NATIVE, lambda proceed, args: None),
    ],
)
def test_a_hook_without_the_arguments_of_its_kind_fails_when_it_is_registered(kind: Any, hook: Any) -> None:
    with pytest.raises(HookError, match=r"does not take what .* hooks get; write def hook"):
        aspects.HookRegistry.register("engine:f", hook, kind)


def test_a_decorator_that_has_decorated_nothing_is_named() -> None:
    with pytest.raises(HookError, match=r"observe\('m:f'\) has decorated nothing: .*enter=, exit= or both"):
        aspects.weave(aspects.observe("m:f"))
    with pytest.raises(HookError, match=r"around\('m:f'\) has decorated nothing: write it as a decorator"):
        aspects.weave(aspects.around("m:f"))


def test_an_overridden_method_of_an_aspect_without_its_decorator_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Base(aspects.Aspect):
        @aspects.around("engine:f")
        def around(self, original_fn: Any) -> Any:
            return original_fn()

        @aspects.around("engine:g")
        def kept(self, original_fn: Any) -> Any:
            return original_fn()

    class Quiet(Base):
        def around(self, original_fn: Any) -> Any:
            return None

    aspects.weave(Quiet())
    assert [report.target for report in aspects.report().hooks] == ["engine:g"]
    assert "Quiet.around carries no decorator" in caplog.text
    assert "repeat the decorator" in caplog.text


def test_an_observer_with_bound_to_on_the_instance_alone_is_refused() -> None:
    """It would never be called: `bound_to` is a method of the observer's class."""
    with pytest.raises(HookError, match=r"needs enter\(args, kwargs\), exit"):
        advice("json:dumps", HookType.OBSERVE, types.SimpleNamespace(bound_to=lambda function: None))


@pytest.mark.parametrize("orders", [(10, 0), (0, 10), (10, 0, 5)])
def test_the_warning_of_replacements_names_the_one_that_runs(
    caplog: pytest.LogCaptureFixture, orders: tuple[int, ...]
) -> None:
    with module_of("def f(): return 'f'\n") as engine:
        for order in orders:
            source = HookSource(f"order-{order}")
            aspects.weave(advice("engine:f", HookType.REPLACE, lambda o=order: o, order=order, source=source))
        assert engine.f() == 10
    warnings = [record.getMessage().partition("overrides") for record in caplog.records]
    others = [f"from order-{order}" for order in orders if order != 10]
    assert ["from order-10" in winner for winner, _, _ in warnings] == [True] * len(others)
    assert [other in rest for other, (_, _, rest) in zip(others, warnings)] == [True] * len(others)


def test_a_package_that_has_come_since_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no module comes can be imported" in aspects.explain("comes.later:f")
    monkeypatch.setitem(sys.modules, "comes", types.ModuleType("comes"))
    assert "comes is not a package" in aspects.explain("comes.later:f")
    monkeypatch.setitem(sys.modules, "comes.later", types.ModuleType("comes.later"))
    assert "can be imported" not in aspects.explain("comes.later:f")


def test_the_names_of_a_class_are_read_without_its_metaclass() -> None:
    source = """
    class Meta(type):
        def __dir__(cls): raise RuntimeError("foreign code")
    class Base:
        def running(self): pass
    class Engine(Base, metaclass=Meta):
        def stepping(self): pass
    """
    with module_of(source):
        assert "close names: Engine.running" in aspects.explain("engine:Engine.runing")
        assert "close names: Engine.stepping" in aspects.explain("engine:Engine.steping")


def test_a_pytest_fixture_is_refused() -> None:
    with module_of("import pytest\n@pytest.fixture\ndef made(): return 1\n") as engine:
        before = engine.made
        with pytest.raises(HookError, match=r"is a pytest fixture.*hook a function that it calls"):
            aspects.weave(around("engine:made", hand_on))
        aspects.weave(around("engine:*", hand_on))
        assert engine.made is before


def test_an_attribute_made_on_first_access_is_not_held_by_the_weaver() -> None:
    source = """
    def __getattr__(name):
        if name != "late": raise AttributeError(name)
        def late(): return 1
        return late
    """
    with module_of(source) as engine:
        aspects.weave(around("engine:late"))
        assert engine.late() == 1
        assert aspects.report().stale == ()
