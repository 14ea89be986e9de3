"""Plugins: found through entry points of packages that are really installed, each run in its own process."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import pytest

from tests.support.distributions import install
from tests.support.stand_ins import Engine

REGISTERING = """
import sgl_aspects as aspects
def hook(result, *args, **kwargs): return [*result, "{name}"]
def activate():
    aspects.HookRegistry.register("served.f", hook)
"""

LOAD = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
import sgl_aspects as aspects
aspects.load_plugins()
import served
print(json.dumps({"result": served.f(), "sources": [list(h.source or ()) for h in aspects.report().hooks]}))
"""


class Site:
    """A folder of installed packages."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.write("served.py", "def f(): return []\n")

    def install(
        self,
        name: str,
        module: str = REGISTERING,
        *,
        entry: str | None = None,
        platforms: str = "",
        group: str = "sgl_aspects.plugins",
    ) -> None:
        """A distribution ``<name>-dist`` with a plugin ``name``; importing its module writes a file."""
        marker = self.engine.folder / f"{name}.imported"
        source = f"open({str(marker)!r}, 'a').write('x')\n" + textwrap.dedent(module)
        self.engine.write(f"{name}_plugin.py", source.replace("{name}", name))
        entries = f"[{group}]\n{name} = {entry or f'{name}_plugin:activate'}\n"
        if platforms:
            entries += f"[sgl_aspects.platforms]\n{platforms} = {name}_plugin:platform\n"
        install(self.engine.folder, f"{name}-dist", entries, version="1.2")

    def imports(self, name: str) -> int:
        """How many processes imported the plugin's module."""
        marker = self.engine.folder / f"{name}.imported"
        return len(marker.read_text()) if marker.exists() else 0

    def load(self, script: str = LOAD, **environment: str) -> tuple[Any, str]:
        """Run ``script``; what it printed as JSON, and its log."""
        names = ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGL_ASPECTS_CONFIG", "SGL_ASPECTS_REPORT")
        ended = self.engine.run(script, **{**dict.fromkeys(names, ""), **environment})
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout), ended.stderr


@pytest.fixture
def site(engine: Engine) -> Site:
    """An empty site with a module to hook."""
    return Site(engine)


def test_plugins_run_with_their_source_and_their_hooks_are_applied(site: Site) -> None:
    site.install("one")
    site.install("two")
    told, _ = site.load()
    assert sorted(told["result"]) == ["one", "two"]
    assert sorted(told["sources"]) == [["one", "one-dist"], ["two", "two-dist"]]


def test_hooks_registered_while_the_module_is_imported_have_their_source_too(site: Site) -> None:
    site.install(
        "early",
        """
        from sgl_aspects import HookSource, HookType, HookRegistry, plugin_hook
        @plugin_hook("served.f", type=HookType.AROUND)
        def wrap(original_fn): return [*original_fn(), "early"]
        def activate():
            HookRegistry.register("served.f", lambda result: [*result, "given"], source=HookSource("given"))
        """,
    )
    told, _ = site.load()
    assert told["result"] == ["early", "given"]
    assert told["sources"] == [["early", "early-dist"], ["given", None]]


@pytest.mark.parametrize("allowed", ["one", " one , missing,", "one,one"])
def test_the_allow_list_is_checked_before_anything_is_imported(site: Site, allowed: str) -> None:
    site.install("one")
    site.install("two")
    site.install("fatal", "raise SystemExit('imported')")
    told, log = site.load(SGLANG_PLUGINS=allowed)
    assert told["result"] == ["one"]
    assert [site.imports(name) for name in ("one", "two", "fatal")] == [1, 0, 0]
    assert "plugin two is not in SGLANG_PLUGINS: skipped" in log


def test_plugins_of_other_platforms_are_skipped_unimported(site: Site) -> None:
    site.install("mine", platforms="mychip")
    site.install("theirs", platforms="theirchip")
    site.install("plain")
    told, log = site.load(SGLANG_PLATFORM="mychip")
    assert sorted(told["result"]) == ["mine", "plain"]
    assert site.imports("theirs") == 0
    assert "plugin theirs belongs to another platform than SGLANG_PLATFORM: skipped" in log
    told, _ = site.load()
    assert sorted(told["result"]) == ["mine", "plain", "theirs"]


@pytest.mark.parametrize(
    ("module", "entry", "fault"),
    [
        ("raise OSError('no such library')", None, "no such library"),
        ("import sys; sys.exit('no licence')", None, "SystemExit: no licence"),
        ("def activate(): raise GeneratorExit('its own')", None, "GeneratorExit: its own"),
        ("import a_module_that_is_not_there", None, "a_module_that_is_not_there"),
        ("def activate(): raise KeyError('in the plugin')", None, "in the plugin"),
        ("def something(): pass", None, "activate"),
        ("activate = 3", None, "not callable"),
        ("def activate(needed): pass", None, "needed"),
        ("syntax error", None, "SyntaxError"),
        ("", "nowhere_at_all:activate", "nowhere_at_all"),
        (
            "import sgl_aspects\ndef activate(): sgl_aspects.HookRegistry.register('f', print)",
            None,
            "no module",
        ),
        (
            "import sgl_aspects\ndef activate(): sgl_aspects.HookRegistry.register('a.f', int)",
            None,
            "REPLACE",
        ),
    ],
)
def test_a_plugin_that_fails_is_named_and_the_others_go_on(
    site: Site, module: str, entry: str | None, fault: str
) -> None:
    site.install("bad", module, entry=entry)
    site.install("good")
    site.install("also")
    told, log = site.load()
    assert sorted(told["result"]) == ["also", "good"]
    assert "ERROR plugin bad (bad-dist) failed; the others go on" in log
    assert fault in log


def test_a_hook_of_a_plugin_that_cannot_be_woven_is_named_with_its_plugin(site: Site) -> None:
    site.install(
        "bad",
        """
        import sgl_aspects as aspects, served
        def activate():
            for target in ("served.gone", "served.number", "served.f"):
                aspects.HookRegistry.register(target, lambda result: [*result, "bad"])
        served.number = 3
        """,
    )
    told, log = site.load()
    assert told["result"] == ["bad"]
    assert log.count("from bad (bad-dist)") == 2
    assert "served.gone" in log
    assert "served.number" in log


@pytest.mark.parametrize("loaded", ["import served", ""])
@pytest.mark.parametrize(
    "activate",
    [
        "aspects.HookRegistry.register('served.gone', needed, required=True)",
        "aspects.weave(aspects.after('served.gone', required=True)(needed))",
        "aspects.weave(aspects.after('served.gone', required=True)(needed)); import served",
    ],
)
def test_a_required_hook_of_a_plugin_stops_the_process(site: Site, activate: str, loaded: str) -> None:
    site.install(
        "strict",
        f"""
        import sgl_aspects as aspects
        def needed(result): pass
        def activate(): {activate}
        """,
    )
    ended = site.engine.run(
        f"""
        {loaded}
        import sgl_aspects
        try:
            sgl_aspects.load_plugins()
            import served
        except Exception:
            print("swallowed")
        print("went on")
        """
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    for word in ("needed", "strict (strict-dist)", "served.gone"):
        assert word in ended.stderr


def test_an_unknown_plugin_name_is_an_error_that_lists_the_names(site: Site) -> None:
    site.install("one")
    site.install("two", platforms="mychip", group="sglang.srt.plugins")
    told, log = site.load(SGLANG_PLUGINS="one,typo")
    assert told["result"] == ["one"]
    assert re.search("WARNING SGLANG_PLUGINS names 'typo', .*: mychip, one, .*two", log)
    _, log = site.load(SGLANG_PLUGINS="one,two,mychip")
    assert "SGLANG_PLUGINS names" not in log


def test_a_class_without_packaging_keeps_its_vendors_plugins(site: Site) -> None:
    site.install("mine", platforms="mychip")
    site.install("theirs", platforms="theirchip")
    told, _ = site.load(SGLANG_PLATFORM="try=mine_plugin.platforms:Newest")
    assert told["result"] == ["mine"]
    assert site.imports("theirs") == 0


def test_plugins_of_sglangs_group_run_where_an_engine_enables_them(site: Site) -> None:
    site.install("one")
    site.install("old", group="sglang.srt.plugins")
    told, _ = site.load()
    assert told["result"] == ["one"]
    for script in (
        LOAD.replace("load_plugins()", "load_plugins(compatible=True)"),
        # Below `sgl-aspects run` the plugins were loaded as the interpreter started.
        LOAD.replace(
            "aspects.load_plugins()", "aspects.load_plugins(); aspects.load_plugins(compatible=True)"
        ),
    ):
        told, _ = site.load(script)
        assert sorted(told["result"]) == ["old", "one"]
        assert sorted(told["sources"]) == [["old", "old-dist"], ["one", "one-dist"]]


def test_the_embedded_engine_runs_plugins_that_were_written_for_sglang(site: Site) -> None:
    site.install("old", group="sglang.srt.plugins")
    told, _ = site.load(
        """
        import json, served
        from sgl_aspects.runtime import Engine
        try:
            Engine("/no/such/model")
        except Exception:
            print(json.dumps(served.f()))
        """,
        SGLANG_PLATFORM="cpu",
    )
    assert told == ["old"]


def test_a_group_of_plugins_is_loaded_as_sglang_loads_it(site: Site) -> None:
    site.install("one")
    site.install("two")
    site.install("bad", "raise OSError('no such library')")
    told, log = site.load(
        """
        import json, logging
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
        from sgl_aspects.plugins import load_plugins_by_group
        found = load_plugins_by_group("sgl_aspects.plugins", excluded_dists={"two-dist"})
        print(json.dumps([[name, function.__name__, dist] for name, (function, dist) in found.items()]))
        """,
        SGLANG_PLUGINS="one,two,bad",
    )
    assert told == [["one", "activate", "one-dist"]]
    assert "ERROR plugin bad (bad-dist) failed" in log


def test_plugins_run_once_in_a_process(site: Site) -> None:
    site.install("one")
    script = LOAD.replace("aspects.load_plugins()", "for _ in range(5): aspects.load_plugins()")
    told, _ = site.load(script)
    assert told["result"] == ["one"]


def test_threads_load_plugins_once_and_all_wait_for_it(site: Site) -> None:
    site.install("slow", REGISTERING + "    import time; time.sleep(0.3)\n")
    site.install("other")
    told, _ = site.load(
        """
        import json, threading, sgl_aspects as aspects
        import served
        seen = []
        def load():
            aspects.load_plugins()
            seen.append(served.f())
        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(60)
        print(json.dumps([sorted(result) for result in seen]))
        """
    )
    assert told == [["other", "slow"]] * 8


def test_a_plugin_may_load_plugins(site: Site) -> None:
    module = "import sgl_aspects\nsgl_aspects.load_plugins()\n" + REGISTERING + "    aspects.load_plugins()\n"
    site.install("again", module)
    site.install("other")
    told, _ = site.load()
    assert sorted(told["result"]) == ["again", "other"]


def test_a_fork_while_plugins_are_loading(site: Site) -> None:
    site.install("slow", REGISTERING + "    import served; served.reached.set(); served.go_on.wait(60)\n")
    site.engine.write(
        "served.py",
        "import threading\nreached, go_on = threading.Event(), threading.Event()\ndef f(): return []\n",
    )
    told, _ = site.load(
        """
        import json, os, threading, warnings, served, sgl_aspects
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork with threads
        thread = threading.Thread(target=sgl_aspects.load_plugins)
        thread.start()
        assert served.reached.wait(60)
        child = os.fork()
        if child == 0:
            sgl_aspects.load_plugins()
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        served.go_on.set()
        thread.join(60)
        print(json.dumps([status, served.f()]))
        """,
    )
    assert told == [7, ["slow"]]


def test_one_plugin_that_is_found_twice_runs_once(site: Site) -> None:
    site.install("one")
    twin = site.engine.folder / "one_dist.egg-info"
    twin.mkdir()
    (twin / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: one-dist\nVersion: 1.2\n")
    (twin / "entry_points.txt").write_text("[sgl_aspects.plugins]\none = one_plugin:activate\n")
    told, _ = site.load()
    assert told["result"] == ["one"]


def test_installed_packages_are_searched_once(site: Site) -> None:
    site.install("one", platforms="mychip")
    script = """
    import importlib.metadata, json
    asked = []
    search = importlib.metadata.entry_points
    def counting():
        asked.append(1)
        return search()
    importlib.metadata.entry_points = counting
    import sgl_aspects
    for _ in range(3): sgl_aspects.load_plugins()
    print(json.dumps(asked))
    """
    told, _ = site.load(script)
    assert told == [1]
    told, _ = site.load(script, SGLANG_PLATFORM="mychip", SGLANG_PLUGINS="one")
    assert told == [1]


def test_without_plugins_nothing_happens(site: Site) -> None:
    told, _ = site.load(
        """
        import json, sys
        finders = list(sys.meta_path)
        import sgl_aspects
        sgl_aspects.load_plugins()
        heavy = [name for name in ("torch", "opentelemetry", "opentelemetry.sdk") if name in sys.modules]
        print(json.dumps([heavy, finders == sys.meta_path]))
        """
    )
    assert told == [[], True]


@pytest.mark.parametrize(
    ("variable", "value"), [("SGL_ASPECTS_CONFIG", "/nowhere/gone.toml"), ("SGL_ASPECTS_ADOPT", "perhaps")]
)
def test_a_faulty_setting_is_one_line(site: Site, variable: str, value: str) -> None:
    site.install("one")
    ended = site.engine.run(LOAD, **{variable: value})
    assert ended.returncode == 1
    assert value in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("sgl-aspects: ")
