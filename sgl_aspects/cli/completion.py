"""``sgl-aspects completion``: completions of commands and options for bash and zsh."""

from __future__ import annotations

import argparse

from sgl_aspects.cli.main import COMMANDS, PROGRAM, command_parser, options_of

_SCRIPT = """_sgl_aspects() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
  esac
  [ "$COMP_CWORD" = 1 ] && words="{names}"
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _sgl_aspects {program}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that will read them")
    parser.epilog = f'in ~/.bashrc or ~/.zshrc: eval "$({PROGRAM} completion bash)" (or zsh)'


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    if arguments.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    cases = []
    for command in COMMANDS:
        options = " ".join(options_of(command_parser(command)))
        cases.append(f'    {"|".join((command.name, *command.aliases))}) words="{options}" ;;')
    names = " ".join(command.name for command in COMMANDS)
    print(_SCRIPT.format(cases="\n".join(cases), names=names, program=PROGRAM))
    return 0
