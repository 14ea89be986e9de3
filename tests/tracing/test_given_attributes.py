"""Attributes that a program sets on its current OpenTelemetry span, inside of functions that are traced."""

from __future__ import annotations

from pathlib import Path

from tests.support.sessions import traced_program

WORK = """
import asyncio
from opentelemetry import trace

def current():
    return trace.get_current_span()

def outer(key):
    current().set_attribute("before", 1)
    inner(key)
    assert current().is_recording()
    current().set_attributes({"after": [1.5, 2.5], "key": "other"})
    current().set_attribute("not a value", object())

def inner(key):
    current().set_attribute("found", True)

async def later(name):
    await asyncio.sleep(0)
    current().set_attribute("name", name)
    await asyncio.sleep(0)

def many(number):
    current().set_attribute(f"name {number}", number)

async def both():
    await asyncio.gather(later("one"), later("two"))

def main():
    assert not current().is_recording()
    outer("k")
    asyncio.run(both())
    for number in range(200):
        many(number)
"""


def test_they_are_on_the_span_of_the_innermost_function(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    declared = [f'[[trace]]\ntarget = "work:{name}"\n' for name in ("outer", "inner", "later", "many")]
    declared[0] += '[trace.attributes]\n"key" = "key"\n"result" = "result"\n'
    spans, logged = traced_program(tmp_path, "".join(declared), "import work; work.main()")
    assert "dropped" not in logged
    attributes = {name: [span.attributes for span in found] for name, found in spans.items()}
    assert attributes["outer"] == [{"before": 1, "key": "other", "after": [1.5, 2.5]}]
    assert attributes["inner"] == [{"found": True}]
    assert sorted(each["name"] for each in attributes["later"]) == ["one", "two"]
    assert attributes["many"][:64] == [{f"name {number}": number} for number in range(64)]
    assert attributes["many"][64:] == [{}] * 136  # a name that is made up for each call is not kept for long
