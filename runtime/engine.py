"""Engine: a model in a process of its own, and the calls that use it.

    with Engine(model_path="models/SmolLM2-135M-Instruct") as engine:
        print(engine.generate("The capital of France is", SamplingParams(max_new_tokens=8)).text)

A script makes its Engine under ``if __name__ == "__main__":``, because the scheduler process, being spawned,
imports the script again.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, overload

from sgl_aspects.errors import ConfigError, EngineError, InvalidRequestError
from sgl_aspects.plugins import load_plugins
from sgl_aspects.runtime.checks import is_integer
from sgl_aspects.runtime.communicator import share_of
from sgl_aspects.runtime.frontend.manager import Counters, RequestManager
from sgl_aspects.runtime.frontend.request import (
    GenerateRequest,
    GenerationResult,
    Prompt,
    RequestHandle,
    StreamChunk,
)
from sgl_aspects.runtime.loader.checkpoint import open_checkpoint
from sgl_aspects.runtime.messages import ProfileRequest, StatsRequest, UpdateWeightsRequest
from sgl_aspects.runtime.processes.link import SchedulerLink
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.runtime.server_args import ServerArgs, with_platform_defaults

__all__ = ["Engine", "GenerationResult", "RequestHandle", "StreamChunk"]


class Engine:
    """Takes a ServerArgs or its fields. Safe to use from several threads.

    Raises ModelLoadError if the model cannot be loaded, ConfigError for settings that cannot work; no process
    is left then. Every call raises SchedulerDiedError once the scheduler process is gone.
    """

    def __init__(self, server_args: ServerArgs | None = None, **fields: Any) -> None:
        if server_args is not None and fields:
            raise ConfigError("give Engine a ServerArgs or its fields, not both")
        _refuse_second_import()
        args = server_args or ServerArgs(**fields)
        load_plugins(compatible=True)
        checkpoint = open_checkpoint(str(args.model_path))  # before torch is loaded, to find a wrong path
        self.server_args = args = with_platform_defaults(args)
        config = checkpoint.config
        share_of(config.num_heads, args.tp_size, "the attention heads")  # before any process is started
        link = SchedulerLink(args)
        # The scheduler ends with its engine: at shutdown, garbage collection, or the end of the program, and
        # there before multiprocessing waits for the processes that are left.
        self._close = Finalize(self, link.close, exitpriority=0)
        try:
            tokenizer = checkpoint.load_tokenizer()  # while the scheduler loads the weights
            ready = link.wait_until_ready(args.startup_timeout)
        except BaseException:
            link.kill()
            raise
        self._link = link
        self.context_length = args.context_length or config.context_length
        self.max_total_tokens = ready.max_total_tokens
        self.request_manager = RequestManager(
            tokenizer,
            link.send,
            model=args.served_model_name or "",
            vocab_size=config.vocab_size,
            context_length=self.context_length,
            max_total_tokens=ready.max_total_tokens,
        )
        link.start(self.request_manager)

    # -- requests ------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        rid: str | None = None,
        external_trace_header: Mapping[str, str] | None = None,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rid: Sequence[str] | None = None,
        external_trace_header: Mapping[str, str] | None = None,
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        *,
        rid: Any = None,
        external_trace_header: Mapping[str, str] | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """The answer to a prompt; a list of answers to a list of prompts.

        A prompt is a text, a list of token ids, or a conversation: a list of messages, each a dict with
        "role" and "content", which goes through the model's chat template. ``sampling_params`` is one for all
        prompts, or one for each. InvalidRequestError if a prompt can never be served; the others of its list
        are aborted then.
        """
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
        prompts = prompt if many else [prompt]
        each_params = _one_for_each(sampling_params, len(prompts), "sampling_params", SamplingParams)
        each_rid = _one_for_each(rid, len(prompts), "rid", type(None) if many else str)
        handles: list[RequestHandle] = []
        try:
            for one, params, its_rid in zip(prompts, each_params, each_rid):
                handle = self.submit(
                    one, params, rid=its_rid, external_trace_header=external_trace_header, stream=False
                )
                handles.append(handle)
            results = [handle.result() for handle in handles]
        finally:
            for handle in handles:  # where one failed, or Ctrl-C ended the wait
                handle.abort()
        return results if many else results[0]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        rid: str | None = None,
        external_trace_header: Mapping[str, str] | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield the answer's chunks as they arrive. It is sent now; closing the iterator aborts it."""
        return iter(
            self.submit(prompt, sampling_params, rid=rid, external_trace_header=external_trace_header)
        )

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        rid: str | None = None,
        external_trace_header: Mapping[str, str] | None = None,
        stream: bool = True,
    ) -> RequestHandle:
        """Send a request and return at once. ``stream``, for traces: whether its text is read as it comes."""
        if sampling_params is not None and sampling_params.n != 1:
            raise InvalidRequestError(
                f"n={sampling_params.n}: submit_group() gives several answers to a prompt"
            )
        ((handle,),) = self.submit_group(
            [prompt], sampling_params, rid=rid, external_trace_header=external_trace_header, stream=stream
        )
        return handle

    def submit_group(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        rid: str | None = None,
        external_trace_header: Mapping[str, str] | None = None,
        stream: bool = True,
    ) -> list[list[RequestHandle]]:
        """Send ``sampling_params.n`` requests for each prompt, which make up one call and one trace.

        Returns the handles of each prompt. Where one cannot be sent, none is.
        """
        params = sampling_params or SamplingParams()
        manager = self.request_manager
        manager.check_sampling_params(params)
        headers = {name.lower(): value for name, value in (external_trace_header or {}).items()}
        first = rid or uuid.uuid4().hex
        count = len(prompts) * params.n
        handles: list[RequestHandle] = []
        try:
            for number in range(count):
                request = GenerateRequest(
                    prompt=prompts[number // params.n],
                    sampling_params=_of_choice(params, number % params.n),
                    rid=f"{first}-{number}" if number else first,
                    stream=stream,
                    headers=headers,
                    group=first if count > 1 else "",
                )
                handles.append(manager.receive_request(request))
            for number, handle in enumerate(handles):
                if number % params.n:
                    handle.input_ids = handles[number - 1].input_ids
                else:
                    manager.tokenize_request(handle)
            for handle in handles:
                manager.send_request(handle)
        except BaseException as error:
            for handle in handles:
                manager.fail_request(handle.rid, error)
            raise
        return [handles[start : start + params.n] for start in range(0, count, params.n)]

    # -- the engine itself ---------------------------------------------------------------------------

    @property
    def scheduler_pid(self) -> int:
        """Process id of the scheduler; with several, of rank 0."""
        return self.scheduler_pids[0]

    @property
    def scheduler_pids(self) -> list[int]:
        """Process ids of the schedulers, by rank."""
        return [process.pid or 0 for process in self._link.ranks.processes]

    @property
    def failure(self) -> str | None:
        """The reason why the engine has failed; None while it serves."""
        return self.request_manager.death

    def abort(self, rid: str) -> bool:
        """End a request early; False if none with this id is open."""
        return self.request_manager.abort(rid)

    def stats(self, timeout: float | None = None) -> dict[str, int]:
        """Return current counts: waiting_requests, running_requests, kv_total_tokens, kv_available_tokens,
        kv_cached_tokens (prefixes; unused ones also count as available), retractions, steps.

        The scheduler answers between two steps; TimeoutError if it takes longer than ``timeout`` s.
        """
        stats: dict[str, int] = self._link.ask(StatsRequest(), timeout)
        return stats

    def start_profile(self, num_steps: int, folder: str | os.PathLike[str] | None = None) -> list[Path]:
        """Profile the next steps with PyTorch's profiler: a Chrome trace for each rank, in ``folder``.

        None: a new temporary folder. Returns at once; the files are there after ``num_steps`` steps,
        which need requests. InvalidRequestError where another profile is being taken.
        """
        if not is_integer(num_steps) or num_steps < 1:
            raise InvalidRequestError(f"num_steps={num_steps!r}: write a whole number of at least 1")
        if folder is None:
            folder = tempfile.mkdtemp(prefix="sgl-aspects-profile-")
        os.makedirs(folder, exist_ok=True)
        request = ProfileRequest(os.path.abspath(os.fspath(folder)), num_steps)
        files: list[Path] = self._link.ask(request)
        return files

    def update_weights(self, model_path: str | os.PathLike[str]) -> None:
        """Replace the weights by those of another checkpoint of the same model.

        Requests that have been given output finish with the old weights, the others wait and get the new
        ones; this returns when the new weights are in place. They are loaded beside the old ones, which need
        their memory until then. ModelLoadError where they cannot be loaded: the old ones go on serving.
        """
        self._link.ask(UpdateWeightsRequest(os.fspath(model_path)))

    @property
    def counters(self) -> Counters:
        """Counts since the engine was made."""
        return self.request_manager.counters

    def shutdown(self) -> None:
        """End the scheduler process. Open requests fail with SchedulerDiedError. Safe to call again."""
        self._close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Return the settings of one of ``n`` answers: each has a seed of its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index) % 2**63)


def _one_for_each(value: Any, count: int, name: str, single: type) -> list[Any]:
    """Return ``value`` as a list of ``count``: the same for all, or one for each."""
    if value is None or isinstance(value, single):
        return [value] * count
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        raise InvalidRequestError(f"{name}={value!r}: give one for each of the {count} prompts")
    return list(value)


def _refuse_second_import() -> None:
    """Raise in a spawned child that imports its parent's script, which would spawn endlessly."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EngineError(
            "this script makes an Engine when it is imported, and the scheduler process, being spawned, "
            'imports it again. Put the code that makes the Engine under `if __name__ == "__main__":`.'
        )
