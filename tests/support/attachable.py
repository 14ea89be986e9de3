"""Programs that run without sgl-aspects, and commands that attach to them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_aspects.attach.process_tree import read_process
from tests.support.processes import wait_until

# A program that prints each change of its class's function, and counts its own objects.
PROGRAM = """
import os, sys, threading, time

class Shop:
    def sell(self, item, count=1):
        return len(item) * count

def wrap(text):
    return text.upper()

def state():
    return "original" if [id(vars(Shop)["sell"]), id(wrap), id(TABLE["wrap"])] == ORIGINALS else "woven"

TABLE = {"wrap": wrap}
# Not the functions themselves: weaving would replace them here, too.
ORIGINALS = [id(vars(Shop)["sell"]), id(wrap), id(wrap)]

if __name__ == "__main__":
    import program
    shop, last, pause = program.Shop(), "", float(sys.argv[1])
    while True:
        assert shop.sell("tea", count=2) == 6 and program.TABLE["wrap"]("a") == "A"
        found = program.state()
        if found != last:
            last = found
            print(found, threading.active_count(), len(os.listdir("/proc/self/fd")), flush=True)
        if pause:
            time.sleep(pause)
"""
ASPECTS = """
[[trace]]
target = "program:Shop.sell"
name = "sell"
[trace.attributes]
"item" = "item"
"total" = "result"

[[trace]]
target = "program:wrap"
"""
SECONDS = 120.0


@dataclass
class Program:
    """A running program, and its output."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def id(self) -> int:
        return self.process.pid

    @property
    def said(self) -> list[str]:
        return (self.folder / "output").read_text().splitlines()

    @property
    def states(self) -> list[str]:
        return [line.split()[0] for line in self.said]

    def lives(self) -> bool:
        return self.process.poll() is None


def python_of(version: str) -> str | None:
    """An interpreter of this version, where this machine has one."""
    candidates: list[str | Path] = [
        f"python{version}",
        *Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"),
    ]
    for candidate in candidates:
        program = shutil.which(candidate)
        if program is not None:
            done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
            if done.stdout.startswith(f"Python {version}."):
                return program
    return None


@contextmanager
def running(
    folder: Path,
    *,
    source: str = PROGRAM,
    interpreter: str = sys.executable,
    prefix: Sequence[str] = (),
    pause: float = 0.001,
) -> Iterator[Program]:
    """Run the program in a process whose environment has no variable of sgl-aspects."""
    (folder / "program.py").write_text(textwrap.dedent(source))
    (folder / "aspects.toml").write_text(ASPECTS)
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("SGL_", "OTEL_", "PYTHON"))
    }
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*prefix, interpreter, "program.py", str(pause)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=clean,
        )
    program = Program(process, folder)
    try:
        wait_until(lambda: bool(program.said) or not program.lives() or not pause, SECONDS)
        yield program
    finally:
        process.kill()
        process.wait()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "sgl_aspects", *words]


def attaching(program: Program, *words: str, spans: str = "spans.jsonl") -> subprocess.Popen[str]:
    """``sgl-aspects attach``, begun."""
    flags = ["--config", str(program.folder / "aspects.toml"), "--file", str(program.folder / spans)]
    return subprocess.Popen(
        command("attach", str(program.id), *flags, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """The output of the command, once it has ended."""
    output, _ = process.communicate(timeout=SECONDS)
    return output


def kill_command(process: subprocess.Popen[str]) -> None:
    """``kill -9`` of the attaching command alone: its guard is in a session of its own."""
    process.kill()
    process.communicate()


def run_folder(process: subprocess.Popen[str]) -> Path | None:
    """The run of this attaching command, as soon as it has one: found by its guard."""
    for child in _children(process.pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "sgl_aspects.attach.operation" in words:
            return Path(words[words.index("sgl_aspects.attach.operation") + 1])
    return None


def _children(parent: int) -> list[int]:
    found = [read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return [process.id for process in found if process is not None and process.parent == parent]


def spans_in(file: Path) -> list[dict[str, Any]]:
    """Return the spans of an OTLP-JSON file, as dictionaries."""
    return [
        span
        for line in file.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def attribute_names(span: dict[str, Any]) -> set[str]:
    return {one["key"] for one in span.get("attributes", ())}


def span_names(file: Path) -> list[str]:
    return [span["name"] for span in spans_in(file)]
