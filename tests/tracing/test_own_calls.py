"""Functions that the recorder calls itself can be traced: its own calls leave no spans."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.otlp_receiver import spans_of
from tests.support.processes import command, output_of
from tests.support.sessions import read_file

PROGRAM = "import json, marshal, zlib\njson.dumps([1])\nmarshal.dumps([1])\nzlib.crc32(b'1')\n"
TRACED = ("json:dumps", "marshal:dumps", "zlib:crc32")


def test_each_call_of_the_program_has_one_span(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    declared = "".join(f'[[trace]]\ntarget = "{target}"\nname = "{target}"\n' for target in TRACED)
    (tmp_path / "aspects.toml").write_text(declared)
    words = ["--config", "aspects.toml", "--file", "spans.jsonl", "--", sys.executable, "program.py"]
    output_of(command("run", *words, cwd=tmp_path))
    names = [span.name for message in read_file(tmp_path / "spans.jsonl") for span in spans_of(message)]
    assert sorted(names) == sorted(TRACED)
