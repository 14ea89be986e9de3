"""Collectors forked from a process that has imported their modules, which is most of a short run's work.

For tests of what is exported. The keeper and the collector run as usual; tests of how they start, and of how
they are killed, start them as an engine does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Collectors of runs that begin in the block are forked."""
    names = ("DEVNULL", "SubprocessError")
    fake = types.SimpleNamespace(run=_run, **{name: getattr(subprocess, name) for name in names})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_aspects.run.collector.subprocess", fake)
        yield


def _run(
    command: Sequence[str], *, env: Mapping[str, str], stdout: int | None, pass_fds: tuple[int], **_: Any
) -> None:
    """Start the keeper, as `subprocess.run` does with these arguments."""
    parent = _parent()
    with open(os.devnull, "wb") as null:
        files = [1 if stdout is None else null.fileno(), 2, *pass_fds]
        # The keeper's own words: a mark, and the collector's command.
        asked = {"words": command[5:], "env": dict(env), "folder": os.getcwd()}
        socket.send_fds(parent, [json.dumps(asked).encode()], files)
    assert parent.recv(1) == b"."


@functools.cache
def _parent() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=Path(__file__).resolve().parents[2],
    )
    theirs.close()
    for last in (process.wait, process.kill, ours.close):  # the last is called first
        atexit.register(last)
    return ours


def _serve(asked: socket.socket) -> None:
    import gc

    import sgl_aspects.collector
    import sgl_aspects.tracing.export.otlp  # noqa: F401

    gc.freeze()
    while True:
        text, files, _, _ = socket.recv_fds(asked, 1 << 20, 3)
        if not text:
            return
        if not (child := os.fork()):
            _keep(files, **json.loads(text))
        for file in files:
            os.close(file)
        os.waitpid(child, 0)
        asked.send(b".")


def _keep(files: list[int], words: list[str], env: dict[str, str], folder: str) -> NoReturn:
    from sgl_aspects.run import keeper

    report = 3
    os.setsid()
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, number + 100)
    for number in range(report + 1):
        os.dup2(number + 100, number)
    os.closerange(report + 1, 200)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    keeper._start = _collect
    mark, *command = words
    keeper.main(report, mark, [*command[:-1], str(report)])
    os._exit(0)


def _collect(command: list[str]) -> int:
    if child := os.fork():
        return child
    from sgl_aspects.collector import main

    code = 1
    try:
        code = main(command[-2:])  # the run folder, and where to report
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
