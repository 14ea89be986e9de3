"""The cost of importing, and the contents of the wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import sgl_aspects
from tests.support.builds import sources
from tests.support.processes import output_of, python
from tests.support.tree import PACKAGE, ROOT, modules


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import sgl_aspects", ["torch", "opentelemetry", "numpy", "sgl_aspects.tracing"]),
        ("import sgl_aspects.platforms", ["opentelemetry", "sgl_aspects.tracing"]),
        ("import sgl_aspects.runtime", ["opentelemetry", "sgl_aspects.tracing"]),
        ("import sgl_aspects; sgl_aspects.load_plugins()", ["torch", "opentelemetry"]),
        ("import sgl_aspects.runtime.engine, sgl_aspects.runtime.dispatch", ["torch._dynamo", "sympy"]),
        ("import tests.support.workers", ["torch"]),  # which spawned children do
    ],
)
def test_importing_loads_no_more_than_it_must(statement: str, absent: list[str]) -> None:
    program = f"{statement}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_does_nothing_else() -> None:
    program = (
        "import sys, threading, logging; path, hooks = list(sys.meta_path), list(sys.path_hooks);"
        "import sgl_aspects; assert sys.meta_path == path and sys.path_hooks == hooks;"
        "assert threading.active_count() == 1; assert not logging.getLogger('sgl_aspects').handlers"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_exports_equal_all() -> None:
    public = {name for name in vars(sgl_aspects) if not name.startswith(("_", "@"))}  # @: pytest's
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert public - rooms == set(sgl_aspects.__all__) - {"__version__"}


def test_the_changelog_begins_with_this_version_and_the_chart_has_it() -> None:
    versions = [
        line.split()[1] for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line[:3] == "## "
    ]
    assert versions[0] == sgl_aspects.__version__
    chart = (ROOT / "examples" / "kubernetes" / "chart" / "Chart.yaml").read_text()
    assert f"\nversion: {sgl_aspects.__version__}\n" in chart


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a source distribution, as the package index would get both."""
    out = tmp_path_factory.mktemp("dist")
    output_of(python("-m", "build", "--no-isolation", "--outdir", out, sources(out)))
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_no_top_level_rooms(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for room, path in modules():
        linked = room in ("platforms", "runtime")
        inside = path.relative_to(ROOT if linked else PACKAGE)
        assert f"sgl_aspects/{inside}" in names
    assert "sgl_aspects/py.typed" in names
    assert "sgl_aspects/runtime/dispatch/platform_files/sample.yaml" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"sgl_aspects"}


def test_the_wheel_holds_the_templates_of_new_platform(wheel: Path) -> None:
    from sgl_aspects.cli.new_platform import TEMPLATES

    held = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "/vendor_template/" in name}
    assert held == {f"{name}.tmpl" for name in TEMPLATES}


def test_the_wheel_holds_the_report_page(wheel: Path) -> None:
    folder = PACKAGE / "view" / "page"
    parts = {
        path.relative_to(PACKAGE.parent)
        for path in folder.rglob("*")
        if path.suffix in (".js", ".css", ".html")
    }
    assert {str(part) for part in parts} <= set(zipfile.ZipFile(wheel).namelist())
    assert "sgl_aspects/view/page/vendor/uPlot-LICENSE" in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_the_compiled_step_path_without_its_sources(wheel: Path) -> None:
    folder = "sgl_aspects/tracing/record/native/"
    held = {
        name.removeprefix(folder) for name in zipfile.ZipFile(wheel).namelist() if name.startswith(folder)
    }
    if shutil.which(sysconfig.get_config_var("CC").split()[0]) is None:
        pytest.skip("there is no C compiler here")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert held == {"__init__.py", "fields.py", f"_decode_path{suffix}"}


def test_installed_from_the_wheel_the_rooms_are_found_without_the_checkout(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import sgl_aspects, sgl_aspects.platforms, sgl_aspects.runtime\n"
        "assert sgl_aspects.runtime.__file__.startswith(sys.argv[1]), sgl_aspects.runtime.__file__"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=tmp_path)
