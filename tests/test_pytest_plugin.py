"""The fixtures ``woven`` and ``captured_spans``, in test runs of their own."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
ARGUMENTS = ("-p", "no:cacheprovider", "-W", "error")


def test_hooks_end_with_their_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import shlex
        import sgl_aspects as aspects

        original = shlex.quote

        @aspects.around("shlex:quote")
        def louder(original_fn, text):
            return original_fn(text).upper()

        @aspects.before("shlex:quote")
        def twice(text):
            return (text * 2,), {}

        def test_hooked(woven):
            first = woven(louder)
            second = woven(twice)
            assert shlex.quote("a") == "AA"
            first.remove()
            assert shlex.quote("a") == "aa"

        def test_failing(woven):
            woven(louder)
            assert False

        def test_afterwards():
            assert shlex.quote is original
        """
    )
    result = pytester.runpytest_subprocess(*ARGUMENTS)
    result.assert_outcomes(passed=2, failed=1)


def test_spans_of_own_functions(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import shlex
        import pytest

        def test_spans(captured_spans):
            captured_spans.trace("shlex:quote", name="quoting", attributes={"result": "result"})
            captured_spans.trace("shlex:join")
            shlex.join(["a b", "c"])
            with pytest.raises(TypeError):
                shlex.quote(5)
            assert [span.name for span in captured_spans()] == ["join", "quoting", "quoting", "quoting"]
            quoting = captured_spans("quoting")
            assert [span.attributes.get("result") for span in quoting] == ["'a b'", "c", None]
            assert [span.is_error for span in quoting] == [False, False, True]
            assert quoting[0].parent_id == captured_spans("join")[0].span_id

        def test_none(captured_spans):
            shlex.join(["a"])
            assert captured_spans() == []

        def test_a_name_that_is_not_there(captured_spans):
            with pytest.raises(LookupError, match="has no joined"):
                captured_spans.trace("shlex:joined")
            with pytest.raises(ValueError, match="unknown key|attributes"):
                captured_spans.trace("shlex:join", attributes={"a": 5})
        """
    )
    result = pytester.runpytest_subprocess(*ARGUMENTS)
    result.assert_outcomes(passed=3)


def test_who_uses_no_fixture_pays_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_loaded():
            assert not [name for name in sys.modules if name.startswith(("opentelemetry", "torch"))]
            assert "sgl_aspects.tracing" not in sys.modules
        """
    )
    pytester.runpytest_subprocess(*ARGUMENTS).assert_outcomes(passed=1)
