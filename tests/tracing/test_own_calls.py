"""Functions that the recorder calls itself can be traced: its own calls leave no spans."""

from __future__ import annotations

from pathlib import Path

from tests.support.sessions import traced_program

PROGRAM = "import json, marshal, zlib\njson.dumps([1])\nmarshal.dumps([1])\nzlib.crc32(b'1')\n"
TRACED = ("json:dumps", "marshal:dumps", "zlib:crc32")


def test_each_call_of_the_program_has_one_span(tmp_path: Path) -> None:
    declared = "".join(f'[[trace]]\ntarget = "{target}"\nname = "{target}"\n' for target in TRACED)
    spans, _ = traced_program(tmp_path, declared, PROGRAM)
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(TRACED, 1)
