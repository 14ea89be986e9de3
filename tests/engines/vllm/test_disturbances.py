"""Real vLLM under disturbances: the first cause of a request is what was done to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm")

from tests.support import disturbances
from tests.support.disturbances import Disturbances, Pauses
from tests.support.engine_server import EngineServer
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

BLOCK = 128


class TestVllm(Disturbances):
    targets = (
        "vllm.v1.worker.**:GPUModelRunner.execute_model",
        "transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",
        "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compile_grammar",
        "vllm.v1.worker.**:GPUModelRunner.reload_weights",
    )
    options: ClassVar[Mapping[str, object]] = {
        "--block-size": BLOCK,
        "--num-gpu-blocks-override": disturbances.ROOM // BLOCK + 1,  # one of them is never used
        "--max-num-seqs": disturbances.BATCH,
        "--max-num-batched-tokens": disturbances.CHUNK,
        "--max-model-len": 2500,
        "--dtype": "float32",
    }
    model: ClassVar[Mapping[str, Any]] = {"num_hidden_layers": 2, "hidden_size": 128}
    pauses: ClassVar[Pauses] = {
        "keep": ("/pause?mode=keep", {}, "/resume"),
        "sleep": ("/sleep?level=1&mode=keep", {}, "/wake_up?tags=weights /wake_up?tags=kv_cache"),
        "reload": (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": disturbances.SLOW}},
            "",
        ),
    }

    @classmethod
    def serve(
        cls, model: Path, log: Path, prefix: tuple[str, ...], words: list[str], environment: dict[str, str]
    ) -> AbstractContextManager[EngineServer]:
        more = ["--enforce-eager", *words]
        (log.parent / disturbances.SLOW).symlink_to(model)  # in the folder where it runs
        environment = {**environment, "VLLM_SERVER_DEV_MODE": "1"}
        return serve(model, log, prefix=prefix, more=more, environment=environment)
