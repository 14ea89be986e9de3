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
_WORKER = f"{_RUNTIME}.managers.gpu_worker:GPUWorker"
_DENOISING = f"{_RUNTIME}.pipelines_core.stages.denoising:DenoisingStage+"
_EXECUTOR = f"{_RUNTIME}.pipelines_core.executors.pipeline_executor:PipelineExecutor"

# Not all stages of single models say what they are part of; one has all of a pipeline of diffusers'.
_NAMED = re.compile("(?P<denoise>(?<!Before)Denois|DiffusersExecution)|(?P<decode_latents>Decod)")
_PARTS = {"denoiser": "denoise", "decoder": "decode_latents"}


class _Pass(NamedTuple):
    """A pass of the denoising model: its number, and the requests whose images it is for."""

    number: int
    requests: list[Any]


class _Running:
    """The requests that the process works on. A batch made of several has the id of none of them."""

    requests: ClassVar[list[Any]] = []


def _first(payload: Any) -> Any:
    """Return the request of a message, or the first of those for the images of one request."""
    return payload[0] if isinstance(payload, list) and payload else payload


def _is_own(payload: Any) -> bool:
    """Return whether it is the engine's: a control message, or a warm-up."""
    request = _first(payload)
    if getattr(request, "sampling_params", None) is None:
        return True
    return bool(request.is_warmup or request.extra.get("server_internal_prewarm"))


def _rid(payload: Any) -> str:
    request = _first(payload)
    rid = request.extra.get("parent_request_id") or request.request_id
    # A program's request has none, but a file name, which may begin with its prompt.
    return str(rid or f"file-{zlib.crc32(str(request.output_file_name).encode()):08x}")


def _of_request(name: str) -> Any:
    return lambda payload: getattr(_first(payload), name, None)


def _seed(payload: Any) -> int | None:
    seed = _first(payload).seed
    return seed if isinstance(seed, int) else None


def _images(payload: Any) -> int | None:
    count = len(payload) if isinstance(payload, list) else 1
    count *= _first(payload).num_outputs_per_prompt or 1
    return count if count > 1 else None


def _messages(payload: Any) -> list[tuple[str, str]] | None:
    prompt = _first(payload).prompt
    return [("user", prompt)] if isinstance(prompt, str) else None


def _kind(payload: Any) -> str:
    return str(_first(payload).data_type.name).lower()


def _pass(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> _Pass | None:
    _, _, step, batch = args[:4]
    return None if _is_own(batch) else _Pass(step.step_index, _Running.requests)


def _describe(server_args: Any) -> dict[str, Any]:
    return {"service": server_args.served_model_name}


_asked = parameter(2, "batch", lambda batch: None if _is_own(batch) else batch)
_ended = {
    "req": parameter(1, "item", lambda item: item[1]),
    "finish_reason": parameter(
        2, "output_batch", lambda output: "error" if getattr(output, "error", None) else "stop"
    ),
}


class _Stages:
    """Reports the phases of requests."""

    def __init__(self, trackers: Lifecycle) -> None:
        self._requests = trackers.requests
        self._dispatched = trackers.engine.call_reader("dispatch", "items")
        self._stage = trackers.engine.call_reader("run_stage", "stage")

    def dispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _Running.requests = [item for _, item in self._dispatched(args, kwargs) if not _is_own(item)]

    def enters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stage = self._stage(args, kwargs)
        named = _NAMED.search(type(stage).__name__)
        phase = named.lastgroup if named else _PARTS.get(stage.role_affinity.value, "encode")
        for payload in _Running.requests:
            rid = _rid(payload)
            self._requests.enter(rid, str(phase))
            request = self._requests.requests.get(rid)
            if request is not None and phase == "denoise":
                request.values = None, _first(payload).num_inference_steps


def _observers(trackers: Lifecycle) -> Iterable[Observation]:
    stages = _Stages(trackers)
    return [Observation("dispatch", stages.dispatched), Observation("run_stage", stages.enters)]


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
        "describe_scheduler": Role(
            (f"{_SCHEDULER}.__init__",), reads={"description": parameter(1, "server_args", _describe)}
        ),
        "start_engine": Role((f"{_SCHEDULER}.__init__",)),
        "load_model": Role((f"{_WORKER}.init_device_and_model",)),
        "load_adapter": Role((f"{_WORKER}.set_lora",), reads={"adapter": parameter(1, "lora_nickname")}),
        "update_weights_from_disk": Role((f"{_SCHEDULER}._handle_update_weights_from_disk",)),
        "sleep": Role((f"{_WORKER}.release_memory_occupation",)),
        "wake_up": Role((f"{_WORKER}.resume_memory_occupation",)),
    },
    own_roles={
        "dispatch": Role((f"{_SCHEDULER}._dispatch_items",), ("_", "items")),
        "run_stage": Role((f"{_EXECUTOR}.run_stage_with_context",), ("_", "stage")),
    },
    observers=_observers,
    attributes={
        "manager.model": "server_args.served_model_name",
        "request.rids": lambda payload: ("" if payload is None else _rid(payload),),
        "request.operation": lambda payload: "generate_content",
        "request.output_type": _kind,
        "request.choice_count": _images,
        "request.seed": _seed,
        "request.messages": _messages,
        # A video's HTTP request only begins it.
        "request.ends_with_exchange": lambda payload: _kind(payload) in ("image", "action"),
        "outputs.counts": lambda answer: (None, None, None),
        "outputs.reason": lambda answer: "error" if answer[1].error else "stop",
        "message.rid": _rid,
        "message.is_probe": _is_own,
        "req.rid": _rid,
        "batch.mode": lambda batch: "denoise",
        "batch.reqs": "requests",
        "batch.step_id": "number",
        "model_runner.platform": lambda stage: platform_of(str(stage.device)),
    },
)
