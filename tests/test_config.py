"""aspects.toml: valid contents, and the errors for others."""

from __future__ import annotations

import os
import random
import string
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects import AspectsError, HookType, config
from sgl_aspects.errors import ConfigError

GOOD = """
[[hook]]
target = "pkg.mod:Class.method"
hook = "my_hooks:timed"
type = "around"
order = 5
required = true

[[hook]]
target = ["new.mod:f", "old.mod:f"]
hook = "my_hooks:Watch"
type = "observe"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "aspects.toml"
    path.write_text(text)
    return path


def test_hooks_are_read(tmp_path: Path) -> None:
    found = config.read(written(tmp_path, GOOD))
    first, second = found.hooks
    assert (str(first.target), first.hook, first.hook_type, first.order, first.required) == (
        "pkg.mod:Class.method",
        "my_hooks:timed",
        HookType.AROUND,
        5,
        True,
    )
    assert str(second.target) == "new.mod:f | old.mod:f"


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "aspects.toml"
    path.write_bytes(GOOD.replace("\n", "\r\n").encode("utf-8-sig"))
    assert len(config.read(path).hooks) == 2


def test_reading_imports_nothing(tmp_path: Path) -> None:
    before = set(sys.modules)
    config.read(written(tmp_path, GOOD))
    assert not {name for name in set(sys.modules) - before if name.startswith(("my_hooks", "pkg", "new"))}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[hok]]", ["unknown key 'hok'", "choose from hook"]),
        ("hook = 3", ["hook: write tables", "[[hook]]"]),
        ("[[hook]]\ntarget='a:b'\nhook='m:f'\ntype='arround'", ["hook 1", "'arround'", "around, replace"]),
        ("[[hook]]\ntarget='a:b'\nhook='m:f'", ["type = None", "before, after"]),
        ("[[hook]]\ntarget='a:b'\nhook='m.f'\ntype='around'", ["hook = 'm.f'", "'module:name'"]),
        ("[[hook]]\ntarget='a b'\nhook='m:f'\ntype='around'", ["target", "a b"]),
        ("[[hook]]\nhook='m:f'\ntype='around'", ["target = None"]),
        ("[[hook]]\ntarget='a:b'\nhook='m:f'\ntype='around'\norder=true", ["order = True", "whole number"]),
        ("[[hook]]\ntarget='a:b'\nhook='m:f'\ntype='around'\nordr=1", ["'ordr'", "order, required"]),
        ("[[hook", ["is not TOML"]),
        ("hook = " + "[" * 9000, ["is not TOML"]),
        ("hook = " + "9" * 5000, ["is not TOML"]),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_the_choices(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config.read(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        config.read(tmp_path / "nowhere.toml")


def test_a_pipe_is_refused_as_the_first_process_would_empty_it() -> None:
    """A shell's ``--config <(…)``: the program would run without hooks."""
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ConfigError, match="is a pipe, and each process reads it: name a file"):
        config.read(f"/dev/fd/{reading}")
    os.close(reading)


def test_a_hook_that_is_not_there_is_named_with_its_place_in_the_file(tmp_path: Path) -> None:
    text = "[[hook]]\ntarget='a:b'\nhook='{}'\ntype='around'"
    for hook, message in [
        ("no_such_module:f", "no module no_such_module can be imported"),
        ("jsn.tool:f", "no module jsn can be imported; close names: json$"),
        ("json.decodr:f", "no module json.decodr can be imported; close names: decoder"),
        ("json:no_such_name", "'no_such_name'"),
        ("json:dump_s", "has no 'dump_s'; close names: dumps, dump"),
    ]:
        (declared,) = config.read(written(tmp_path, text.format(hook))).hooks
        with pytest.raises(ConfigError, match=message) as caught:
            declared.load()
        assert "hook 1" in str(caught.value)


def _anything(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(7 if depth < 3 else 5)
    if kind == 0:
        return "".join(source.choices(string.printable, k=source.randrange(12)))
    if kind == 1:
        return source.choice([True, False, -1, 0, 10**30, 1.5])
    if kind == 2:
        return source.choice(["a:b", "a.b.c", "m:f", "around", "observe", "result.x", "*:*", "a:b | c:d"])
    if kind in (3, 4):
        return source.choice([[], {}, "", None])
    if kind == 5:
        return [_anything(source, depth + 1) for _ in range(source.randrange(3))]
    keys = ["hook", "trace", "target", "type", "order", "required", "name", "level", "attributes", "x"]
    return {source.choice(keys): _anything(source, depth + 1) for _ in range(source.randrange(6))}


def test_any_file_raises_only_config_errors_and_imports_nothing() -> None:
    source = random.Random(2026)
    before = set(sys.modules)
    read = 0
    for _ in range(20_000):
        document = _anything(source)
        try:
            config.parse(document if isinstance(document, dict) else {"hook": [document]}, "fuzzed.toml")
            read += 1
        except AspectsError:
            pass
    assert read
    assert set(sys.modules) == before
