"""transformers 5.19: which functions of `transformers serve` play which role.

One process. With continuous batching a thread of its own schedules and runs batches; without, it runs one
request after the other (``generate.py``), and there are no steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl_aspects.engines.base import Engine, Role

_SERVING = "transformers.cli.serving"
_MANAGERS = f"{_SERVING}.utils:*GenerateManager"
_BATCHING = "transformers.generation.continuous_batching"
_PROCESSOR = f"{_BATCHING}.continuous_api:ContinuousBatchProcessor"
_SCHEDULER = f"{_BATCHING}.scheduler:Scheduler"
_CACHE = f"{_BATCHING}.cache:PagedAttentionCache"
_ASKED = ("manager:self", "model", "processor", "inputs", "settings:gen_config", "rid:request_id")


class Asked(NamedTuple):
    """What an HTTP handler asks a manager to generate. ``streams``: the answer is an object that grows."""

    inputs: Any
    settings: Any
    rid: str
    streams: bool

    @classmethod
    def of(cls, streams: bool) -> Any:
        inputs, settings, rid = (Role((), _ASKED).reader(noun) for noun in ("inputs", "settings", "rid"))

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Asked:
            given = (inputs(args, kwargs, None), settings(args, kwargs, None), rid(args, kwargs, None))
            return cls(*given, streams)

        return read

    @property
    def prompt_length(self) -> int:
        return _length(self.inputs)


def _length(inputs: Any) -> int:
    ids = inputs["input_ids"]
    return len(ids) if isinstance(ids, list) else int(ids.shape[-1])


def _output_length(answer: tuple[Asked, Any]) -> int | None:
    """Of what a manager gave: a queue and a streamer, or a text, the prompt's length and the tokens."""
    asked, given = answer
    if given is None:
        return None
    return int(given[1].total_tokens) if asked.streams else len(given[2])


def _counts(answer: tuple[Asked, Any]) -> tuple[int | None, int | None, int | None]:
    return answer[0].prompt_length, _output_length(answer), None


def _reason(answer: tuple[Asked, Any]) -> str:
    most = answer[0].settings.max_new_tokens
    return "length" if most is not None and (_output_length(answer) or 0) >= most else "stop"


def _model(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str | None:
    body = args[1] if len(args) > 1 else kwargs.get("body")
    asked = body.get("model") if isinstance(body, dict) else None
    return args[0].model_manager.force_model or asked


def _setting(name: str) -> Any:
    return lambda asked: getattr(asked.settings, name, None)


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Sequence[Any]:
    """The batch at hand; where batches overlap there are two sets of inputs and outputs."""
    inputs = args[0].inputs_and_outputs
    pairs = getattr(inputs, "io_pairs", None)
    found: Sequence[Any] = (pairs[inputs.current_pair].host_io if pairs else inputs).requests_in_batch
    return found


def _works_on_prompt(part: Any) -> bool:
    return not part.state.generated_tokens


def _mode(batch: Sequence[Any]) -> str:
    prompts = sum(map(_works_on_prompt, batch))
    return "decode" if not prompts else "prefill" if prompts == len(batch) else "mixed"


def _rid(req: Any) -> str:
    """Of a request, or of its part in a batch."""
    return str(getattr(req, "state", req).request_id)


def _ended(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Any:
    scheduler, rid = args[0], args[1] if len(args) > 1 else kwargs["request_id"]
    return scheduler.active_requests.get(rid)


def _end_reason(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str | None:
    state = _ended(args, kwargs)
    if state is None:
        return None
    if state.error is not None:
        return "error"
    most = state.max_new_tokens
    return "length" if most is not None and len(state.generated_tokens) >= most else "stop"


@functools.cache  # asked with each forward pass
def _platform_of(device: str) -> Any:
    from sgl_aspects.engines.device import platform_of

    return platform_of(device)


def _observers(trackers: Any) -> Any:
    from sgl_aspects.engines.transformers.generate import GenerateObserver

    return GenerateObserver(trackers).observations()


TRANSFORMERS = Engine(
    name="transformers",
    provider_name="transformers",
    roles={
        "serve_request": Role(
            (f"{_SERVING}.*:*Handler.handle_request",), reads={"manager": _model}, required=True
        ),
        "tokenize_request": Role(("transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",)),
        "begin_request": Role((f"{_MANAGERS}.generate_non_streaming",), reads={"request": Asked.of(False)}),
        "begin_stream": Role((f"{_MANAGERS}.generate_streaming",), reads={"request": Asked.of(True)}),
        "add_request": Role((f"{_SCHEDULER}.add_waiting_request",), ("scheduler:self", "message:state")),
        "end_scheduled_request": Role(
            (f"{_SCHEDULER}.finish_request",), reads={"req": _ended, "finish_reason": _end_reason}
        ),
        "cancel_requests": Role((f"{_SCHEDULER}.clear_cancelled_requests",), ("scheduler:self",)),
        "schedule": Role((f"{_PROCESSOR}.prepare_next_batch",), ("processor:self",)),
        "run_batch": Role((f"{_PROCESSOR}._generation_step",), reads={"batch": _batch}),
        "process_batch_result": Role(
            (f"{_PROCESSOR}.update_batch",),
            reads={"batch": _batch, "scheduler": lambda args, *_: args[0].scheduler},
        ),
        "forward": Role(
            (f"{_BATCHING}.model_runner:ModelRunner.compute_batch",), ("self", "model_runner:model")
        ),
        "generate": Role(("transformers.generation.utils:GenerationMixin.generate",)),
        "generate_prefill": Role(("transformers.generation.utils:GenerationMixin._prefill",)),
        "load_model": Role((f"{_SERVING}.model_manager:ModelManager._load_model",)),
        "cache_match": Role((f"{_CACHE}.search_prefix_match",), ("cache:self",)),
        "kv_free": Role((f"{_CACHE}.free_blocks",), ("cache:self",)),
    },
    attributes={
        "manager.model": "",
        "request.rids": lambda asked: (asked.rid,),
        "request.is_single": lambda asked: True,
        "request.stream": "streams",
        "request.ends_with_exchange": "streams",
        "request.max_tokens": _setting("max_new_tokens"),
        "request.temperature": _setting("temperature"),
        "request.top_p": _setting("top_p"),
        "request.top_k": _setting("top_k"),
        "http.headers": "headers",
        "tokenized.count": _length,
        "outputs.counts": _counts,
        "outputs.reason": _reason,
        "message.rid": "request_id",
        "req.rid": _rid,
        "req.output_tokens": lambda state: len(state.generated_tokens),
        "batch.mode": _mode,
        "batch.reqs": lambda batch: batch,
        "batch.num_tokens": lambda batch: sum(part.query_length for part in batch),
        "batch.prefills": lambda batch: [
            (part, part.query_length, part.has_new_token) for part in batch if _works_on_prompt(part)
        ],
        "scheduler.waiting": lambda scheduler: len(scheduler.waiting_requests),
        "scheduler.running": lambda scheduler: len(scheduler.active_requests),
        "scheduler.kv_usage": lambda scheduler: 1.0 - scheduler.cache.compute_free_capacity(),
        "model_runner.platform": lambda model: _platform_of(str(model.device)),
    },
    observers=_observers,
)
