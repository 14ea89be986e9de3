"""``sgl-aspects explain TARGET``: what happens when a function is called."""

from __future__ import annotations

import argparse
import importlib

from sgl_aspects.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="pkg.mod:Class.method")
    parser.add_argument(
        "--import",
        dest="module",
        metavar="MODULE",
        help="import this module first, so that hooks on it are woven",
    )


def run(arguments: argparse.Namespace) -> int:
    from sgl_aspects.plugins import load_plugins
    from sgl_aspects.weaving import Target, explain, why_not_importable

    load_plugins()
    if arguments.module:
        try:
            importlib.import_module(arguments.module)
        except (ImportError, TypeError) as error:  # TypeError: a relative name
            reason = why_not_importable(Target.parse(f"{arguments.module}:any")) or error
            raise ConfigError(f"--import {arguments.module}: {reason}") from error
    print(explain(arguments.target))
    return 0
