"""Certificates for loopback, made where a test needs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate for localhost and its key, by path. Without openssl the test is skipped."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make certificates with")
    certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN={name}"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command_line = [*command.split(), "-keyout", key, "-out", certificate, "-addext", names]
    subprocess.run(command_line, check=True, capture_output=True, timeout=60)
    return certificate, key
