"""EAGLE's worker of real SGLang, which no plain CPU can run: its order of passes, with stand-ins for them."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import sgl_aspects as aspects
from sgl_aspects.engines import SGLANG
from sgl_aspects.tracing import observers
from tests.support.memory_recorder import Memory

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

_WORKER = "sglang.srt.speculative.eagle_worker_v2"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
#: Passes of each model in one step: two of the draft model, the target's, one more of the draft model.
DRAFTED = 2


def forward(runner: Any) -> Any:
    return importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner.forward(runner, None)


@aspects.replace(f"{_WORKER}:EagleDraftWorker.draft")
def draft(self: Any, batch: Any) -> Any:
    for _ in range(DRAFTED):
        forward(self.runner)
    return SimpleNamespace(is_verify_input=lambda: True, kv_loc_plan=None)


@aspects.replace(f"{_WORKER}:EAGLEWorkerV2.verify")
def verify(self: Any, batch: Any, **others: Any) -> Any:
    forward(self.runner)
    return SimpleNamespace(num_correct_drafts=1, speculative_num_draft_tokens=4)


@aspects.replace(f"{_WORKER}:EagleDraftWorker._draft_extend_for_decode")
def extend(self: Any, *args: Any, **others: Any) -> None:
    forward(self.runner)


@aspects.replace(_RUNNER)
def run_model(self: Any, batch: Any) -> None: ...


def worker_of(eagle: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return SGLang's worker without a model, with nothing distributed."""
    contexts = ("draft_tp_context", "speculative_moe_backend_context", "speculative_moe_a2a_backend_context")
    for name in contexts:
        monkeypatch.setattr(eagle, name, lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(eagle, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    worker, drafter = object.__new__(eagle.EAGLEWorkerV2), object.__new__(eagle.EagleDraftWorker)
    worker.adaptive_controller, worker.speculative_num_steps, worker._draft_worker = None, 3, drafter
    worker.runner = drafter.runner = SimpleNamespace(device="meta")
    drafter.parallel_layout = None
    return worker


def test_the_step_of_eagles_worker_has_its_drafts_and_the_pass_that_verifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "sgl_aspects_cpu")
    eagle = importlib.import_module(_WORKER)
    worker, recorder = worker_of(eagle, monkeypatch), Memory()
    mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode.DECODE
    batch = SimpleNamespace(
        forward_mode=mode,
        is_extend_in_batch=False,
        seq_lens=SimpleNamespace(shape=(1,)),
        reqs=[],
        forward_iter=1,
    )
    batch.batch_size, batch.spec_info = 1, SimpleNamespace(is_verify_input=lambda: False)
    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    launch = aspects.replace(SGLANG.roles["run_batch"].targets[0])(
        lambda self, batch: worker.forward_batch_generation(batch)
    )
    process = aspects.replace(SGLANG.roles["process_batch_result"].targets[0])(
        lambda self, batch, result: None
    )
    with aspects.woven(draft, verify, extend, run_model, launch, process):
        monkeypatch.setattr(observers, "find_engines", lambda: [SGLANG])
        undo = observers.weave_observers(recorder)
        result = scheduler.run_batch(None, batch)
        scheduler.process_batch_result(None, batch, result)
        for each in reversed(undo):
            each()
    names = [span.type.name for span in sorted(recorder.ended, key=lambda span: span.start_ns)]
    assert [name for name in names if name in ("draft", "forward", "draft_extend")] == [
        "draft",
        "forward",
        "draft_extend",
    ]
