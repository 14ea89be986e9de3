"""``sgl-aspects serve``: the embedded engine behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import logging
import sys

from sgl_aspects import env
from sgl_aspects.cli import dataclass_flags
from sgl_aspects.cli.arguments import naming_flags
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
        choices=("debug", "info", "warning", "error"),
        help="Of the log on standard error. Default: info, and warning for other packages' messages.",
    )
    dataclass_flags.add_flags(parser, ServerSettings)
    dataclass_flags.add_flags(parser, ServerArgs, but=("model_path",))


def run(arguments: argparse.Namespace) -> int:
    from sgl_aspects.runtime.server.serving import run_server
    from sgl_aspects.runtime.server.settings import ServerSettings
    from sgl_aspects.runtime.server_args import ServerArgs

    level = (arguments.log_level or "warning").upper()
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    if arguments.log_level is None:
        logging.getLogger("sgl_aspects").setLevel(logging.INFO)
    settings = dataclass_flags.given(arguments, ServerSettings)
    # Other users of the machine see command lines, but not the environment.
    settings.setdefault("api_key", env.text("SGL_ASPECTS_API_KEY"))
    engine = dataclass_flags.given(arguments, ServerArgs)
    flags = {name: f"--{name.replace('_', '-')}" for name in (*settings, *engine)}
    with naming_flags(flags | {"model_path": "--model"}):
        run_server(ServerArgs(**engine), ServerSettings(**settings))
    return 0
