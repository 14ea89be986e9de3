"""Imports between rooms, the size of folders, and names that have one place only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sgl_aspects.engines import BUILT_IN
from sgl_aspects.tracing import schema
from tests.support.tree import PACKAGE, ROOT, classes, imported, modules, tree_of, written


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


def test_imports_point_one_way() -> None:
    faults = []
    for room, path in modules():
        if room not in ALLOWED:  # cli, the package's public API
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


def test_the_table_grants_what_is_used_and_no_more() -> None:
    used: dict[str, set[str]] = {}
    packages = {"torch": "torch", "opentelemetry": "OpenTelemetry", "wrapt": "wrapt"}
    for room, path in modules():
        for _, name in imported(path):
            first, *rest = name.split(".")
            if first == "sgl_aspects" and rest:
                used.setdefault(room, set()).add(rest[0])
            elif first in packages:
                used.setdefault(room, set()).add(packages[first])
    unused = {room: allowed - used.get(room, set()) - {room} for room, allowed in ALLOWED.items()}
    assert not {room: names for room, names in unused.items() if names}


@pytest.mark.parametrize(
    ("room", "folder"), [("runtime", ROOT / "runtime"), ("tracing", PACKAGE / "tracing")]
)
def test_parts_of_a_room_import_what_their_row_names_from_the_rows_above(room: str, folder: Path) -> None:
    """A part is a folder or a module of the room; docs/architecture.md lists them from the lowest up."""
    rows = re.findall(
        rf"^\| `{room}/(\w+)(?:/|\.py)` \| [^|]+ \| ([^|]*)\|$",
        (ROOT / "docs" / "architecture.md").read_text(),
        re.MULTILINE,
    )
    used: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        part = path.relative_to(folder).parts[0].removesuffix(".py")
        names = [name.split(".") for _, name in imported(path) if name.startswith(f"sgl_aspects.{room}.")]
        used.setdefault(part, set()).update(name[2] for name in names if name[2] != part)
    used.pop("__init__")  # the public API of all of them
    assert {part: set(re.findall(r"`(\w+)`", names)) for part, names in rows} == used
    for number, (part, _) in enumerate(rows):
        below = {lower for lower, _ in rows[:number]}
        assert used[part] <= below, f"{part} imports {sorted(used[part] - below)}"


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


def test_an_engines_name_and_its_classes_stand_only_in_its_own_room() -> None:
    targets: dict[str, set[str]] = {}
    for engine in BUILT_IN:
        if engine.name != "embedded":
            room = engine.name.partition("-")[0]  # of one package or two engines of it
            its_targets = {target for role in engine.roles.values() for target in role.targets}
            targets.setdefault(room, set()).update(its_targets)
    ours = {name for _, path in modules() for name in classes(path)}
    faults = []
    for name, its_targets in targets.items():
        packages = {target.partition(".")[0] for target in its_targets} | {name}
        its_classes = {target.partition(":")[2].partition(".")[0] for target in its_targets} - ours
        its_classes = {each for each in its_classes if each.isidentifier() and not each.islower()}
        # transformers is also the library that models are compared with; a router's servicer has parts for
        # several engines; a pattern (torch*) is no engine's.
        packages = {each for each in packages if each.isidentifier()} - {"transformers", "smg_grpc_servicer"}
        words = [*sorted(its_classes), *sorted(packages)]
        found = re.compile(rf"\b({'|'.join(words)})(?=\b|_)", re.IGNORECASE)
        for _, path in modules():
            relative = str(path.relative_to(ROOT))
            if relative.startswith((f"sgl_aspects/engines/{name}/", "sgl_aspects/engines/__init__")):
                continue
            if relative in PUBLIC_FILES or not found.search(path.read_text()):
                continue
            for line, text in written(path):
                kept = re.sub(rf"\b({'|'.join(PUBLIC_NAMES)})\b", "", text)
                if found.search(kept):
                    faults.append(f"{relative}:{line}: {text!r} is {name}'s")
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


def test_the_page_has_the_names_of_attributes_from_the_schema() -> None:
    """In ``names``, by the constant: an attribute that is renamed in the schema is renamed in the page."""
    text = "".join(path.read_text() for path in (PACKAGE / "view" / "page").glob("*.js"))
    assert not re.findall(r"[\"'`](?:gen_ai|sgl_aspects|http|error)\.[\w.]+", text)
    wanted = set(re.findall(r"\bnames\.([A-Z_]+)", text))
    assert "MODE" in wanted
    assert not [name for name in wanted if not isinstance(getattr(schema, name, None), (str, tuple))]


# Folders of like things: devices, commands, checks. The weaver's core is one idea in many small modules.
LIKE_THINGS = {"platforms", "cli", "conformance", "weaving"}


def test_a_folder_has_at_most_fourteen_modules() -> None:
    for top in (PACKAGE, PACKAGE.parent / "runtime", PACKAGE.parent / "platforms"):
        for folder in {path.parent for path in top.rglob("*.py")} - {PACKAGE / "cli"}:
            found = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
            assert folder.name in LIKE_THINGS or len(found) <= 14, f"{folder}: {sorted(found)}"


def test_the_loader_imports_no_layer_or_model() -> None:
    for path in (ROOT / "runtime" / "loader").glob("*.py"):
        for line, name in imported(path):
            assert not name.startswith(("sgl_aspects.runtime.models", "sgl_aspects.runtime.ops")), (
                f"{path}:{line}"
            )


def test_every_module_stands_in_a_room_of_the_table() -> None:
    free = {"cli", "__init__", "__main__", "_version", "pytest_plugin"}
    assert {room for room, _ in modules()} - free == set(ALLOWED)


def test_the_engine_imports_the_plugin_loader_and_nothing_else_that_watches_it() -> None:
    found = {
        name
        for room, path in modules()
        if room in ("platforms", "runtime")
        for _, name in imported(path)
        if name.startswith("sgl_aspects.plugins")
    }
    assert found <= {"sgl_aspects.plugins.load_plugins"}


def test_modules_of_the_weaving_core_are_private() -> None:
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
    *("targets", "attributes", "hooks", "chain", "templates", "functions", "descriptors", "referrers"),
    *("rebinding", "joinpoints", "modules", "changes", "machine", "api", "__init__"),
)


def test_modules_of_the_weaving_core_point_one_way() -> None:
    """Each module imports from those before it: the list is the order to read them in."""
    paths = {path.stem: path for path in (PACKAGE / "weaving").glob("*.py")}
    assert set(paths) == set(WEAVING)
    assert len(paths.keys() - {"__init__"}) <= 14
    for index, name in enumerate(WEAVING):
        for line, imported_name in imported(paths[name]):
            parts = imported_name.split(".")
            if parts[:2] == ["sgl_aspects", "weaving"]:
                assert parts[2] in WEAVING[:index], f"{name}:{line}: imports {imported_name}"


def test_no_room_is_imported_by_its_bare_folder_name() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for line, name in imported(path):
            assert name.split(".")[0] not in ("platforms", "runtime"), f"{path}:{line}"


def test_the_runtime_names_no_device() -> None:
    """It queries the platform. An operator's form for one dispatch key has a name of its own."""
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
