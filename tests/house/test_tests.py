"""The habits of test files."""

from __future__ import annotations

import re

from tests.support.tree import ROOT, imported

MOST_LINES = 400
#: Older files that are longer, with the length that they may not exceed: the list only shrinks.
LONGER = {
    "dispatch/test_dispatch.py": 758,
    "engines/sglang/test_server.py": 591,
    "platforms/test_devices.py": 435,
    "platforms/test_discovery.py": 426,
    "platforms/test_platforms.py": 487,
    "runtime/test_server.py": 445,
    "support/broken_platforms.py": 458,
    "support/sglang_registry_cases.py": 655,
    "tracing/test_collector.py": 415,
    "tracing/test_current.py": 454,
    "weaving/test_classes.py": 638,
    "weaving/test_hooks.py": 628,
    "weaving/test_importing.py": 740,
    "weaving/test_kinds.py": 1018,
    "weaving/test_rebinding.py": 635,
    "weaving/test_registry.py": 494,
    "weaving/test_targets.py": 551,
}


def test_a_test_file_has_at_most_four_hundred_lines() -> None:
    faults = []
    for path in (ROOT / "tests").rglob("*.py"):
        name, count = str(path.relative_to(ROOT / "tests")), path.read_text().count("\n")
        most = LONGER.get(name, MOST_LINES)
        if count > most:
            faults.append(f"tests/{name}: {count} lines, {most} are allowed: split it by behaviour")
    assert not faults, "\n".join(faults)


def test_the_list_of_longer_test_files_shrinks_with_them() -> None:
    for name, most in LONGER.items():
        path = ROOT / "tests" / name
        count = path.read_text().count("\n") if path.exists() else 0
        assert count > MOST_LINES, f"LONGER: {name} has {count} lines: take it off the list"
        assert most - count < 40, f"LONGER: {name} has {count} lines: lower its number"


def test_no_test_file_imports_another() -> None:
    """Helpers of several files are in tests/support."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for line, name in imported(path)
        if name.startswith("tests.") and re.search(r"\.test_", name)
    ]
    assert not faults, "\n".join(faults)


def test_the_earlier_name_of_the_test_server_is_the_same_module() -> None:
    """Scripts outside of the tree, for GPU machines, set its options under that name."""
    from tests import sglang_server as earlier
    from tests.support import sglang_server

    assert earlier is sglang_server
