"""Programs of another user, and commands that root runs on them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects
from tests.support.attachable import ASPECTS, PROGRAM, SECONDS, Program
from tests.support.processes import wait_until

NOBODY = 65534


@functools.cache
def _paths() -> list[str]:
    """Return folders with the package and what it imports, which every user can read.

    A checkout in a private folder is copied, by hard links. Skips the test where that does not help.
    """
    package = Path(sgl_aspects.__file__).parent
    found = [str(package.parent), *(path for path in sys.path if "site-packages" in path)]
    if _can_read(found):
        return found
    top = tempfile.mkdtemp(dir="/tmp")
    atexit.register(shutil.rmtree, top)
    os.chmod(top, 0o755)
    copies = [f"{top}/{number}" for number in range(len(found))]
    os.mkdir(copies[0])
    subprocess.run(["cp", "-rlL", str(package), copies[0]], check=False)
    for path, copy in zip(found[1:], copies[1:]):
        subprocess.run(["cp", "-rl", path, copy], check=False)
    if not _can_read(copies):
        pytest.skip(f"user nobody cannot read {package}, nor a copy of it")
    return copies


def package_folder() -> Path:
    """Return the package's folder, or its copy, that every user can read."""
    return Path(_paths()[0], "sgl_aspects")


def _can_read(paths: Sequence[str]) -> bool:
    found = interpreter()
    program = f"import sys; sys.path[:0] = {[*paths]!r}; import sgl_aspects.cli.attach"
    if found is None:
        return False
    with run_as_nobody([found, "-I", "-c", program], stderr=subprocess.DEVNULL) as process:
        return process.wait() == 0


def run_as_nobody(
    words: Sequence[str], environment: Mapping[str, str] | None = None, **more: Any
) -> subprocess.Popen[Any]:
    """Start a program as another user, with nothing of this process's environment."""
    given = {"cwd": "/", **more}
    return subprocess.Popen(words, env=environment or {}, user=NOBODY, group=NOBODY, extra_groups=[], **given)


@functools.cache
def interpreter() -> str | None:
    """Return a Python like this one that every user may run: this one may be in a private folder."""
    version = ".".join(map(str, sys.version_info[:2]))
    check = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    for candidate in (sys.executable, f"/usr/local/bin/python{version}", f"/usr/bin/python{version}"):
        try:
            with run_as_nobody([candidate, "-I", "-c", check]) as process:
                if process.wait() == 0:
                    return candidate
        except OSError:
            continue
    return None


def require_two_users() -> str:
    """Return an interpreter for both users; skip the test where there is none."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    found = interpreter()
    if found is None:
        pytest.skip("user nobody cannot run any Python of this version")
    return found


@dataclass
class Shared:
    """Folders of a test: ``theirs`` belongs to another user, ``ours`` to root, who alone may read it."""

    theirs: Path
    ours: Path


@contextmanager
def shared_folders() -> Iterator[Shared]:
    """Make them beside each other, in a folder that everybody may enter."""
    top = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        top.chmod(0o755)
        folders = Shared(top / "theirs", top / "ours")
        folders.theirs.mkdir(mode=0o755)
        os.chown(folders.theirs, NOBODY, NOBODY)
        folders.ours.mkdir(mode=0o700)
        yield folders
    finally:
        shutil.rmtree(top)


@contextmanager
def running_as_nobody(
    folder: Path,
    executable: str,
    *,
    prefix: Sequence[str] = (),
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Program]:
    """Run the program as another user."""
    for name, text in (("program.py", PROGRAM), ("aspects.toml", ASPECTS), ("output", "")):
        (folder / name).write_text(text)
        os.chown(folder / name, NOBODY, NOBODY)
    with (folder / "output").open("ab") as output:
        command = [*prefix, executable, "program.py", "0.001", *words]
        process = run_as_nobody(command, environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    program = Program(process, folder)
    try:
        wait_until(lambda: bool(program.said) or not program.lives(), SECONDS)
        yield program
    finally:
        process.kill()
        process.wait()


def root_command(*words: str, folder: Path | str = "/") -> subprocess.Popen[str]:
    """Start a command of sgl-aspects as root, as an installed one: without its folder on the path."""
    found, paths = require_two_users(), _paths()
    # As the installed command: the current folder is not on its path.
    main = f"import sys; sys.path[:0] = {paths!r}; from sgl_aspects.cli.main import main; sys.exit(main())"
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SGL_", "OTEL_", "PYTHON"))
    }
    return subprocess.Popen(
        [found, "-I", "-c", main, *words],
        cwd=folder,
        env={**clean, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def root_attaches(program: Program, *words: str, folder: Path | str = "/") -> subprocess.Popen[str]:
    """Start ``sgl-aspects attach`` as root; the spans go to a file in the program's folder."""
    flags = [f"--config={program.folder / 'aspects.toml'}", f"--file={program.folder / 'spans.jsonl'}"]
    return root_command("attach", str(program.id), *flags, *words, folder=folder)


def process_with(*words: str) -> int:
    """Return the id of a process whose command line has these words."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if set(words) <= set(line.read_bytes().decode().split("\0")):
                return int(line.parent.name)
    raise AssertionError(words)
