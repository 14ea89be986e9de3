"""transformers 5.19: which functions of `transformers serve` play which role.

One process. With continuous batching a thread of its own schedules and runs batches; without, it runs one
request after the other (:mod:`.alone`), and there are no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sgl_aspects.engines.base import Engine, Outcome, Role, returned
from sgl_aspects.engines.device import platform_of
from sgl_aspects.engines.transformers.alone import ROLES, AloneObserver, end_reason, prompt_length

_SERVING = "transformers.cli.serving"
_MANAGERS = f"{_SERVING}.utils:*GenerateManager"
_BATCHING = "transformers.generation.continuous_batching"
_PROCESSOR = f"{_BATCHING}.continuous_api:ContinuousBatchProcessor"
_RUNNER = f"{_BATCHING}.model_runner:ModelRunner"
_SCHEDULER = f"{_BATCHING}.scheduler:Scheduler"
_CACHE = f"{_BATCHING}.cache:PagedAttentionCache"
_MODEL = "transformers.generation.utils:GenerationMixin"
_ASKED = Role((), ("manager:self", "model", "processor", "inputs", "settings:gen_config", "rid:request_id"))
_inputs, _settings, _rid = (_ASKED.reader(argument) for argument in ("inputs", "settings", "rid"))


def _generation(streams: bool) -> Callable[..., Any]:
    """Return a reader of the generation's inputs. ``streams``: the answer is an object that grows."""
    return lambda *call: SimpleNamespace(
        inputs=_inputs(*call), settings=_settings(*call), rid=_rid(*call), streams=streams
    )


def _counts(answer: tuple[Any, Any]) -> tuple[int, int | None, None]:
    """Return counts from an answer: a queue and a streamer, or a text, the prompt's length and the tokens."""
    generation, given = answer
    output = None if given is None else int(given[1].total_tokens) if generation.streams else len(given[2])
    return prompt_length(generation.inputs), output, None


def _batch(args: Any, kwargs: dict[str, Any], result: Any = None) -> Any:
    """Return the current batch; with overlap there are two sets of inputs and outputs."""
    inputs = args[0].inputs_and_outputs
    pairs = getattr(inputs, "io_pairs", None)
    return (pairs[inputs.current_pair].host_io if pairs else inputs).requests_in_batch


def _prefills(batch: Sequence[Any]) -> list[tuple[Any, int, bool]]:
    return [
        (part, part.query_length, part.has_new_token) for part in batch if not part.state.generated_tokens
    ]


def _mode(batch: Sequence[Any]) -> str:
    prompts = len(_prefills(batch))
    return "decode" if not prompts else "prefill" if prompts == len(batch) else "mixed"


def _ended(args: Any, kwargs: dict[str, Any], result: Any = None) -> Any:
    return args[0].active_requests.get(args[1] if len(args) > 1 else kwargs["request_id"])


def _output_tokens(state: Any) -> int:
    """Return the length of the answer; of a preempted request the prompt has its first part."""
    before = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
    return before + len(state.generated_tokens)


def _end_reason(state: Any) -> str:
    if state.error is not None:
        return "error"
    return end_reason(len(state.generated_tokens), state.max_new_tokens)


def _queued(*call: Any) -> tuple[str, Any]:
    return _rid(*call), _settings(*call)


_SERVED = {"manager": lambda args, *_: args[0].model_manager.force_model or args[1].get("model")}
_PROCESSED = {"batch": _batch, "scheduler": lambda args, *_: args[0].scheduler}

TRANSFORMERS = Engine(
    name="transformers",
    provider_name="transformers",
    roles={
        "serve_request": Role((f"{_SERVING}.*:*Handler.handle_request",), reads=_SERVED, required=True),
        "tokenize_request": Role(("transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",)),
        "begin_request": Role(
            (f"{_MANAGERS}.generate_non_streaming",), reads={"request": _generation(False)}
        ),
        "begin_stream": Role((f"{_MANAGERS}.generate_streaming",), reads={"request": _generation(True)}),
        "add_request": Role((f"{_SCHEDULER}.add_waiting_request",), ("scheduler:self", "message:state")),
        "end_scheduled_request": Role((f"{_SCHEDULER}.finish_request",), reads={"req": _ended}),
        "cancel_requests": Role((f"{_SCHEDULER}.clear_cancelled_requests",)),
        "schedule": Role((f"{_PROCESSOR}.prepare_next_batch",)),
        "run_batch": Role((f"{_PROCESSOR}._generation_step",), reads={"batch": _batch}),
        "process_batch_result": Role((f"{_PROCESSOR}.update_batch",), reads=_PROCESSED),
        "forward": Role(
            (f"{_BATCHING}.model_runner:ModelRunner.compute_batch",), ("_", "model_runner:model")
        ),
        "load_model": Role((f"{_SERVING}.model_manager:ModelManager._load_model",)),
        "cache_match": Role(
            (f"{_CACHE}.search_prefix_match",),
            reads={"tokens": lambda args, *_: len(args[2]), "hit_tokens": returned},
        ),
        "kv_free": Role((f"{_CACHE}.free_blocks",)),
    },
    attributes={
        "manager.model": "",
        "request.rids": lambda generation: (generation.rid,),
        "request.stream": "streams",
        "request.ends_with_exchange": "streams",
        "request.max_tokens": "settings.max_new_tokens",
        **{f"request.{name}": f"settings.{name}" for name in ("temperature", "top_p", "top_k")},
        "tokenized.count": prompt_length,
        "outputs.counts": _counts,
        "outputs.reason": lambda answer: end_reason(_counts(answer)[1], answer[0].settings.max_new_tokens),
        "message.rid": "request_id",
        "req.rid": lambda req: (req.state if hasattr(req, "state") else req).request_id,
        "req.finish_reason": _end_reason,
        "req.output_tokens": _output_tokens,
        "batch.mode": _mode,
        "batch.reqs": "",
        "batch.num_tokens": lambda batch: sum(part.query_length for part in batch),
        "batch.prefills": _prefills,
        "scheduler.waiting": lambda scheduler: len(scheduler.waiting_requests),
        "scheduler.running": lambda scheduler: len(scheduler.active_requests),
        "scheduler.kv_usage": lambda scheduler: 1.0 - scheduler.cache.compute_free_capacity(),
        "model_runner.platform": lambda model: platform_of(str(model.device)),
        "model_runner.model": "",
    },
    outcomes={"_GenerationCancelled": Outcome.ABORTED},
    own_roles=ROLES,
    observers=lambda trackers: AloneObserver(trackers, _queued).observations(),
)
