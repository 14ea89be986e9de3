"""Aspects in pytest: hooks for the length of a test, and the spans of what it ran.

    pytest examples/test_with_aspects.py      # in this checkout, whose settings need pytest-timeout

The fixtures `woven` and `captured_spans` are there wherever sgl-aspects is installed.
"""

import shlex

import pytest

import sgl_aspects as aspects


@aspects.around("shlex:quote")
def failing(original_fn, text):
    if text == "rare":
        raise OSError("what happens once in a month")
    return original_fn(text)


def test_what_is_hard_to_make_fail(woven):
    handle = woven(failing)
    assert shlex.quote("usual") == "usual"
    with pytest.raises(OSError, match="month"):
        shlex.quote("rare")
    assert handle.states  # the hook is removed when the test ends


def test_which_functions_ran(captured_spans):
    captured_spans.trace("shlex:join", attributes={"words": "split_command"})
    assert shlex.join(["attach", "trace"]) == "attach trace"
    (span,) = captured_spans()
    assert span.name == "join"
    assert span.attributes["words"] == ["attach", "trace"]
