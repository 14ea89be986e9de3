"""The contract of an engine's integration: every role, argument and attribute that observers read, once.

An integration (:mod:`.base`) states which function of its engine plays which role (``"run_batch"``), which
parameter is which argument (``"batch"``), and how to read attributes of the engine's objects
(``"batch.mode"``). :data:`ROLES` and :data:`ATTRIBUTES` have all of these names: any other is a
``ConfigError`` where an integration or an observer uses it, and a test fails for a name that no observer
reads.

What only one engine has is observed by its integration's own observers (:class:`Observation`), on roles of
its own (``Engine.own_roles``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_aspects.errors import ConfigError

#: Each role, and the arguments that observers read of its calls.
ROLES: Mapping[str, tuple[str, ...]] = {
    # A request, in the process of its caller.
    "describe_server": ("description",),
    # A call of a gRPC server: ASGI's scope of the same over HTTP; after an exception, HTTP's status.
    "answer_rpc": ("scope", "status"),
    "answer_embedding_rpc": ("scope", "status"),
    "answer_line": ("scope", "status"),  # of a file of requests; the status is the result's, not an error's
    "refuse_line": ("scope", "status"),  # of one that it does not begin to answer
    "serve_request": ("manager", "http"),
    "serve_pooling": ("manager",),
    "serve_search": ("manager", "request"),  # a request that the engine answers by many of its own
    "submit_request": ("manager",),  # instead of serve_request: returns at once, and nobody waits there
    "submit_requests": ("manager",),  # calls it for each of its requests
    "receive_request": ("request",),
    "begin_request": ("request",),
    "begin_stream": ("request",),
    "apply_template": ("http",),
    "render_messages": ("http",),  # likewise, on other paths; one within another is a part of it
    "render_template": ("http",),
    "await_adapter": ("request",),
    "tokenize_prompt": (),
    "tokenize_request": ("request",),
    "send_request": ("tokenized",),
    "send_requests": ("tokenized",),
    "receive_outputs": ("manager", "outputs"),
    "parse_output": (),  # of an answer, or a piece of it: tool calls and reasoning
    "receive_abort": ("message", "aborted"),
    "finish_request": ("state", "finish_reason", "error"),
    "describe_detokenizer": ("description",),
    "detokenize": ("state", "outputs"),
    # A request, in the process of the scheduler.
    "describe_scheduler": ("description",),
    "add_request": ("scheduler", "message"),
    "add_embedding_request": ("scheduler", "message"),
    "abort_scheduled_request": ("scheduler", "message"),
    "reject_request": ("req",),
    "retract": ("req",),
    "end_scheduled_request": ("req", "finish_reason"),
    "cancel_requests": (),
    "release_request": ("req",),
    "compile_grammar": ("req", "kind", "waits"),
    "grammar_ready": ("reqs",),
    # A batch.
    "receive_messages": ("scheduler",),
    "schedule": (),
    "schedule_prefill": (),
    "schedule_decode": (),
    "run_batch": ("batch",),
    # ``drafts``, on entry: id, drafted and accepted tokens of each request with drafts; or ``result.drafts``.
    "process_batch_result": ("scheduler", "batch", "result", "drafts"),
    # Its forward pass; in another process than the scheduler's, too.
    "describe_worker": ("description",),
    "forward": ("model_runner", "batch"),
    "graph_launch": (),
    "run_encoder": (),  # of images: its graphs are not the pass's
    "sample": (),
    # Of speculation: a draft model's passes before and after the target's, or a search for a continuation.
    "draft": (),
    "draft_extend": (),
    "draft_search": (),
    # In detail.
    "cache_match": ("tokens", "hit_tokens"),
    "cache_insert": ("tokens",),
    "cache_evict": ("tokens",),
    "cache_load": ("tokens", "bytes"),  # from the host's memory to the device's
    "cache_write_back": ("tokens", "bytes"),
    "kv_alloc": ("tokens",),
    "kv_alloc_prefill": ("tokens",),
    "kv_alloc_decode": ("tokens",),
    "kv_free": ("tokens",),
    "attention": ("layer", "implementation", "shape"),
    "operator": ("operator", "implementation", "shape"),
    "logits": ("shape",),
    "sampler": ("shape",),
    # Before the engine serves, and between requests.
    "start_engine": (),
    "load_model": (),
    "kv_init": (),
    "graph_capture": (),
    "update_weights": (),
    "update_weights_by_call": ("applies",),  # one function calls any of its workers'
    "update_weights_from_disk": (),
    "update_weights_from_distributed": (),
    "update_weights_from_tensor": (),
    "update_weights_from_ipc": (),
    "load_adapter": ("adapter",),
    "unload_adapter": ("adapter",),
    "flush_cache": (),
    "pause": (),
    "pause_by_abort": ("applies",),  # in the process of its callers: the scheduler is not told of the pause
    "resume": (),
    "sleep": (),
    "wake_up": (),
}


class Request:
    """A request as its caller sent it."""

    rids: tuple[str, ...]  # its id; the ids of a batch of prompts
    is_probe: bool | None  # the engine's own health check: not traced
    is_single: bool | None  # one answer; yes where an integration does not define it
    answer_count: int  # of a request for several
    priority: int | None  # where its engine schedules by it
    model: str | None  # what its caller asked for, if not the server's model: an adapter
    answer_rids: tuple[str, ...] | None  # where the answers' ids are known from the start
    group: str | None  # the id of the first request of the same call, whose trace it joins
    operation: str | None  # GenAI's name, where the path of the HTTP request does not tell
    headers: Mapping[str, str] | None
    received_ns: int | None  # on the monotonic clock, as `time.monotonic_ns`
    response_id: str | None  # the client's id of the answer, where it is not the request's
    ends_with_exchange: bool | None  # an answer that grows until its HTTP response is complete
    messages: list[tuple[str, str]] | None  # the prompt: roles and texts
    #: Prefill and decode on two servers: what both derive the trace from; where its root span is.
    shared_key: int | None
    is_first_server: bool | None
    bootstrap_room: int | None
    #: Attributes of its span.
    stream: bool | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    stop_sequences: list[str] | None
    choice_count: int | None
    output_type: str | None  # "json": its caller wants JSON


class Manager:
    """The object that receives requests."""

    model: str
    description: Mapping[str, Any] | None  # as in the roles ``describe_…``; read of the first request's
    in_flight: Mapping[str, Any] | None  # its open requests by id
    is_first_server: bool | None  # of every request


class HTTP:
    """The HTTP request as the engine's functions get it."""

    headers: Mapping[str, str]
    path: str
    scope: Mapping[str, Any] | None  # ASGI's, where the engine works on it in a thread without a context


class Tokenized:
    """The result of tokenizing, and the message to the scheduler."""

    rid: str
    count: int | None


class Outputs:
    """A message of outputs for many requests; for ``counts``, ``text`` and ``reason`` the place of one of
    them: the message and an index in it.
    """

    each: Iterable[tuple[str, Any]]  # id, and why it ended or None: totals are read by ``counts``
    new: Iterable[tuple[str, str | None, int, int | None, int | None]]  # or what each message adds
    counts: tuple[int | None, int | None, int | None]  # prompt, output and cached tokens
    tiers: tuple[int | None, int | None]  # of the cached ones, those from the host's memory and from storage
    text: str | None
    reason: str | None


class State:
    """A request whose end a function reports (``finish_request``)."""

    rid: str
    text: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    first_token_time_ns: int | None  # on the monotonic clock


class Reason:
    """Why a request ended, as ``outputs.each`` has it."""

    text: str
    problem: str | None  # the error by which the engine rejected it
    status: int | None  # HTTP's, if it rejected it


class Error:
    """An exception by which the engine ends a request."""

    status: int | None  # with which it is answered over HTTP


class Rid:
    """A request's id."""

    is_probe: bool | None


class Message:
    """A request, or an abort, as it reaches the scheduler."""

    rid: str
    is_probe: bool | None
    abort_all: bool | None
    reason: Any  # of an abort: why the engine rejected the request
    prompt_tokens: int | None
    elsewhere: tuple[int, int, bool] | None  # of a follower: trace id, span id and sampled flag
    remote: tuple[int, int, bool] | None  # the same, of a request that another host received


class Req:
    """A request in the scheduler."""

    rid: str
    finish_reason: str | None
    output_tokens: int | None
    is_middle_chunk: bool | None  # its prompt goes on after the chunk whose result is processed
    is_prefill_only: bool | None
    #: Tokens drafted for it so far, and how many of them were accepted at each position of a draft.
    drafts: tuple[int, Sequence[int]] | None


class Batch:
    """A batch."""

    step_id: int | None
    shared_id: int | None  # a number that the workers of other processes derive, too
    mode: Any
    reqs: Sequence[Any]
    num_tokens: int
    prefills: Sequence[tuple[Any, int, bool | None]]  # request, tokens, whether these are the last
    finished: Sequence[Any]  # its requests that have ended
    #: Mode and requests, where reading each takes a call; None: an empty batch, which is no step.
    summary: tuple[Any, Sequence[Any]] | None


class Result:
    """The result of a batch, once it is processed."""

    #: Drafted and accepted tokens, if requests have them in ``req.drafts``; None without drafts.
    drafts: tuple[int, int] | None


class Mode:
    """The mode of a batch."""

    name: str
    is_speculative: bool | None  # the model is fed drafts of its requests' next tokens, too


class Scheduler:
    """The scheduler."""

    waiting: int
    running: int
    kv_usage: float | None  # 0 to 1
    is_idle: bool | None
    waiting_rids: set[str] | None
    front_end: Any  # stands in for the manager where requests come from a front end that is not Python
    is_follower: bool | None  # a rank that runs the same requests as the one that answers them


class ModelRunner:
    """The object that runs forward passes."""

    platform: Any  # the device's: its events measure time
    model: Any  # PyTorch's module: what it calls its modules is their names in a profile


#: Each kind of object, and the attributes that observers read of it.
ATTRIBUTES: Mapping[str, frozenset[str]] = {
    kind: frozenset(attributes.__annotations__)
    for kind, attributes in {
        "request": Request,
        "manager": Manager,
        "http": HTTP,
        "tokenized": Tokenized,
        "outputs": Outputs,
        "state": State,
        "reason": Reason,
        "error": Error,
        "rid": Rid,
        "message": Message,
        "req": Req,
        "batch": Batch,
        "result": Result,
        "mode": Mode,
        "scheduler": Scheduler,
        "model_runner": ModelRunner,
    }.items()
}


def check_role(role: str) -> None:
    """:raises ConfigError: there is no such role."""
    _check("role", role, ROLES)


def check_argument(role: str, argument: str) -> None:
    """:raises ConfigError: no observer reads such an argument of the role."""
    check_role(role)
    _check(f"argument of the role {role!r}", argument, ROLES[role])


def check_attribute(name: str) -> None:
    """:raises ConfigError: ``"kind.attribute"`` is none that an observer reads."""
    kind, _, attribute = name.partition(".")
    _check("kind of object", kind, ATTRIBUTES)
    _check(f"attribute of {kind!r}", attribute, ATTRIBUTES[kind])


def _check(what: str, name: str, names: Iterable[str]) -> None:
    if name in names:
        return
    close = difflib.get_close_matches(str(name), names, 1)
    choices = f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(sorted(names))}"
    raise ConfigError(f"{name!r} is not a known {what}; {choices} (see {__name__})")


WITHOUT_STEPS = 0


@dataclass
class Observation:
    """The advice for the function in ``role``; reports name it after its class.

    ``enter(args, kwargs) -> token``, ``exit(token, result, error)``; None: not called. ``level``: the lowest
    trace level at which it is woven. Levels 1 and 2 are always woven: one of them detects level changes.
    ``WITHOUT_STEPS``: as level 3, and always in a process where no step has run.
    ``caller``: what calls them in C where they are the only hooks of a function.
    """

    role: str
    enter: Any
    exit: Any = None
    level: int = 1
    caller: Any = None

    def __post_init__(self) -> None:
        method = self.enter or self.exit
        owner = getattr(method, "__self__", None)
        if owner is not None:
            self.__qualname__, self.__module__ = type(owner).__qualname__, type(owner).__module__
        else:
            name = method.__qualname__.partition(".<locals>")[0]
            self.__qualname__, self.__module__ = name.rpartition(".")[0], method.__module__
