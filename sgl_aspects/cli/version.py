"""``sgl-aspects version``: what to paste into a report."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

from sgl_aspects import __version__

STANDS_ON = (
    "wrapt",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
    "torch",
    "tokenizers",
    "gguf",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """One line each. Nothing is imported to find out."""
    del arguments
    print(f"sgl-aspects {__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in STANDS_ON:
        print(f"{name} {_version_of(name)}")
    return 0


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
