"""``sgl-aspects version``: the versions to paste into an issue."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

from sgl_aspects import __version__
from sgl_aspects.tracing.record import native

STANDS_ON = (
    "wrapt",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
    "torch",
    "tokenizers",
    "gguf",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no flags."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Print one line each, without importing the other packages."""
    del arguments
    print(f"sgl-aspects {__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"compiled step path: {native.state()}")
    for name in STANDS_ON:
        print(f"{name} {_version_of(name)}")
    return 0


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
