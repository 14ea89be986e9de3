"""Runs the test suites of well-known packages bare and with everything hooked, and prints what then fails.

`make test-hooked` runs it in an environment that has the packages; arguments name some of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".hooked-venv" / "suites"
KINDS = ("observe", "before", "after", "around", "native")

SUITES = {
    "attrs": ("attr", "tests"),
    "click": ("click", "tests"),
    "h11": ("h11", "h11/tests"),
    "httpx": ("httpx", "tests"),
    "jinja2": ("jinja2", "tests"),
    "more-itertools": ("more_itertools", "tests"),
    "packaging": ("packaging", "tests"),
    "pluggy": ("pluggy", "testing"),
    "requests": ("requests", "tests"),
    "starlette": ("starlette", "tests"),
    "wrapt": ("wrapt", "tests"),
}
"""Distributions: the package whose functions are hooked, and where its tests are in the sdist."""

PLUGIN = """
import json, os
from sgl_aspects.weaving import HookType, Target, Advice, observe, weave

package, kind = os.environ["HOOKED_PACKAGE"], os.environ["HOOKED_KIND"]
hooks = {
    "before": lambda *args, **kwargs: None,
    "after": lambda result, /, *args, **kwargs: None,
    "around": lambda original_fn, /, *args, **kwargs: original_fn(*args, **kwargs),
    "native": lambda proceed, args, kwargs: proceed(args, kwargs),
    "observe": observe("x:y", enter=lambda args, kwargs: None, exit=lambda token, result, error: None).hook,
}
if kind != "bare":
    for names in ("*", "*.*"):
        weave(Advice(Target.parse(f"{package}.**:{names}"), HookType(kind), hooks[kind]))
passed = []

def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        passed.append(report.nodeid)

def pytest_unconfigure(config):
    with open(os.environ["HOOKED_RESULT"], "w") as file:
        json.dump(passed, file)
"""


def unpacked(name: str) -> Path:
    """Return the folder with the sdist of the installed version of a distribution."""
    version = importlib.metadata.version(name)
    folder = WORK / f"{name.replace('-', '_')}-{version}"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, f"--dest={WORK}", f"{name}=={version}"], check=True)
        with tarfile.open(folder.with_name(f"{folder.name}.tar.gz")) as archive:
            archive.extractall(WORK, filter="data")
    return folder


def passing(name: str, kind: str) -> set[str]:
    """Return the tests of a distribution that pass with hooks of this kind on everything."""
    package, tests = SUITES[name]
    result = WORK / f"{name}-{kind}.json"
    result.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(WORK),
        "HOOKED_PACKAGE": package,
        "HOOKED_KIND": kind,
        "HOOKED_RESULT": str(result),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hook_everything", "-p", "no:cacheprovider", tests]
    with (WORK / f"{name}-{kind}.log").open("w") as log:
        subprocess.run(command, cwd=unpacked(name), env=environment, stdout=log, stderr=log, timeout=1800)
    return set(json.loads(result.read_text())) if result.exists() else set()


def main(names: list[str]) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / "hook_everything.py").write_text(PLUGIN)
    print("| suite | pass bare |", *(f"{kind} |" for kind in KINDS))
    print("| --- |", *["---: |"] * (len(KINDS) + 1))
    for name in names or SUITES:
        # What passes twice: a test that fails by itself at times is not the hooks' fault.
        bare = passing(name, "bare") & passing(name, "bare")
        failing = [sorted(bare - passing(name, kind)) for kind in KINDS]
        print(
            f"| {name} {importlib.metadata.version(name)} | {len(bare):,} |",
            *(f"{len(f)} |" for f in failing),
        )
        sys.stdout.flush()
        for kind, tests in zip(KINDS, failing):
            for test in tests:
                print(f"{name}, {kind}: {test}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
