"""Real SGLang under disturbances: the first cause of a request is what was done to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("sglang")

from tests.support import disturbances
from tests.support.disturbances import Disturbances, Pauses
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
    pauses: ClassVar[Pauses] = {
        each: ("/pause_generation", {"mode": each}, "/continue_generation")
        for each in ("in_place", "retract")
    }

    @classmethod
    def serve(
        cls, model: Path, log: Path, prefix: tuple[str, ...], words: list[str], environment: dict[str, str]
    ) -> AbstractContextManager[Server]:
        without = list(cls.options)
        return serve(model, log, prefix=prefix, more=words, environment=environment, without=without)
