"""How to read what transformers' server hands about: requests, answers that grow, and its batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgl_aspects.engines.base import Role

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
        return prompt_length(self.inputs)


def prompt_length(inputs: Any) -> int:
    ids = inputs["input_ids"]
    return len(ids) if isinstance(ids, list) else int(ids.shape[-1])


def output_length(answer: tuple[Asked, Any]) -> int | None:
    """Of what a manager gave: a queue and a streamer, or a text, the prompt's length and the tokens."""
    asked, given = answer
    if given is None:
        return None
    return int(given[1].total_tokens) if asked.streams else len(given[2])


def counts(answer: tuple[Asked, Any]) -> tuple[int | None, int | None, int | None]:
    return answer[0].prompt_length, output_length(answer), None


def finish_reason(answer: tuple[Asked, Any]) -> str:
    most = answer[0].settings.max_new_tokens
    return "length" if most is not None and (output_length(answer) or 0) >= most else "stop"


def model(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str | None:
    body = args[1] if len(args) > 1 else kwargs.get("body")
    asked = body.get("model") if isinstance(body, dict) else None
    return args[0].model_manager.force_model or asked


def setting(name: str) -> Any:
    return lambda asked: getattr(asked.settings, name, None)


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Sequence[Any]:
    """The batch at hand; where batches overlap there are two sets of inputs and outputs."""
    inputs = args[0].inputs_and_outputs
    pairs = getattr(inputs, "io_pairs", None)
    found: Sequence[Any] = (pairs[inputs.current_pair].host_io if pairs else inputs).requests_in_batch
    return found


def works_on_prompt(part: Any) -> bool:
    return not part.state.generated_tokens


def mode(batch: Sequence[Any]) -> str:
    prompts = sum(map(works_on_prompt, batch))
    return "decode" if not prompts else "prefill" if prompts == len(batch) else "mixed"


def rid(req: Any) -> str:
    """Of a request, or of its part in a batch."""
    return str(getattr(req, "state", req).request_id)


def ended(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Any:
    scheduler, rid = args[0], args[1] if len(args) > 1 else kwargs["request_id"]
    return scheduler.active_requests.get(rid)


def end_reason(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str | None:
    state = ended(args, kwargs)
    if state is None:
        return None
    if state.error is not None:
        return "error"
    most = state.max_new_tokens
    return "length" if most is not None and len(state.generated_tokens) >= most else "stop"


@functools.cache  # asked with each forward pass
def platform_of(device: str) -> Any:
    from sgl_aspects.engines import device as any_device

    return any_device.platform_of(device)
