"""Discovery of platforms, on real entry points of packages that are really installed.

Each package is a folder with its module and a ``dist-info`` with ``entry_points.txt`` on ``sys.path``: what
pip leaves behind. Each choice is made in a process of its own. Importing a plugin's module writes a file, so
that a test can tell which were imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.support.distributions import install
from tests.support.torch_programs import run_with_torch

GOOD = """
from sgl_aspects.platforms.cpu import CpuDeviceMixin
from sgl_aspects.platforms import PlatformEnum, SRTPlatform
class Device(CpuDeviceMixin):
    _enum = PlatformEnum.OOT
    device_name = "{name}"
class Platform(Device, SRTPlatform):
    def get_default_attention_backend(self): return "torch_native"
"""


class Site:
    """A folder of installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        name: str,
        activate: str,
        *,
        module: str = GOOD,
        platform: str | None = None,
        group: str = "sgl_aspects.platforms",
    ) -> None:
        """A distribution ``<name>-dist`` 1.2, whose plugin is ``activate`` (a function's body)."""
        platform = platform or name
        package = f"{name}_pkg"
        (self.folder / package).mkdir()
        marker = self.folder / f"{name}.imported"
        (self.folder / package / "__init__.py").write_text(
            f"import pathlib\npathlib.Path({str(marker)!r}).touch()\ndef activate():\n    {activate}\n"
        )
        (self.folder / package / "platform.py").write_text(module.format(name=name))
        install(self.folder, f"{name}-dist", f"[{group}]\n{platform} = {package}:activate\n", version="1.2")

    def imported(self) -> set[str]:
        return {file.stem for file in self.folder.glob("*.imported")}

    def choose(self, platform: str | None = None, **environment: str) -> dict[str, object]:
        """Use current_platform in a new process; what it answers, or the error."""
        code = """
import json
from sgl_aspects.platforms import current_platform, current_platform_choice
try:
    device = current_platform.device_name
    choice = current_platform_choice()
    answer = {"device": device, "name": choice.name, "same": choice is current_platform_choice()}
    answer["candidates"] = {c.name: [c.source, c.chosen, c.reason] for c in choice.candidates}
except Exception as error:
    answer = {"error": str(error), "types": [cls.__name__ for cls in type(error).__mro__]}
print(json.dumps(answer))
"""
        answer = json.loads(self.run(code, platform=platform, environment=environment))
        assert isinstance(answer, dict)
        return answer

    def run(
        self,
        code: str,
        *,
        platform: str | None = None,
        script: Path | None = None,
        status: int = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Run ``code``, or ``script`` that holds it, in a new process that ends with ``status``."""
        env = {key: value for key, value in os.environ.items() if key != "SGLANG_PLATFORM"}
        env["PYTHONPATH"] = os.pathsep.join([str(self.folder), *filter(None, [env.get("PYTHONPATH")])])
        env["CUDA_VISIBLE_DEVICES"] = ""  # the answers below are those of a machine without a GPU
        env |= environment
        if platform is not None:
            env["SGLANG_PLATFORM"] = platform
        if script is None:
            found, out, err = run_with_torch(code, env, self.folder)
            assert found == status, err
            return out
        done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def error_of(answer: dict[str, object], *types: str) -> str:
    assert "error" in answer, answer
    for name in types:
        assert name in answer["types"], answer  # type: ignore[operator]
    return str(answer["error"])


BUILTINS = ("cuda", "rocm", "npu", "musa", "hpu", "tpu", "xpu", "mps", "cpu")
HERE = 'return "{0}_pkg.platform:Platform"'
ABSENT = "return None"


def test_no_plugin_the_cpu_is_chosen(site: Site) -> None:
    answer = site.choose()
    assert answer["device"] == "cpu"
    assert answer["same"]
    assert answer["candidates"] == {
        "cuda": ["built-in", False, "torch.cuda.is_available() is False"],
        "rocm": ["built-in", False, "this torch is not built for ROCm (torch.version.hip is None)"],
        "npu": ["built-in", False, "torch_npu is not installed"],
        "musa": ["built-in", False, "torch_musa is not installed"],
        "hpu": ["built-in", False, "habana_frameworks is not installed"],
        "tpu": ["built-in", False, "torch_xla is not installed"],
        "xpu": ["built-in", False, "torch.xpu.is_available() is False"],
        "mps": ["built-in", False, "torch.backends.mps.is_available() is False"],
        "cpu": ["built-in", True, "the highest built-in whose hardware was found"],
    }


def test_one_plugin_comes_before_every_builtin(site: Site) -> None:
    site.install("acme", HERE.format("acme"))
    answer = site.choose()
    assert answer["device"] == "acme"
    assert answer["candidates"] == {
        "acme": ["acme-dist 1.2", True, "the only plugin that found its hardware"],
        **{name: ["built-in", False, "not queried: a plugin comes first"] for name in BUILTINS},
    }


def test_plugins_without_hardware_leave_the_choice_to_the_others(site: Site) -> None:
    site.install("acme", ABSENT)
    site.install("bolt", HERE.format("bolt"))
    answer = site.choose()
    assert answer["device"] == "bolt"
    assert answer["candidates"]["acme"] == ["acme-dist 1.2", False, "its plugin found no hardware"]  # type: ignore[index]


def test_several_plugins_are_an_error_that_names_them_and_the_variable(site: Site) -> None:
    for name in ("acme", "bolt", "core"):
        site.install(name, HERE.format(name))
    error = error_of(site.choose(), "PlatformError", "RuntimeError")
    for part in (
        "'acme' of acme-dist 1.2",
        "'bolt' of bolt-dist 1.2",
        "'core' of core-dist 1.2",
        "SGLANG_PLATFORM",
    ):
        assert part in error


def test_the_variable_chooses_and_the_others_are_never_imported(site: Site) -> None:
    for name in ("acme", "bolt", "core"):
        site.install(name, HERE.format(name))
    answer = site.choose("bolt")
    assert answer["device"] == "bolt"
    assert site.imported() == {"bolt"}
    assert answer["candidates"]["acme"] == ["acme-dist 1.2", False, "not queried: SGLANG_PLATFORM=bolt"]  # type: ignore[index]


def test_the_variable_chooses_a_builtin_too(site: Site) -> None:
    site.install("acme", HERE.format("acme"))
    assert site.choose("cpu")["device"] == "cpu"
    assert site.imported() == set()


def test_a_builtin_without_its_hardware_is_an_error(site: Site) -> None:
    error = error_of(site.choose("cuda"), "PlatformError")
    assert "SGLANG_PLATFORM=cuda" in error
    assert "hardware not available" in error


def test_an_unknown_name_lists_what_there_is(site: Site) -> None:
    site.install("acme", HERE.format("acme"))
    (file,) = site.folder.glob("*/entry_points.txt")  # named for SGLang, too
    file.write_text(file.read_text() + file.read_text().replace("sgl_aspects", "sglang.srt"))
    error = error_of(site.choose("amce"), "PlatformError")
    for part in ("SGLANG_PLATFORM=amce:", "'acme' of acme-dist 1.2", ", ".join(BUILTINS)):
        assert error.count(part) == 1
    assert site.imported() == set()


def test_two_distributions_with_one_name_are_an_error(site: Site) -> None:
    site.install("acme", HERE.format("acme"), platform="npu7")
    site.install("bolt", HERE.format("bolt"), platform="npu7")
    error = error_of(site.choose("npu7"), "PlatformError")
    assert "'npu7': acme-dist 1.2, bolt-dist 1.2. Uninstall all but one" in error
    assert site.imported() == set()
    assert error_of(site.choose(), "PlatformError") == error  # a name would not tell them apart


BRIDGED = (
    GOOD
    + """
class ForSGLang:
    platform_class = Platform
"""
)


@pytest.mark.parametrize("class_name", ["acme_pkg.platform.ForSGLang", "acme_pkg.platform:ForSGLang"])
def test_a_platform_that_is_bridged_to_sglang_runs_by_its_name_there(site: Site, class_name: str) -> None:
    site.install("acme", f"return {class_name!r}", module=BRIDGED, group="sglang.srt.platforms")
    answer = site.choose("acme")
    assert (answer["device"], answer["name"]) == ("acme", "acme")
    assert "device" in site.choose(None)
    assert site.choose(None)["name"] != "acme"  # never chosen by itself


def test_a_platform_written_for_sglang_alone_is_an_error_with_the_remedy(site: Site) -> None:
    module = "class Theirs: pass\n"
    body = "return 'acme_pkg.platform.Theirs'"
    site.install("acme", body, module=module, group="sglang.srt.platforms")
    error = str(site.choose("acme")["error"])
    assert "acme_pkg.platform:Theirs of plugin 'acme' of acme-dist" in error
    assert "Derive it from SRTPlatform: docs/migration.md" in error


def test_a_class_without_packaging(site: Site) -> None:
    site.install("acme", HERE.format("acme"))
    (site.folder / "mine.py").write_text(GOOD.format(name="mine"))
    answer = site.choose("mine=mine:Platform")
    assert answer["device"] == answer["name"] == "mine"
    assert site.imported() == set()


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("mine=", "name=pkg.mod:Cls"),
        ("mine=no_such_module:Platform", "No module named 'no_such_module'"),
        ("mine=json:Platform", "'json:Platform' cannot be loaded"),
        ("mine=json.Platform", 'write "pkg.mod:Cls"'),
    ],
)
def test_a_class_that_cannot_be_loaded(site: Site, value: str, part: str) -> None:
    error = error_of(site.choose(value), "PlatformError")
    assert part in error
    assert f"SGLANG_PLATFORM={value}" in error


ABSTRACT = """
import abc
class Abstract(Platform, metaclass=abc.ABCMeta):
    @abc.abstractmethod
    def more(self): ...
Platform = Abstract
"""
#: Of plugin 'acme': the body of its function, its module, the error's other types, and parts of it.
WRONG: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
    ('return "decimal:Decimal"', GOOD, ("TypeError",), ("decimal:Decimal", "SRTPlatform")),
    ("return 42", GOOD, ("TypeError",), ("returned 42",)),
    *(
        (f"return {name!r}", GOOD, (), ("pkg.mod:Cls",))
        for name in ("", "acme_pkg.platform", "acme_pkg.platform.Platform", ":Platform")
    ),
    ('raise OSError("libacme.so: none")', GOOD, (), ("OSError", "libacme.so", "SGLANG_PLATFORM")),
    *(
        (f"raise {exit}", GOOD, (), (exit[:9],))
        for exit in ("SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()")
    ),
    (
        "from sgl_aspects.platforms import current_platform as c; return c.device_name",
        *(GOOD, (), ("while the platform was being chosen",)),
    ),
    *(
        (HERE.format("acme"), module, (), (part,))
        for module, part in (
            ('raise RuntimeError("driver 3 is too old")\n', "RuntimeError: driver 3 is too old"),
            ('import sys; sys.exit("no licence")\n', "SystemExit: no licence"),
            ("def Platform(): pass\n", "is a function, and a class is needed"),
            ("Platform = 3\n", "is a int, and a class is needed"),
            ("other = 1\n", "cannot be loaded"),
        )
    ),
    *(
        (HERE.format("acme"), GOOD + addition, (), ("acme_pkg.platform:Platform", part))
        for addition, part in (
            ('    _enum = "OOT"', "_enum = 'OOT', and a PlatformEnum is needed"),
            ("    device_name = None", "device_name = None, and a str is needed"),
            ("    device_type = 5", "device_type = 5, and a str is needed"),
            ("    capabilities = dict(graph_capture=True)", "and a PlatformCapabilities is needed"),
            ('    supported_quantization = "acme4"', "= 'acme4', and a tuple or list is needed"),
            ("    def __new__(cls): return None", "failed while it was created"),
            (ABSTRACT, "failed while it was created"),
        )
    ),
]


@pytest.mark.parametrize(("body", "module", "types", "parts"), WRONG)
def test_a_plugin_that_is_wrong_is_an_error_that_names_its_package(
    site: Site, body: str, module: str, types: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    """It is never a silent fall-back to another platform."""
    site.install("acme", body, module=module)
    for platform in (None, "acme"):
        error = error_of(site.choose(platform), "PlatformError", *types)
        for part in (*parts, "'acme' of acme-dist 1.2"):
            assert part in error


def test_a_faulty_setting_is_not_blamed_on_a_plugin(site: Site) -> None:
    site.install("acme", ABSENT)
    error = error_of(site.choose(SGL_ASPECTS_DETECT_SECONDS="soon"), "ConfigError")
    assert error.startswith("SGL_ASPECTS_DETECT_SECONDS='soon'")


# -- a driver that hangs --------------------------------------------------------------------------------

HANGS = "import time; time.sleep(600)"


@pytest.mark.parametrize("platform", [None, "acme"])
def test_a_plugin_that_hangs_is_an_error_within_its_bound(site: Site, platform: str | None) -> None:
    site.install("acme", HANGS)
    error = error_of(site.choose(platform, SGL_ASPECTS_DETECT_SECONDS="1"), "PlatformError", "TimeoutError")
    for part in ("'acme' of acme-dist 1.2", "1 s", "SGLANG_PLATFORM", "SGL_ASPECTS_DETECT_SECONDS"):
        assert part in error


def test_a_slow_plugin_is_waited_for(site: Site) -> None:
    site.install("acme", f"import time; time.sleep(1); {HERE.format('acme')}")
    assert site.choose(SGL_ASPECTS_DETECT_SECONDS="60")["device"] == "acme"


def test_without_a_time_limit_the_plugin_is_called_in_the_main_thread(site: Site) -> None:
    site.install(
        "acme",
        "import threading; assert threading.current_thread() is threading.main_thread(); "
        + HERE.format("acme"),
    )
    assert site.choose(SGL_ASPECTS_DETECT_SECONDS="0")["device"] == "acme"


def test_a_class_inside_a_class_is_found(site: Site) -> None:
    module = GOOD + "class Outer:\n    Inner = Platform\n"
    site.install("acme", 'return "acme_pkg.platform:Outer.Inner"', module=module)
    assert site.choose()["device"] == "acme"


# -- one object, in every thread and process ------------------------------------------------------------


def test_concurrent_threads_get_one_object_and_one_activation(site: Site) -> None:
    log = site.folder / "activations"
    site.install(
        "acme", f"import time; open({str(log)!r}, 'a').write('x'); time.sleep(0.2); {HERE.format('acme')}"
    )
    code = """
import threading
from sgl_aspects.platforms import current_platform, current_platform_choice
found, start = [], threading.Barrier(8)
def ask():
    start.wait()
    found.append((current_platform.device_name, id(current_platform_choice().platform)))
threads = [threading.Thread(target=ask) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
assert len(found) == 8 and len(set(found)) == 1, found
assert found[0][0] == "acme"
"""
    site.run(code)
    assert log.read_text() == "x"


def test_the_choice_is_the_same_in_forked_and_spawned_children(site: Site) -> None:
    site.install("acme", HERE.format("acme"))
    script = site.folder / "children.py"
    script.write_text(
        "import multiprocessing, pickle, warnings\n"
        "from sgl_aspects.platforms import current_platform, is_cpu, is_out_of_tree\n"
        "def ask(platform, answers):\n"
        "    answers.put((platform.device_name, is_out_of_tree(), is_cpu(), platform is current_platform))\n"
        "if __name__ == '__main__':\n"
        "    warnings.simplefilter('ignore')\n"
        "    for asked_before in (False, True):\n"
        "        if asked_before:\n"
        "            assert current_platform.device_name == 'acme'\n"
        "        for method in ('fork', 'spawn', 'forkserver'):\n"
        "            context = multiprocessing.get_context(method)\n"
        "            answers = context.Queue()\n"
        "            child = context.Process(target=ask, args=(current_platform, answers))\n"
        "            child.start()\n"
        "            assert answers.get(timeout=60) == ('acme', True, False, True), method\n"
        "            child.join(60)\n"
        "            assert child.exitcode == 0\n"
    )
    site.run(script.read_text(), script=script)


def test_the_command_prints_what_was_found_as_json(site: Site) -> None:
    site.install("acme", HERE.format("acme"))
    site.install("bolt", ABSENT)
    code = "import sys; from sgl_aspects.cli.main import main; sys.exit(main(['platforms', '--json']))"
    report = json.loads(site.run(code))
    assert report["chosen"] == "acme"
    assert {c["name"]: c["chosen"] for c in report["candidates"]}["acme"] is True
    reasons = {c["name"]: (c["source"], c["reason"]) for c in report["candidates"]}
    assert reasons["bolt"] == ("bolt-dist 1.2", "its plugin found no hardware")
    assert reasons["cpu"] == ("built-in", "not queried: a plugin comes first")
    assert report["platform"]["class"] == "acme_pkg.platform:Platform"
    assert report["capabilities"]["graph_capture"] is False
    site.install("core", HERE.format("core"))
    failed = json.loads(site.run(code, status=2))
    assert failed["chosen"] is None
    assert "'core' of core-dist 1.2" in failed["error"]
    assert {"name": "acme", "source": "acme-dist 1.2"} in failed["candidates"]
