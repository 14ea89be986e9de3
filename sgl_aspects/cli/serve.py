"""``sgl-aspects serve``: the embedded engine behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import logging
import sys

from sgl_aspects import env
from sgl_aspects.cli import dataclass_flags
from sgl_aspects.plugins import load_plugins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Load plugins before the modules that they may hook, which are imported next.
    load_plugins()
    from sgl_aspects.runtime.server.settings import ServerSettings
    from sgl_aspects.runtime.server_args import ServerArgs

    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        dest="model_path",
        help="A Hugging Face folder, a GGUF file, or a folder that holds exactly one GGUF file.",
    )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="Of the log on standard error. Default: warning.",
    )
    dataclass_flags.add_flags(parser, ServerSettings)
    dataclass_flags.add_flags(parser, ServerArgs, but=("model_path",))


def run(arguments: argparse.Namespace) -> int:
    from sgl_aspects.runtime.server.serving import run_server
    from sgl_aspects.runtime.server.settings import ServerSettings
    from sgl_aspects.runtime.server_args import ServerArgs

    logging.basicConfig(
        level=arguments.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    settings = dataclass_flags.given(arguments, ServerSettings)
    # Other users of the machine see command lines, but not the environment.
    settings.setdefault("api_key", env.text("SGL_ASPECTS_API_KEY"))
    run_server(ServerArgs(**dataclass_flags.given(arguments, ServerArgs)), ServerSettings(**settings))
    return 0
