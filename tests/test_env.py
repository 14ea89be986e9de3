"""The spelling of our variables: ``ASPECTS_X`` for ``SGL_ASPECTS_X``, of which SGLang would warn."""

from __future__ import annotations

import pytest

from sgl_aspects import env
from sgl_aspects.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, None),
        ({"SGL_ASPECTS_THING": "long"}, "long"),
        ({"ASPECTS_THING": " short "}, "short"),
        ({"SGL_ASPECTS_THING": "long", "ASPECTS_THING": "short"}, "long"),
    ],
)
def test_a_variable_is_read_under_both_names(
    values: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert env.text("SGL_ASPECTS_THING") == found
    assert env.names("SGL_ASPECTS_THING") == (None if found is None else (found,))


def test_other_names_have_one_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLUGINS", "a")
    assert env.text("SGLANG_PLUGINS") is None
    assert env.text("SGL_PLUGINS") is None


def test_all_of_ours_are_shortened_and_nothing_else() -> None:
    values = {"SGL_ASPECTS_TRACE": "3", "ASPECTS_TRACE": "1", "SGL_OTHER": "2", "PATH": "/bin"}
    assert env.shortened(values) == {"ASPECTS_TRACE": "3", "SGL_OTHER": "2", "PATH": "/bin"}


def test_operator_variables_may_be_short_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_aspects.runtime.dispatch.configuration import from_variables

    monkeypatch.setenv("ASPECTS_OP_PREFER", "reference")
    assert from_variables()["prefer"].value == "reference"
    monkeypatch.setenv("ASPECTS_OP_PREFR", "reference")
    with pytest.raises(ConfigError, match="SGL_ASPECTS_OP_PREFR"):
        from_variables()
