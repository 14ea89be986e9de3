"""The command ``sgl-aspects``: one table of subcommands, each in a module of its own, imported when it runs.

A subcommand's module has two functions:

    add_arguments(parser)    describes its flags
    run(arguments) -> int    does the work and returns the exit status

Exit statuses: 0 success; 2 an error that the user can act on, in one line, and one for each choice; 130
interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_aspects import packages
from sgl_aspects.errors import AspectsError
from sgl_aspects.terminal import printable, replace_unencodable, say

PROGRAM = "sgl-aspects"
# Before each choice in an error.
_CHOICE = "\n  - "
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Command:
    """One row of the table. ``module``: the one with its name."""

    name: str
    help: str
    aliases: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return f"sgl_aspects.cli.{self.name.replace('-', '_')}"


COMMANDS: tuple[Command, ...] = (
    Command("demo", "Serve eight prompts with a small real model, traced."),
    Command("serve", "Serve a model to OpenAI's clients."),
    Command("run", "Run a program with hooks and tracing in all its processes."),
    Command("attach", "Trace an engine that already runs."),
    Command("detach", "Detach from an engine that was attached to."),
    Command("preflight", "Show what this machine lacks for tracing, and what that costs."),
    Command("hooks", "Show every hook, its targets and its calls."),
    Command("explain", "Show what happens when a function is called."),
    Command("doctor", "Show problems of the hooks and how to solve them."),
    Command("control", "Change what a live run records: level, share, on and off.", aliases=("ctl",)),
    Command("dump", "Show the last seconds of a live or dead traced process."),
    Command("top", "Watch a live run in the terminal."),
    Command("why", "Show what a request's time was spent on, and who delayed it."),
    Command("usage", "Show who used a run: tokens and device time by tenant."),
    Command("report", "Show a run as one page to look at in a browser."),
    Command("platforms", "Show the platforms found, the one chosen, and why."),
    Command("conformance", "Check that a platform does what its methods promise."),
    Command("ops", "Show which implementation serves each operator, and why."),
    Command("new-platform", "Write a package for a device of yours."),
    Command("version", "Show the versions of sgl-aspects and of its dependencies."),
    Command("completion", "Print completions of commands for a shell."),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``argv`` (``sys.argv[1:]`` if None) names; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        words = ["version"]
    replace_unencodable()
    try:
        arguments = _parse(words)
        status = int(arguments.run(arguments))
        print(end="", flush=True)  # also without a standard output
        return status
    except AspectsError as error:
        parts = str(error).split(_CHOICE)
        return _complain(_CHOICE.join(" ".join(part.split()) for part in parts))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "sgl_aspects":
            raise  # a bug
        missing = packages.missing("serve", "otlp", "view")
        advice = f" The commands need: {packages.hint(*missing)}" if missing else ""
        return _complain(f"the Python package {error.name!r} is not installed.{advice}")
    except KeyboardInterrupt:
        say(f"{PROGRAM}: interrupted")
        return 130
    except BrokenPipeError:
        _write_no_more()  # the reader of the output is gone, as in "| head"
        return 141
    except OSError as error:
        if error.errno in _NO_ROOM:
            _write_no_more()
            return _complain(f"{error.strerror}: the output is incomplete")
        if error.filename is None:
            raise
        return _complain(f"{os.fsdecode(error.filename)}: {error.strerror}")


def _write_no_more() -> None:
    """Discard buffered output, so that the interpreter's last flush does not raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> int:
    say(f"{PROGRAM}: error: {printable(message)}")
    return 2


def command_parser(command: Command) -> argparse.ArgumentParser:
    """Return the parser of one command; imports its module."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {command.name}", description=command.help)
    module = importlib.import_module(command.module)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options that the parser's help shows."""
    shown = re.findall(r"^  (-.*?)(?:  |$)", parser.format_help(), re.MULTILINE)
    return re.findall(r"--[a-z][\w-]*", " ".join(shown))


def _parse(words: list[str]) -> argparse.Namespace:
    named = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
    if not words or words[0] not in named:
        overview = argparse.ArgumentParser(
            prog=PROGRAM, description="Attach, trace, replace: any function of an LLM inference engine."
        )
        subparsers = overview.add_subparsers(dest="command", metavar="COMMAND", required=True)
        for command in COMMANDS:
            subparsers.add_parser(command.name, aliases=command.aliases, help=command.help)
        if words and words[0] in ("-h", "--help"):
            return overview.parse_args(words)
        near, wrong = "", "a command is missing"
        if words and words[0].startswith("-"):
            wrong = f"{words[0]} stands before the command"
        elif words:
            near, wrong = _or_near(words[0], named), f"there is no command {words[0]!r}"
        overview.error(wrong + (near or f"; {PROGRAM} --help lists them"))
    parser = command_parser(named[words[0]])
    arguments, unknown = parser.parse_known_args(words[1:])
    program = getattr(arguments, "command", [])  # its words begin at the first unknown one
    unknown = unknown or [word for word in program[:1] if word.startswith("-") and word != "--"]
    if unknown:
        option = unknown[0].partition("=")[0]
        options = options_of(parser)
        near = f"; did you mean --run {option}?" if "--run" in options and option[0] != "-" else ""
        parser.error(f"unknown argument {option}{near or _or_near(option, options)}")
    return arguments


def _or_near(word: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean {near[0]}?" if near else ""
