"""The habits of test files, and plain words in all files."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

from tests.support.tree import ROOT, imported, tree_of

MOST_LINES = 400
#: Older files that are longer, with the length that they may not exceed: the list only shrinks.
LONGER = {
    "dispatch/test_dispatch.py": 870,
    "dispatch/test_faults.py": 428,
    "dispatch/test_watch.py": 591,
    "engines/sglang/test_server.py": 700,
    "platforms/test_devices.py": 440,
    "platforms/test_discovery.py": 500,
    "platforms/test_platforms.py": 536,
    "runtime/test_parts.py": 546,
    "runtime/test_scheduler.py": 432,
    "runtime/test_server.py": 450,
    "support/broken_platforms.py": 493,
    "support/sglang_registry_cases.py": 774,
    "tracing/test_collector.py": 426,
    "tracing/test_current.py": 455,
    "tracing/test_engine.py": 458,
    "tracing/test_metrics.py": 408,
    "tracing/test_otlp.py": 429,
    "weaving/test_classes.py": 773,
    "weaving/test_hooks.py": 689,
    "weaving/test_hostile.py": 461,
    "weaving/test_importing.py": 908,
    "weaving/test_kinds.py": 1077,
    "weaving/test_rebinding.py": 793,
    "weaving/test_registry.py": 530,
    "weaving/test_targets.py": 584,
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


#: What a reader has to translate, and what to say.
PLAIN = {
    r"(?<!here )\b(is|are|was|were) no (?!longer|more|other|less|later|earlier|need|way|such|matter)[a-z]": (
        "is not a"
    ),
    r"_(is|are|was|were)_no_(?!longer|more)": "is not a, in names too",
    r"\bso (many|much)\b(?! (as|that|more|less|faster))": "the number, or its name",
    r"\bfor ever\b": "forever, or what never happens",
    r"\bwhoever\b": "the caller, the reader, the process",
}
#: Personification and dialect, looked for in comments, docstrings and pages: code reads, calls, reports, has.
PROSE = {
    r"\b(asked|asks|asking)\b": "is called, reads, queries, requires",
    r"\b(told|tells|says|said|speaks)\b": "reports, shows, returns, records",
    r"\b(knows|wants|heard of|hears of)\b": "has, needs, gets",
    r"\b(nobody|somebody|anybody)\b": "no process, another user, the caller",
    r"\b(stands? in for|stood in for|stand-ins?)\b": "replaces, a fake",
    r"\b(gives? way|gave way|in vain)\b": "is preempted, fails",
    r"\b(stand|stands|stood|standing) (there|here)\b": "is installed, is",
    r"\b(in|takes?|taking) the place of\b": "replaces, instead of",
    r"\b(take|takes|taken|taking) (\w+ ){0,3}(off|away)\b": "removes",
    r"\b(lets?|letting) (\w+ )?go\b": "releases",
    r"\b(sees?|seen|saw) to\b": "handles, installs",
    r"\b(becomes?|became) of\b": "the outcome, the number",
    r"\b(all the same|for good|none of both)\b": "nonetheless, permanently, neither",
    r"[,;.] (would|should|were|had) (the|an?|its?|this|they)\b": "a clause with if",
}
FOLDERS = ("sgl_aspects", "platforms", "runtime", "tests", "benchmarks", "examples", "docs")
#: Rooms with such words, and how many: the list only shrinks.
LEFT: dict[str, int] = {}


@cache
def prose_lines(source: str) -> set[int]:
    """The lines of comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', 'r"""'))
        if token.type == tokenize.COMMENT or is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def test_texts_are_plain() -> None:
    faults: dict[str, list[str]] = {}
    pages = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    for path in pages:
        if path.suffix not in (".py", ".md", ".tmpl", ".c", ".h") or path == Path(__file__):
            continue
        name, text = str(path.relative_to(ROOT)), path.read_text()
        for patterns in (PLAIN, {} if name.startswith(("CHANGELOG", "docs/conformance")) else PROSE):
            for pattern, better in patterns.items():
                for match in re.finditer(pattern, text, re.IGNORECASE):
                    room, number = "/".join(name.split("/")[:2]), text.count("\n", 0, match.start()) + 1
                    if patterns is PLAIN or path.suffix != ".py" or number in prose_lines(text):
                        faults.setdefault(room, []).append(f"{name}:{number}: {match[0]!r}: say {better}")
    more = [each for room, found in faults.items() if len(found) > LEFT.get(room, 0) for each in found]
    assert not more, "\n".join(more)


#: Words with which no verb or noun phrase begins.
BEGINNINGS = re.compile(
    r"(What|Whose|Whoever|Whether|Where|When|Likewise|Ours|As|By|Of|Or|And|So|Also|Only|Here)\b"
)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    faults = []
    for folder in (*set(FOLDERS) - {"tests"}, "tests/support"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = ast.get_docstring(node) or ""
                    if BEGINNINGS.match(text):
                        faults.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]!r}")
    assert not faults, "\n".join(faults)


def test_the_earlier_name_of_the_test_server_is_the_same_module() -> None:
    """Scripts outside of the tree, for GPU machines, set its options under that name."""
    from tests import sglang_server as earlier
    from tests.support import sglang_server

    assert earlier is sglang_server
