"""Checks in processes of their own: a fresh one to measure, two to communicate."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from sgl_aspects.isolated import safe_path
from sgl_aspects.plugins import load_plugins

_SECONDS = 180.0


def call_in_processes(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Run ``function(*arguments[i])`` in spawned process ``i``; answers in order. RuntimeError: one failed.

    Such a process runs the platform that SGLANG_PLATFORM chooses.
    """
    spawn = multiprocessing.get_context("spawn")
    links = []
    for words in arguments:
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_work, args=(theirs, function, words), daemon=True)
        with safe_path():
            process.start()
        theirs.close()
        links.append((process, ours))
    patience = 0.0  # if one failed, the others may wait for it endlessly
    try:
        answers = [_answer(process, link) for process, link in links]
        patience = 10.0
        return answers
    finally:
        for process, link in links:
            link.close()
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(process: Any, link: Connection) -> Any:
    if not link.poll(_SECONDS):
        raise RuntimeError(f"a process of the check did not answer within {_SECONDS:.0f} s")
    try:
        succeeded, answer = link.recv()
    except EOFError:
        process.join(10)
        raise RuntimeError(f"a process of the check died, exit code {process.exitcode}") from None
    if not succeeded:
        raise RuntimeError(answer)
    return answer


def _work(link: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    load_plugins()
    try:
        answer = (True, function(*arguments))
    except BaseException as error:  # noqa: BLE001  # SystemExit, too: reported to the calling process
        where = traceback.format_exc().splitlines()[-3].strip()
        answer = (False, f"{type(error).__name__}: {error} ({where})")
    link.send(answer)
