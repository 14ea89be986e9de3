"""Images without a registry: a base made of this machine's Python, for Dockerfiles that buildah builds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pip
import pytest

_BASE = "base"
_OMITTED = (
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "config-*",
    "*.a",
)


class Images:
    """Images and containers in a folder of their own; nothing is pulled."""

    def __init__(self, folder: Path) -> None:
        """Make the base; skip the test where buildah is not here, or cannot run a program in an image."""
        if not shutil.which("buildah"):
            pytest.skip("buildah is not on PATH: make test-integration installs it")
        self._storage = folder / "storage"
        root = folder / "base"
        _copy_python(root)
        subprocess.run(["chmod", "-R", "a+rX", root], check=True)  # whatever the umask is here
        stated = "FROM scratch\nCOPY . /\nENV PATH=/bin PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels\n"
        (folder / "Dockerfile").write_text(stated + 'RUN ["python", "-c", "import pip"]\n')
        done = self._build(_BASE, folder / "Dockerfile", root)
        shutil.rmtree(root)
        if done.returncode:
            pytest.skip(f"buildah runs no program here: {done.stderr.strip()[-300:]}")

    def build(self, dockerfile: Path, context: Path, *arguments: str) -> str:
        """Build an image with the base for each of the ``arguments``; return its name."""
        based = [word for each in arguments for word in ("--build-arg", f"{each}=localhost/{_BASE}")]
        done = self._build("built", dockerfile, context, *based)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return "localhost/built"

    def run(self, image: str, *volume: str) -> dict[str, Any]:
        """Run the image's own command as its own user, without any capability; return its configuration.

        ``volume``: a folder of this machine, and where the container has it.
        """
        container = self._done("from", "--pull-never", image).strip()
        configured: dict[str, Any] = json.loads(self._done("inspect", container))["OCIv1"]["config"]
        command = ("--cap-drop", "all", "--volume", ":".join(volume), container, "--", *configured["Cmd"])
        self._done("run", "--isolation", "chroot", *command)
        return configured

    def close(self) -> None:
        self._buildah("rm", "--all")
        shutil.rmtree(self._storage, ignore_errors=True)

    def _build(
        self, name: str, dockerfile: Path, context: Path, *words: str
    ) -> subprocess.CompletedProcess[str]:
        words = ("--isolation", "chroot", "--pull-never", "--tag", name, *words)
        return self._buildah("bud", *words, "--file", str(dockerfile), str(context))

    def _done(self, *words: str) -> str:
        done = self._buildah(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _buildah(self, *words: str) -> subprocess.CompletedProcess[str]:
        storage = (
            "--storage-driver",
            "vfs",
            "--root",
            str(self._storage),
            "--runroot",
            f"{self._storage}.run",
        )
        words = ("buildah", *storage, *words)
        # As builders have it: the image's own user reads what its build writes.
        return subprocess.run(words, capture_output=True, text=True, timeout=120, umask=0o022)


def _copy_python(root: Path) -> None:
    """Copy the interpreter, pip, a shell and cp, with the libraries that they load, to their own paths."""
    python = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
    library = Path(sysconfig.get_path("stdlib"))
    programs = [python, *(Path(f"/bin/{name}") for name in ("sh", "cp"))]
    shutil.copytree(library, _within(root, library), ignore=shutil.ignore_patterns(*_OMITTED))
    shutil.copytree(Path(pip.__file__).parent, _within(root, library / "pip"))
    for path in {*programs, *_libraries([*programs, *library.glob("lib-dynload/*.so")])}:
        _within(root, path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, _within(root, path))
    os.symlink(python, root / "bin" / "python")
    (root / "tmp").mkdir()


def _libraries(files: Iterable[Path]) -> set[Path]:
    found = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, timeout=60).stdout
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", found)}


def _within(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")
