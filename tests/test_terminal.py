"""Texts from outside do not control the terminal on which they are shown."""

from __future__ import annotations

import logging

import pytest

from sgl_aspects.attach.process_tree import Process
from sgl_aspects.cli.main import main
from sgl_aspects.terminal import printable
from sgl_aspects.tracing.export.failures import FirstFailure

TITLE, HIDDEN = "\x1b]0;owned\x07", "a\x9bb\u202ec\rd"


def test_only_line_feeds_stay() -> None:
    assert printable("plain ünïcödé 日本\n") == "plain ünïcödé 日本\n"
    assert printable(TITLE + HIDDEN) == "\\x1b]0;owned\\x07a\\x9bb\\u202ec\\rd"


def test_what_a_backend_answers_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.makeLogRecord({"name": "x", "msg": f"the backend rejected 1 spans: {TITLE}{HIDDEN}"})
    FirstFailure().emit(record)
    printed = capsys.readouterr().err
    assert "\\x1b]0;owned" in printed
    assert printable(printed) == printed


def test_another_users_command_line_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert Process(7, 1, 0, ("python", TITLE, "a\nb")).title == "python \\x1b]0;owned\\x07 a\\nb"
    assert main(["report", TITLE]) == 2
    printed = capsys.readouterr().err
    assert printable(printed) == printed
