"""The rules of the house: which room may import which, what importing costs, what the wheel holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import sgl_aspects
from sgl_aspects.engines import BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sgl_aspects"


def rooms() -> dict[str, set[str]]:
    """Each room of the table in docs/architecture.md, with everything that it may import."""
    found = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        row = re.fullmatch(r"\| `(\w+)/?` \| [^|]+ \| ([^|]*) ?\|", line)
        if row:
            allowed, _, packages = row[2].partition(";")
            names = set(re.findall(r"`(\w+)`", allowed))
            found[row[1]] = {row[1]} | names | {name.strip() for name in packages.split(",") if packages}
    return found


ALLOWED = rooms()


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package with its room; the links lead into platforms/ and runtime/."""
    for room in ("platforms", "runtime"):
        for path in (ROOT / room).rglob("*.py"):
            yield room, path
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        if relative.parts[0] not in ("platforms", "runtime"):
            yield relative.parts[0].removesuffix(".py"), path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module name that ``path`` imports anywhere, with its line."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def test_imports_point_one_way() -> None:
    faults = []
    for room, path in modules():
        if room not in ALLOWED:  # cli, the package's own face
            continue
        for line, name in imported(path):
            parts = name.split(".")
            if parts[0] == "sgl_aspects" and len(parts) > 1 and parts[1] not in ALLOWED[room]:
                faults.append(f"{path}:{line}: {room} imports {name}")
            if parts[0] == "torch" and "torch" not in ALLOWED[room]:
                faults.append(f"{path}:{line}: {room} imports torch")
            if parts[0] == "opentelemetry" and "OpenTelemetry" not in ALLOWED[room]:
                faults.append(f"{path}:{line}: {room} imports OpenTelemetry")
    assert not faults, "\n".join(faults)


# Names of engines that users write, wherever they are read; and files that bear one.
PUBLIC_NAMES = (
    "SGLANG_PLATFORM",
    "SGLANG_PLUGINS",
    "SGLANG_PLUGINS_GROUP",
    "SGLANG_PLATFORMS_GROUP",
    "sglang.srt.plugins",
    "sglang.srt.platforms",
)
PUBLIC_FILES = ("platforms/sglang_bridge.py", "sgl_aspects/cli/new_platform.py")


def written(path: Path) -> Iterator[tuple[int, str]]:
    """Every name, attribute, import and text of a module, but for comments and docstrings."""
    tree = tree_of(path)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
    yield from imported(path)


def test_an_engines_name_and_its_classes_stand_only_in_its_own_room() -> None:
    targets = {
        engine.name: {target for role in engine.roles.values() for target in role.targets}
        for engine in BUILT_IN
        if engine.name != "embedded"
    }
    ours = {node.name for _, path in modules() for node in classes(path)}
    faults = []
    for name, its_targets in targets.items():
        packages = {target.partition(".")[0] for target in its_targets} | {name}
        its_classes = {target.partition(":")[2].partition(".")[0] for target in its_targets} - ours
        its_classes = {each for each in its_classes if each.isidentifier() and not each.islower()}
        # transformers is also the library that models are compared with.
        words = [*sorted(its_classes), *sorted(packages - {"transformers"})]
        found = re.compile(rf"\b({'|'.join(words)})(?=\b|_)", re.IGNORECASE)
        for _, path in modules():
            relative = str(path.relative_to(ROOT))
            if relative.startswith((f"sgl_aspects/engines/{name}/", "sgl_aspects/engines/__init__")):
                continue
            for line, text in written(path):
                kept = re.sub(rf"\b({'|'.join(PUBLIC_NAMES)})\b", "", text)
                if found.search(kept) and relative not in PUBLIC_FILES:
                    faults.append(f"{relative}:{line}: {text!r} is {name}'s")
    assert not faults, "\n".join(faults)


def classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            yield node


# Within tracing, low to high: a layer imports its own and those before it.
TRACING = (
    ("records", "schema"),
    ("content", "options", "context"),
    ("sampling", "recorder", "logs", "ring", "control", "settings", "export", "run_folder"),
    ("lifecycle", "observers"),
    ("collector", "sdk"),
    ("session", "plugin"),
)
# Who starts a collector knows what it is asked and what it reports; the metrics know one of its sums.
UPWARD = {("run_folder", "collector"), ("settings", "collector"), ("export", "collector")}


def test_layers_of_tracing_point_one_way() -> None:
    height = {name: number for number, layer in enumerate(TRACING) for name in layer}
    faults = []
    for path in (PACKAGE / "tracing").rglob("*.py"):
        own = path.relative_to(PACKAGE / "tracing").parts[0].removesuffix(".py")
        for line, name in imported(path):
            parts = name.split(".")
            if parts[:2] != ["sgl_aspects", "tracing"] or own == "__init__" or len(parts) < 3:
                continue
            if height.get(parts[2], 0) > height[own] and (own, parts[2]) not in UPWARD:
                faults.append(f"{path}:{line}: {own} imports {name}")
    assert not faults, "\n".join(faults)


def test_names_of_spans_attributes_and_metrics_stand_in_the_schema_alone() -> None:
    """Those with a dot: a word such as "queue" means other things, too."""
    schema = PACKAGE / "tracing" / "schema.py"
    names = {text for _, text in written(schema) if "." in text and " " not in text}
    names -= {name for _, name in imported(schema)}
    assert "scheduler.step" in names
    faults = []
    for room, path in modules():
        for line, text in written(path):
            if path != schema and room in ("tracing", "view", "cli", "engines") and text in names:
                faults.append(f"{path}:{line}: {text}")
    assert not faults, "\n".join(faults)


# Folders of like things: devices, commands, checks. The weaver's core is one idea in many small modules.
LIKE_THINGS = {"platforms", "cli", "conformance", "weaving"}


def test_a_folder_has_at_most_fourteen_modules() -> None:
    for top in (PACKAGE, PACKAGE.parent / "runtime", PACKAGE.parent / "platforms"):
        for folder in {path.parent for path in top.rglob("*.py")} - {PACKAGE / "cli"}:
            found = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
            assert folder.name in LIKE_THINGS or len(found) <= 14, f"{folder}: {sorted(found)}"


def test_inside_the_runtime_what_reads_checkpoints_knows_no_layer_or_model() -> None:
    for path in (ROOT / "runtime" / "loader").glob("*.py"):
        for line, name in imported(path):
            assert not name.startswith(("sgl_aspects.runtime.models", "sgl_aspects.runtime.ops")), (
                f"{path}:{line}"
            )


def test_every_module_stands_in_a_room_of_the_table() -> None:
    free = {"cli", "__init__", "__main__", "_version", "pytest_plugin"}
    assert {room for room, _ in modules()} - free == set(ALLOWED)


def test_the_engine_knows_of_the_plugin_loader_and_of_nothing_else_that_watches_it() -> None:
    found = {
        name
        for room, path in modules()
        if room in ("platforms", "runtime")
        for _, name in imported(path)
        if name.startswith("sgl_aspects.plugins")
    }
    assert found <= {"sgl_aspects.plugins.load_plugins"}


def test_nobody_outside_imports_a_module_of_the_weaving_core() -> None:
    faults = [
        f"{path}:{line}: {name}"
        for folder in ("sgl_aspects", "platforms", "runtime", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if "weaving" not in path.relative_to(ROOT).parts[:-1]
        for line, name in imported(path)
        if name.startswith("sgl_aspects.weaving.")
        and (PACKAGE / "weaving" / f"{name.split('.')[2]}.py").exists()
    ]
    assert not faults, "\n".join(faults)


WEAVING = (
    *("targets", "hooks", "attributes", "chain", "functions", "proxies", "rebinding"),
    *("descriptors", "joinpoints", "modules", "table", "core", "api", "__init__"),
)


def test_modules_of_the_weaving_core_point_one_way() -> None:
    """Each module imports from those before it: the list is the order to read them in."""
    paths = {path.stem: path for path in (PACKAGE / "weaving").glob("*.py")}
    assert set(paths) == set(WEAVING)
    assert len(paths) <= 14
    for index, name in enumerate(WEAVING):
        for line, imported_name in imported(paths[name]):
            parts = imported_name.split(".")
            if parts[:2] == ["sgl_aspects", "weaving"]:
                assert parts[2] in WEAVING[:index], f"{name}:{line}: imports {imported_name}"


def test_no_room_is_imported_by_its_bare_folder_name() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for line, name in imported(path):
            assert name.split(".")[0] not in ("platforms", "runtime"), f"{path}:{line}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import sgl_aspects", ["torch", "opentelemetry", "numpy", "sgl_aspects.tracing"]),
        ("import sgl_aspects.platforms", ["opentelemetry", "sgl_aspects.tracing"]),
        ("import sgl_aspects.runtime", ["opentelemetry", "sgl_aspects.tracing"]),
        ("import sgl_aspects; sgl_aspects.load_plugins()", ["torch", "opentelemetry"]),
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


def test_the_face_is_what_all_says() -> None:
    public = {name for name in vars(sgl_aspects) if not name.startswith(("_", "@"))}  # @: pytest's
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert public - rooms == set(sgl_aspects.__all__) - {"__version__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a source distribution, as the package index would get both."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
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


def test_the_runtime_names_no_device() -> None:
    """It asks the platform. A form of an operator for one dispatch key is named by its own name."""
    devices = {"cuda", "npu", "xpu", "musa", "mps", "hpu", "xla", "mtia"}
    queries = {f"is_{name}" for name in (*devices, "rocm", "cpu", "tpu", "cuda_alike", "out_of_tree")}
    faults = []
    for path in (ROOT / "runtime").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if (owner == "torch" and node.attr in devices) or node.attr in queries:
                    faults.append(f"{path}:{node.lineno}: {owner}.{node.attr}")
            elif isinstance(node, ast.Call):
                named = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
                if ast.unparse(node.func).rpartition(".")[2] in ("device", "to", "getattr"):
                    named += node.args
                names = {
                    str(value.value).partition(":")[0] for value in named if isinstance(value, ast.Constant)
                }
                if names & devices:
                    faults.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
        for line, name in imported(path):
            if name.split(".")[0] == "torch" and devices & set(name.split(".")[1:]):
                faults.append(f"{path}:{line}: imports {name}")
    assert not faults, "\n".join(faults)


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
