"""SGLang's diffusion engine, ``sglang.multimodal_gen`` 0.5.23, which makes images and videos.

One process has the HTTP server, another runs a batch of requests at a time through a list of stages, which
are the phases of a request; each pass of the denoising model is a step. Requests that come meanwhile wait in
a socket of the second process: that is their time to the queue.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from sgl_aspects.engines.base import Engine, Lifecycle, Role, parameter
from sgl_aspects.engines.contract import Observation
from sgl_aspects.engines.device import platform_of

_RUNTIME = "sglang.multimodal_gen.runtime"
_CLIENT = f"{_RUNTIME}.scheduler_client:*SchedulerClient"
_SCHEDULER = f"{_RUNTIME}.managers.scheduler:Scheduler"
_DENOISING = f"{_RUNTIME}.pipelines_core.stages.denoising:DenoisingStage+"
_EXECUTOR = f"{_RUNTIME}.pipelines_core.executors.pipeline_executor:PipelineExecutor"

# Not all stages of single models say what they are part of; one has all of a pipeline of diffusers'.
_NAMED = re.compile("(?P<denoise>(?<!Before)Denois|DiffusersExecution)|(?P<decode_latents>Decod)")
_PARTS = {"denoiser": "denoise", "decoder": "decode_latents"}


class _Pass(NamedTuple):
    """A pass of the denoising model: its number, and the requests whose images it is for."""

    number: int
    requests: list[Any]


def _first(payload: Any) -> Any:
    """Return the request of a message, or the first of those for the images of one request."""
    return payload[0] if isinstance(payload, list) and payload else payload


def _is_own(payload: Any) -> bool:
    """Return whether it is the engine's: a control message, or a warm-up."""
    request = _first(payload)
    is_control = getattr(request, "sampling_params", None) is None
    return is_control or bool(request.is_warmup or request.extra.get("server_internal_prewarm"))


def _rid(payload: Any) -> str:
    request = _first(payload)
    rid = request.extra.get("parent_request_id") or request.request_id
    # A program's request has none, but a file name, which may begin with its prompt.
    return str(rid or f"file-{zlib.crc32(str(request.output_file_name).encode()):08x}")


def _images(payload: Any) -> int | None:
    count = len(payload) if isinstance(payload, list) else payload.num_outputs_per_prompt or 1
    return count if count > 1 else None


def _kind(payload: Any) -> str:
    return str(_first(payload).data_type.name).lower()


def _pass(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> _Pass | None:
    _, _, step, batch = args[:4]
    return None if _is_own(batch) else _Pass(step.step_index, _Stages.running)


def _reason(output: Any) -> str:
    return "error" if getattr(output, "error", None) else "stop"


_asked = parameter(2, "batch", lambda batch: None if _is_own(batch) else batch)
_described = parameter(1, "server_args", lambda given: {"service": given.served_model_name})
_answered = parameter(1, "item", lambda item: item[1])
_ended = {"req": _answered, "finish_reason": parameter(2, "output_batch", _reason)}


class _Stages:
    """Reports the phases of requests."""

    #: What the process works on. A batch made of several requests has the id of none of them.
    running: ClassVar[list[Any]] = []

    def __init__(self, trackers: Lifecycle) -> None:
        self._requests = trackers.requests
        self._dispatched = trackers.engine.call_reader("dispatch", "items")
        self._stage = trackers.engine.call_reader("run_stage", "stage")

    def observations(self) -> Iterable[Observation]:
        return [Observation("dispatch", self.dispatched), Observation("run_stage", self.enters)]

    def dispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _Stages.running = [item for _, item in self._dispatched(args, kwargs) if not _is_own(item)]

    def enters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stage = self._stage(args, kwargs)
        named = _NAMED.search(type(stage).__name__)
        phase = named.lastgroup if named else _PARTS.get(stage.role_affinity.value, "encode")
        for payload in self.running:
            rid = _rid(payload)
            self._requests.enter(rid, str(phase))
            request = self._requests.requests.get(rid)
            if request is not None and phase == "denoise":
                request.values = None, _first(payload).num_inference_steps


SGLANG_DIFFUSION = Engine(
    name="sglang-diffusion",
    provider_name="sglang",
    roles={
        # In the process with the HTTP server, and in a program's own.
        "serve_request": Role((f"{_CLIENT}.forward",), ("manager:self",), required=True),
        "begin_request": Role((f"{_CLIENT}._forward_one",), reads={"request": _asked}, required=True),
        # In the process that generates.
        "add_request": Role((f"{_SCHEDULER}._normalize_received_payload",), ("_", "message:reqs")),
        "end_scheduled_request": Role((f"{_SCHEDULER}._return_item_result",), reads=_ended),
        "run_batch": Role((f"{_DENOISING}._run_denoising_step",), reads={"batch": _pass}),
        "forward": Role((f"{_DENOISING}._predict_noise_with_cfg",), ("model_runner:self",)),
        "describe_scheduler": Role((f"{_SCHEDULER}.__init__",), reads={"description": _described}),
        "start_engine": Role((f"{_SCHEDULER}.__init__",)),
        "load_model": Role((f"{_RUNTIME}.managers.gpu_worker:GPUWorker.init_device_and_model",)),
    },
    own_roles={
        "dispatch": Role((f"{_SCHEDULER}._dispatch_items",), ("_", "items")),
        "run_stage": Role((f"{_EXECUTOR}.run_stage_with_context",), ("_", "stage")),
    },
    observers=lambda trackers: _Stages(trackers).observations(),
    attributes={
        "manager.model": "server_args.served_model_name",
        "request.rids": lambda payload: ("" if payload is None else _rid(payload),),
        "request.operation": lambda payload: "generate_content",
        "request.output_type": _kind,
        "request.choice_count": _images,
        "request.seed": lambda payload: _first(payload).seed if _images(payload) is None else None,
        "request.messages": lambda payload: [("user", str(_first(payload).prompt))],
        # A video's HTTP request only begins it.
        "request.ends_with_exchange": lambda payload: _kind(payload) in ("image", "action"),
        "outputs.counts": lambda answer: (None, None, None),
        "outputs.reason": lambda answer: _reason(answer[1]),
        "message.rid": _rid,
        "message.is_probe": _is_own,
        "req.rid": _rid,
        "batch.mode": lambda batch: "denoise",
        "batch.reqs": "requests",
        "batch.step_id": "number",
        "model_runner.platform": lambda stage: platform_of(str(stage.device)),
        "model_runner.model": "transformer",
    },
)
