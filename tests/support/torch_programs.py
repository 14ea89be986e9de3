"""Programs in processes that begin with torch imported, forked from one that has imported it.

Importing torch takes longer than most of what such a program does. A program that must not have torch, or
must be a fresh interpreter, is started as usual.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# A forked child leaves the loop, runs the program as __main__, and ends as any interpreter does.
_PARENT = """
import gc, json, os, sys
import torch
gc.freeze()  # or each program would search torch's heap for garbage at its end, for half a second
for line in sys.stdin:
    wanted = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, wanted["out"], wanted["err"])):
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.dup2(file, number)
    os.close(file)
os.environ.clear()
os.environ.update(wanted["env"])
sys.path[1:1] = filter(None, wanted["env"].get("PYTHONPATH", "").split(os.pathsep))
exec(compile(wanted["code"], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
"""
SECONDS = 120


@functools.cache
def _parent() -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_with_torch(code: str, environment: Mapping[str, str], folder: Path) -> tuple[int, str, str]:
    """Run ``code`` with exactly these variables: its exit status, standard output and standard error."""
    parent, out, err = _parent(), folder / "program.out", folder / "program.err"
    for file in (out, err):
        file.write_text("")
    assert parent.stdin is not None
    assert parent.stdout is not None
    wanted = {"code": code, "env": dict(environment), "out": str(out), "err": str(err)}
    parent.stdin.write(json.dumps(wanted) + "\n")
    parent.stdin.flush()
    answered, _, _ = select.select([parent.stdout], [], [], SECONDS)
    if not answered:
        parent.kill()
        _parent.cache_clear()
        raise TimeoutError(f"the program has not ended within {SECONDS} s: {err.read_text()}")
    return int(parent.stdout.readline()), out.read_text(), err.read_text()
