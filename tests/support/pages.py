"""Pages: their blocks of code, and their commands run as printed."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import free_port
from tests.support.tree import ROOT

# `sgl-aspects`, which finds the only run of the machine. Where the tests of others run beside this one, it is
# given: the run of a process in this folder.
_OURS = """#!/bin/sh
case "$1 $*" in
"control "*|"dump "*|"top "*|"report report -o"*)
    for ring in /dev/shm/sgl-aspects-*/*.ring; do
        process=${ring##*/}
        if [ "$(readlink /proc/${process%%-*}/cwd)" = "$PWD" ]; then run=${ring%/*}; fi
    done
    command=$1; shift
    if [ "$command" = report ]; then set -- "$run" "$@"; else set -- --run "$run" "$@"; fi
    set -- "$command" "$@" ;;
esac
exec PYTHON -m sgl_aspects "$@"
"""
_PYTHON = '#!/bin/sh\nexec PYTHON "$@"\n'
# Into a folder of the test's. This package with its extras is there already.
_PIP = """#!/bin/sh
case "$*" in *'.['*) exit 0 ;; esac
shift
exec PYTHON -m pip install -qq --no-deps --no-build-isolation --target SITE "$@"
"""


def made_by(script: str) -> Any:
    """Return the module of a script in docs/, which makes a page of the code."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "docs" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        if line.strip().startswith("```"):
            if start is None:
                start = number
            else:
                text = "\n".join(lines[start + 1 : number]) + "\n"
                yield Block(page, start + 2, lines[start].strip()[3:], text)
                start = None
    assert start is None, f"{page}: a code block has no end"


def run_script(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a page's commands in ``folder/work``, and end what they started; 8000 is a port that is free."""
    tools, work, site = (folder / name for name in ("bin", "work", "site"))
    for made in (tools, work, site):
        made.mkdir(exist_ok=True)
    for tool, text in {"sgl-aspects": _OURS, "python": _PYTHON, "pip": _PIP}.items():
        for word, path in (("PYTHON", sys.executable), ("SITE", str(site))):
            text = text.replace(word, shlex.quote(path))
        (tools / tool).write_text(text)
        (tools / tool).chmod(0o755)
    kept = {key: text for key, text in os.environ.items() if not key.startswith(("OTEL_", "SGL"))}
    environment: Mapping[str, str] = {
        **kept,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(work), str(site), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "TERM": "dumb",
        **variables,
    }
    script = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + script.replace("8000", str(free_port()))
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        start_new_session=True,
    )
