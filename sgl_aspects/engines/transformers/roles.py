"""transformers 5.19: which functions of `transformers serve` play which role.

One process. With continuous batching a thread of its own schedules and runs batches; without, it runs one
request after the other (``generate.py``), and there are no steps.
"""

from __future__ import annotations

from typing import Any

from sgl_aspects.engines.base import Engine, Role
from sgl_aspects.engines.transformers import readers

_SERVING = "transformers.cli.serving"
_MANAGERS = f"{_SERVING}.utils:*GenerateManager"
_BATCHING = "transformers.generation.continuous_batching"
_PROCESSOR = f"{_BATCHING}.continuous_api:ContinuousBatchProcessor"
_SCHEDULER = f"{_BATCHING}.scheduler:Scheduler"
_CACHE = f"{_BATCHING}.cache:PagedAttentionCache"


def _observers(trackers: Any) -> Any:
    from sgl_aspects.engines.transformers.generate import GenerateObserver

    return GenerateObserver(trackers).observations()


TRANSFORMERS = Engine(
    name="transformers",
    provider_name="transformers",
    roles={
        "serve_request": Role(
            (f"{_SERVING}.*:*Handler.handle_request",), reads={"manager": readers.model}, required=True
        ),
        "tokenize_request": Role(("transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__",)),
        "begin_request": Role(
            (f"{_MANAGERS}.generate_non_streaming",), reads={"request": readers.Asked.of(False)}
        ),
        "begin_stream": Role((f"{_MANAGERS}.generate_streaming",), reads={"request": readers.Asked.of(True)}),
        "wait": Role((f"{_SCHEDULER}.add_waiting_request",), ("scheduler:self", "state")),
        "end_scheduled_request": Role(
            (f"{_SCHEDULER}.finish_request",),
            reads={"req": readers.ended, "finish_reason": readers.end_reason},
        ),
        "cancel_requests": Role((f"{_SCHEDULER}.clear_cancelled_requests",), ("scheduler:self",)),
        "schedule": Role((f"{_PROCESSOR}.prepare_next_batch",), ("processor:self",)),
        "run_batch": Role((f"{_PROCESSOR}._generation_step",), reads={"batch": readers.batch_of}),
        "process_batch_result": Role(
            (f"{_PROCESSOR}.update_batch",),
            reads={"batch": readers.batch_of, "scheduler": lambda args, *_: args[0].scheduler},
        ),
        "forward": Role(
            (f"{_BATCHING}.model_runner:ModelRunner.compute_batch",), ("self", "model_runner:model")
        ),
        "generate": Role(("transformers.generation.utils:GenerationMixin.generate",)),
        "generate_prefill": Role(("transformers.generation.utils:GenerationMixin._prefill",)),
        "stream_end": Role((f"{_SERVING}.utils:DirectStreamer.end",), ("streamer:self",)),
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
        "request.max_tokens": readers.setting("max_new_tokens"),
        "request.temperature": readers.setting("temperature"),
        "request.top_p": readers.setting("top_p"),
        "request.top_k": readers.setting("top_k"),
        "http.headers": "headers",
        "tokenized.count": readers.prompt_length,
        "outputs.counts": readers.counts,
        "outputs.reason": readers.finish_reason,
        "req.rid": readers.rid,
        "req.output_tokens": lambda state: len(state.generated_tokens),
        "batch.mode": readers.mode,
        "batch.reqs": lambda batch: batch,
        "batch.num_tokens": lambda batch: sum(part.query_length for part in batch),
        "batch.prefills": lambda batch: [
            (part, part.query_length, part.has_new_token) for part in batch if readers.works_on_prompt(part)
        ],
        "scheduler.waiting": lambda scheduler: len(scheduler.waiting_requests),
        "scheduler.running": lambda scheduler: len(scheduler.active_requests),
        "scheduler.kv_usage": lambda scheduler: 1.0 - scheduler.cache.compute_free_capacity(),
        "model_runner.platform": lambda model: readers.platform_of(str(model.device)),
    },
    observers=_observers,
)
