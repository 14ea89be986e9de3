"""The command line: its table, its errors in one line, and the small subcommands."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
import types
from pathlib import Path

import pytest

import sgl_aspects
from sgl_aspects import packages
from sgl_aspects.cli import main as cli
from sgl_aspects.cli.arguments import positive_integer
from sgl_aspects.cli.main import COMMANDS, Command, main
from sgl_aspects.errors import AspectsError
from sgl_aspects.platforms import set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from tests.support.processes import command, error_of, finished, output_of, python


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A fake subcommand in a module of its own, whose ``run`` a test replaces."""
    module = types.ModuleType("sgl_aspects.cli.stand_in")
    module.__dict__["add_arguments"] = lambda parser: parser.add_argument("--count", type=positive_integer)
    module.__dict__["run"] = lambda arguments: arguments.count
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "COMMANDS", (*COMMANDS, Command("stand-in", "")))
    return module


def raising(stand_in: types.ModuleType, error: BaseException) -> int:
    """Return the status of the fake subcommand, whose ``run`` raises this error."""

    def run(_arguments: argparse.Namespace) -> int:
        raise error

    stand_in.__dict__["run"] = run
    return main(["stand-in"])


def test_every_command_of_the_table_is_listed() -> None:
    printed = output_of(command("--help"))
    for one in COMMANDS:
        assert one.name in printed
        assert one.help in " ".join(printed.split())


def test_doctor_says_which_folder_of_an_engine_to_name(tmp_path: Path) -> None:
    told = command("doctor", "--engine", tmp_path).stderr
    assert (
        "no role of any engine is there: name a wheel, or the folder that holds the engine's package" in told
    )


@pytest.mark.parametrize("name", ["run", "attach", "control"])
def test_the_help_names_every_level(name: str) -> None:
    assert "2 + scheduler, 3 + forward, 4 + layers" in " ".join(output_of(command(name, "--help")).split())


def test_help_and_version_load_neither_torch_nor_opentelemetry() -> None:
    code = """
import sys
from sgl_aspects.cli.main import main
assert main(["version"]) == 0
assert not {"torch", "opentelemetry.sdk", "rich"} & set(sys.modules)
"""
    printed = output_of(python("-c", code))
    assert command("--version").stdout in printed
    assert printed.startswith(f"sgl-aspects {sgl_aspects.__version__}\npython 3.")
    assert re.search("\ncompiled step path: (in use\n|not in use: )", printed)
    assert "\ntorch 2." in printed


def test_no_command_and_an_unknown_one_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["nonesuch"])
    assert caught.value.code == 2
    assert "nonesuch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["repot"], "sgl-aspects: error: there is no command 'repot'; did you mean report?"),
        (["help"], "error: there is no command 'help'; sgl-aspects --help lists them"),
        ([], "error: a command is missing; sgl-aspects --help lists them"),
        (["--level", "2", "run"], "error: --level stands before the command; sgl-aspects --help lists them"),
        (["report", "--outptu", "x"], "error: unknown argument --outptu; did you mean --output?"),
        (["run", "--levle=2", "--", "true"], "error: unknown argument --levle; did you mean --level?"),
        (["top", "--nothing-like-it"], "error: unknown argument --nothing-like-it"),
    ],
)
def test_near_commands_and_options_are_offered(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_a_shell_completes_commands_and_their_options(tmp_path: Path) -> None:
    script = (
        f'eval "$({shlex.quote(sys.executable)} -m sgl_aspects completion bash)"; '
        "answer() { COMP_WORDS=(sgl-aspects $1 $2) COMP_CWORD=$#; _sgl_aspects; echo ${COMPREPLY[@]}; }; "
        "answer rep; answer why --; answer ctl --sa"
    )
    commands, none, options = output_of(finished("bash", "-c", script)).splitlines()
    assert (commands, options) == ("report", "--sample")
    assert "--help" in none


def test_the_status_of_a_command_is_the_programs(stand_in: types.ModuleType) -> None:
    assert stand_in
    assert main(["stand-in", "--count", "7"]) == 7


def test_our_errors_are_one_line_and_status_2(
    stand_in: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(stand_in, AspectsError("first line\n   second line")) == 2
    assert capsys.readouterr().err == "sgl-aspects: error: first line second line\n"


def test_a_fault_of_ours_keeps_its_traceback(stand_in: types.ModuleType) -> None:
    with pytest.raises(ZeroDivisionError):
        raising(stand_in, ZeroDivisionError())


LONG = "a" * 300


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--level", "9", "--", "true"), "--level '9': choose one of off, "),
        (("run", "--file", "/nowhere/x", "--", "true"), "--file '/nowhere/x': name a file in"),
        (("serve", "--model", "x", "--max-total-tokens", "-3"), "--max-total-tokens -3: write a whole"),
        (("report", "nowhere"), "nowhere: No such file or directory. Name an OTLP-JSON file"),
        (("report", LONG), LONG),
        (("report", "~nobody-of-this-name"), "No such file"),
        (("report", "-o", "~nobody-of-this-name/page"), "write a file in a folder that exists"),
        (("report", "-o", f"{LONG}/page"), "write a file in a folder that exists"),
        (("dump", "--run", LONG), LONG),
        (("ctl", "--run", ""), "no traced run of '' found"),  # its earlier name
        (("control", "--run", ""), "no traced run of '' found"),
        (("hooks", "--from", LONG), LONG),
        (("new-platform", "acme", "--output", LONG), LONG),
        (("new-platform", "acme", "--output", "~nobody-of-this-name/\x7f/" + LONG), LONG),
        (
            ("serve", "--model", "~nobody-of-this-name"),
            "no model at ~nobody-of-this-name: it does not",
        ),
        (("control", "--profile", "1", "--server", "localhost"), "with --server http://HOST:PORT"),
        (("control", "--profile", "1", "--server", "http://a b"), "with --server http://HOST:PORT"),
        (("control", "--profile", "1", "--server", "http://me:sesame@["), "http://***@["),
        (("doctor", "--", "no-such-program"), "'no-such-program' is not a program that can be found"),
    ],
)
def test_an_error_is_one_line_that_names_what_was_typed(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):  # argparse's, after its usage
        assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"sgl-aspects.*: error: .*{re.escape(message)}.*", error), error


def test_an_interrupt_is_status_130(stand_in: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(stand_in, KeyboardInterrupt()) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_package_is_one_line_with_the_install_command(
    stand_in: types.ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "missing", lambda *extras: ["textual"])
    assert raising(stand_in, ModuleNotFoundError(name="not_there")) == 2
    error = capsys.readouterr().err
    assert "'not_there' is not installed. The commands need: pip install 'textual>=1.0'" in error
    assert error.count("\n") == 1


def test_output_into_a_closed_pipe_gives_no_traceback() -> None:
    script = f"{shlex.quote(sys.executable)} -m sgl_aspects version | true"
    assert finished("bash", "-c", script).stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_output_onto_a_full_disk_is_an_error_without_a_traceback() -> None:
    done = finished("bash", "-c", f"{shlex.quote(sys.executable)} -m sgl_aspects version > /dev/full")
    assert "No space left on device: the output is incomplete" in error_of(done)


def platforms_output(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `platforms` prints, with no platform chosen before or after."""
    set_current_platform(None)
    try:
        assert main(["platforms"]) == 0
    finally:
        set_current_platform(None)
    return capsys.readouterr().out


def test_platforms_shows_what_was_chosen_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu")
    output = platforms_output(capsys)
    lines = [line.split() for line in output.splitlines()]
    assert ["cpu", "built-in", "chosen", "SGLANG_PLATFORM=cpu"] in lines
    assert ["cuda", "built-in", "not", "chosen", "not", "queried:", "SGLANG_PLATFORM=cpu"] in lines
    assert "sgl_aspects.platforms.cpu:CpuPlatform" in output
    assert "GiB free of" in output


class Countless(CpuPlatform):
    def device_count(self) -> int:
        return None  # type: ignore[return-value]


def test_a_platform_that_counts_no_devices_is_shown_as_unfinished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", f"mine={__name__}:Countless")
    (line,) = [line for line in platforms_output(capsys).splitlines() if line.startswith("devices")]
    assert line.split()[1:3] == ["failed:", "TypeError:"]


def test_platforms_shows_what_was_found_when_none_can_be_chosen() -> None:
    done = command("platforms", SGLANG_PLATFORM="nonesuch")
    assert done.returncode == 2
    assert "cuda" in done.stdout
    assert done.stderr.startswith("sgl-aspects: error: SGLANG_PLATFORM=nonesuch: no platform has this name.")
    assert done.stderr.count("\n") == 1


def test_platforms_shows_a_vendors_class_that_declares_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vendor_of_test.py").write_text(
        "from sgl_aspects.platforms import SRTPlatform\nclass Bare(SRTPlatform):\n    device_name = 'bare'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SGLANG_PLATFORM", "bare=vendor_of_test:Bare")
    output = platforms_output(capsys)
    assert "bare" in output
    assert "not implemented" in output


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_positive_integer_names_valid_values(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number from 1"):
        positive_integer(text)


def test_a_new_platform_is_installed_from_its_folder_and_not_from_an_index(tmp_path: Path) -> None:
    printed = output_of(command("new-platform", "acme", cwd=tmp_path))
    assert "\npip install ./acme-platform\n" in printed
