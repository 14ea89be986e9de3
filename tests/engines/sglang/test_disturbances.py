"""Real SGLang under disturbances: the first cause of a request is what was done to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("sglang")

from sgl_aspects.analysis.causes import Cause
from tests.support import disturbances
from tests.support.disturbances import Disturbances, Found
from tests.support.sglang_server import Server, serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


class TestSGLang(Disturbances):
    targets = (
        "sglang.srt.model_executor.model_runner:ModelRunner.forward",
        "transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",
        "sglang.srt.constrained.xgrammar_backend:XGrammarGrammarBackend.dispatch_json",
    )
    options: ClassVar[Mapping[str, object]] = {
        "--max-total-tokens": disturbances.ROOM,
        "--max-running-requests": disturbances.BATCH,
        "--chunked-prefill-size": disturbances.CHUNK,
        "--context-length": 2500,
        # It keeps little room for answers, so that it has to retract.
        "--schedule-conservativeness": 0.01,
    }
    has_min_tokens = True
    pauses = ("/pause_generation", "/continue_generation", "in_place", "retract")

    @classmethod
    def serve(
        cls, model: Path, log: Path, prefix: tuple[str, ...], words: list[str], environment: dict[str, str]
    ) -> AbstractContextManager[Server]:
        without = list(cls.options)
        return serve(model, log, prefix=prefix, more=words, environment=environment, without=without)

    @pytest.mark.parametrize("request_name", ["interrupted", "late"])
    @pytest.mark.parametrize("mode", ["in_place", "retract"])
    def test_a_pause_comes_first(self, found: Found, mode: str, request_name: str) -> None:
        explained = found.causes.explain(found.request(f"{mode}: {request_name}"))
        cause, seconds = explained.ranked()[0]
        assert cause is Cause.STOPPED, explained.ranked()
        assert abs(seconds - disturbances.PAUSE / 2) < 0.2
