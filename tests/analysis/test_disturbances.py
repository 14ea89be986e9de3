"""The embedded engine's server under disturbances: the first cause of a request is what was done to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support import disturbances
from tests.support.disturbances import Disturbances
from tests.support.http_server import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class TestEmbedded(Disturbances):
    targets = (
        "sgl_aspects.runtime.execution.model_runner:ModelRunner.compute_logits",
        "sgl_aspects.runtime.loader.tokenizer:Tokenizer.encode",
        "sgl_aspects.runtime.grammar:GrammarCompiler.compile",
    )
    options: ClassVar[Mapping[str, object]] = {
        "--max-total-tokens": disturbances.ROOM,
        "--max-running-requests": disturbances.BATCH,
        "--chunked-prefill-size": disturbances.CHUNK,
        "--decode-reserve": 0,
    }

    @classmethod
    @contextmanager
    def serve(
        cls, model: Path, log: Path, prefix: tuple[str, ...], words: list[str], environment: dict[str, str]
    ) -> Iterator[Server]:
        with serving(model, log, *words, prefix=prefix, environment=environment) as running:
            yield running
            running.stop()
