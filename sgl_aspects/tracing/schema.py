"""Every span, attribute and metric name, once. docs/tracing.md describes them.

docs/make_names.py makes docs/names/README.md of this module, whose sections say what has an attribute.
"""

from __future__ import annotations

from sgl_aspects.tracing.records import SpanType

# -- attributes of requests ----------------------------------------------------------------------------

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
#: Its older name; left out where OTEL_SEMCONV_STABILITY_OPT_IN asks for the newest names.
SYSTEM = "gen_ai.system"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_ID = "gen_ai.request.id"
#: Sampling parameters: ``REQUEST_PREFIX`` and one of ``REQUEST_ATTRIBUTES``.
REQUEST_PREFIX = "gen_ai.request."
REQUEST_ATTRIBUTES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stream",
    "frequency_penalty",
    "presence_penalty",
    "stop_sequences",
    "choice.count",
)
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
END_TO_END = "gen_ai.latency.e2e"
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
TIME_IN_INFERENCE = "gen_ai.latency.time_in_model_inference"
#: What a request waits for outside of its phases: for its server to tokenize it; then, for its scheduler.
TIME_TO_TOKENIZE = "sgl_aspects.latency.time_to_tokenize"
TIME_TO_QUEUE = "sgl_aspects.latency.time_to_queue"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
#: What tool calls and reasoning took to be found in an answer, in all.
PARSE_BUSY_TIME = "sgl_aspects.parse.busy_time"
STATUS_CODE = "http.response.status_code"
#: The caller's own id of its request, as OpenTelemetry's HTTP conventions have it.
HEADER_REQUEST_ID = "http.request.header.x-request-id"
#: Where its engine schedules by priority.
PRIORITY = "sgl_aspects.priority"
#: The OpenTelemetry name of what its output must follow, if that is JSON.
OUTPUT_TYPE = "gen_ai.output.type"
#: Of the cached tokens of a prompt, those that came from the host's memory, from storage, from another
#: server, and from where their connector does not say.
HOST_TOKENS = "sgl_aspects.prefix_cache.host_tokens"
STORAGE_TOKENS = "sgl_aspects.prefix_cache.storage_tokens"
PEER_TOKENS = "sgl_aspects.prefix_cache.peer_tokens"
EXTERNAL_TOKENS = "sgl_aspects.prefix_cache.external_tokens"
#: For prefill and decode on two servers: the request's shared number.
BOOTSTRAP_ROOM = "sgl_aspects.bootstrap_room"
#: Whom the request was for, by the header or baggage entry that SGL_ASPECTS_TRACE_TENANT names.
TENANT = "sgl_aspects.tenant"
#: Of a slow request: seconds, by cause (analysis/causes.py); and the ids of requests that delayed it.
CAUSE_PREFIX = "sgl_aspects.cause."
CULPRITS = "sgl_aspects.cause.culprits"

# -- attributes of any span ----------------------------------------------------------------------------

ERROR_TYPE = "error.type"
UNFINISHED_FLAG = "sgl_aspects.unfinished"
#: For what began before attach, and what was open at detach.
ATTACHED_FLAG = "sgl_aspects.attached"
DETACHED_FLAG = "sgl_aspects.detached"

# -- attributes of other spans -------------------------------------------------------------------------

FINISH_REASON = "sgl_aspects.finish_reason"
PREFILL_TOKENS = "sgl_aspects.prefill.tokens"
PREFILL_CHUNK = "sgl_aspects.prefill.chunk"
DETOKENIZE_CALLS = "sgl_aspects.detokenize.calls"
DETOKENIZE_BUSY_TIME = "sgl_aspects.detokenize.busy_time"
UNREAD_TIME = "sgl_aspects.caller.unread_time"
STEP_ID = "sgl_aspects.step.id"
MODE = "sgl_aspects.forward.mode"
BATCH_SIZE = "sgl_aspects.batch.size"
BATCH_TOKENS = "sgl_aspects.batch.tokens"
QUEUE_WAITING = "sgl_aspects.queue.waiting"
QUEUE_RUNNING = "sgl_aspects.queue.running"
KV_USAGE = "sgl_aspects.kv.usage"
DEVICE_NAME = "sgl_aspects.device.name"
DEVICE_TIME = "sgl_aspects.forward.device_time"
GRAPH = "sgl_aspects.forward.graph"
#: Of spans of level 4: the number of the model's layer; the operator, who computes it, and the shape of its
#: first tensor; how many tokens of the KV cache a call is about, how many of them were found there, and the
#: bytes that it moves.
LAYER = "sgl_aspects.layer"
OPERATOR_NAME = "sgl_aspects.operator.name"
IMPLEMENTATION = "sgl_aspects.operator.implementation"
SHAPE = "sgl_aspects.operator.shape"
KV_TOKENS = "sgl_aspects.kv.tokens"
KV_HIT_TOKENS = "sgl_aspects.kv.hit_tokens"
KV_BYTES = "sgl_aspects.kv.bytes"
#: Of a kernel of a profile: its name, its stream; seconds for which the device was idle before it, since the
#: host launched it late, it waited for a copy, or its launch took so long; how many kernels one span sums up;
#: the module of the model that launched it, as `model.layers.3.mlp`, or "replayed graph".
KERNEL_NAME = "sgl_aspects.kernel.name"
KERNEL_STREAM = "sgl_aspects.kernel.stream"
IDLE_HOST = "sgl_aspects.kernel.idle.host_late"
IDLE_TRANSFER = "sgl_aspects.kernel.idle.transfer"
IDLE_LAUNCH = "sgl_aspects.kernel.idle.launch"
KERNEL_COUNT = "sgl_aspects.kernel.count"
KERNEL_LAYER = "sgl_aspects.kernel.layer"
#: Of speculative decoding: tokens that were drafted for a request, and how many of them it got. Metrics, too.
DRAFTED_TOKENS = "sgl_aspects.speculation.drafted_tokens"
ACCEPTED_TOKENS = "sgl_aspects.speculation.accepted_tokens"
#: How many were accepted at each position of a draft, a list.
ACCEPTED_AT = "sgl_aspects.speculation.accepted_at"
#: What a request's output must follow: json, regex, …
GRAMMAR_KIND = "sgl_aspects.grammar.kind"
#: The name of a LoRA adapter.
ADAPTER = "sgl_aspects.adapter"
#: Of a step: the LoRA adapters of its requests, added by the collector.
ADAPTERS = "sgl_aspects.adapters"
#: For prefill and decode on two servers.
KV_TRANSFER_BYTES = "sgl_aspects.kv_transfer.bytes"
#: For an image or a video: what its request asked for. Each is a step.
DENOISE_STEPS = "sgl_aspects.denoise.steps"

# -- attributes of a process's resource ----------------------------------------------------------------

SERVICE_NAME = "service.name"
#: The run, where its starter does not name another one.
SERVICE_INSTANCE = "service.instance.id"
DISAGGREGATION_MODE = "sgl_aspects.disaggregation.mode"
TRANSFER_BACKEND = "sgl_aspects.disaggregation.transfer_backend"
RANK = "sgl_aspects.rank"
NODE_RANK = "sgl_aspects.node.rank"
#: A rank that runs the batches of another one, which answers: metrics leave its steps out.
FOLLOWER = "sgl_aspects.rank.follower"

# -- attributes of metrics -----------------------------------------------------------------------------

EXPORTER = "sgl_aspects.exporter"
TOKEN_TYPE = "gen_ai.token.type"
#: In a draft, from 0.
POSITION = "sgl_aspects.speculation.position"
#: Whether a request kept the targets of latency: goodput is the share of "true".
KEPT_TARGETS = "sgl_aspects.goodput.kept"

# -- metrics -------------------------------------------------------------------------------------------

#: Some share the name of an attribute: the queue, the KV cache, the batch.
REQUEST_DURATION = "gen_ai.server.request.duration"
SERVER_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
TOKEN_USAGE = "gen_ai.client.token.usage"
INTER_TOKEN_LATENCY = "sgl_aspects.inter_token_latency"
TOKENS = "sgl_aspects.tokens"
#: Requests, where there are targets of latency.
JUDGED = "sgl_aspects.goodput.requests"
CACHE_HIT_TOKENS = "sgl_aspects.prefix_cache.hit_tokens"
STEP_DURATION = "sgl_aspects.step.duration"
STEP_TOKENS = "sgl_aspects.step.tokens"
RECORDS_DROPPED = "sgl_aspects.records.dropped"
SPANS_EXPORTED = "sgl_aspects.spans.exported"
SPANS_DROPPED = "sgl_aspects.spans.dropped"

# -- spans of a request --------------------------------------------------------------------------------

#: Values of ``ERROR_TYPE`` where the caller gave the request up.
LEFT_ERRORS = ("abort", "cancelled", "CancelledError", "ClientDisconnect")
#: Its name is its operation and the model.
REQUEST = SpanType(
    "request",
    {
        RESPONSE_ID: str,
        FINISH_REASONS: list,
        TIME_TO_FIRST_CHUNK: float,
        INPUT_TOKENS: int,
        OUTPUT_TOKENS: int,
        CACHED_TOKENS: int,
        TIME_TO_FIRST_TOKEN: float,
        END_TO_END: float,
        OUTPUT_MESSAGES: str,
        HOST_TOKENS: int,
        STORAGE_TOKENS: int,
        PARSE_BUSY_TIME: float,
        # Of a request that failed.
        STATUS_CODE: int,
    },
)
TEMPLATE = SpanType("chat_template")
#: Before it is tokenized: its adapter is loaded if it is not.
WAIT_FOR_ADAPTER = SpanType("wait_for_adapter", {ADAPTER: str})
TOKENIZE = SpanType("tokenize", {INPUT_TOKENS: int})
#: From the first to the last time that the answer waited for its caller to read, and how long in all.
WAIT_FOR_CALLER = SpanType("wait_for_caller", {UNREAD_TIME: float})
DETOKENIZE = SpanType("detokenize", {DETOKENIZE_CALLS: int, DETOKENIZE_BUSY_TIME: float})
#: Of the cached tokens, those that the request's own span has from its queue.
TIERS = (HOST_TOKENS, STORAGE_TOKENS, PEER_TOKENS, EXTERNAL_TOKENS)
#: A finish reason in the queue: the request ended there. Its own span has the error, if any.
QUEUE = SpanType("queue", {FINISH_REASON: str, **dict.fromkeys(TIERS, int)})
PREFILL = SpanType("prefill", {PREFILL_TOKENS: int, PREFILL_CHUNK: int})
DECODE = SpanType(
    "decode",
    {
        OUTPUT_TOKENS: int,
        FINISH_REASON: str,
        DRAFTED_TOKENS: int,
        ACCEPTED_TOKENS: int,
        ACCEPTED_AT: list,
    },
)
#: A request waits until the grammar of its output is compiled.
GRAMMAR = SpanType("grammar", {GRAMMAR_KIND: str})
#: For a prompt prefilled by one server and decoded by another.
BOOTSTRAP = SpanType("bootstrap", {FINISH_REASON: str})
KV_TRANSFER = SpanType("kv_transfer", {FINISH_REASON: str, KV_TRANSFER_BYTES: int})
#: For an image or a video: its prompt encoded and its noise made; denoised; decoded and written.
ENCODE = SpanType("encode", {FINISH_REASON: str})
DENOISE = SpanType("denoise", {FINISH_REASON: str, DENOISE_STEPS: int})
DECODE_LATENTS = SpanType("decode_latents", {FINISH_REASON: str})
_OF_IMAGES = (ENCODE, DENOISE, DECODE_LATENTS)
#: The phases of a request, one at a time, between and after the chunks of its prompt.
PHASES = {type.name: type for type in (QUEUE, GRAMMAR, BOOTSTRAP, KV_TRANSFER, DECODE, *_OF_IMAGES)}

# -- spans of a step -----------------------------------------------------------------------------------

STEP = SpanType(
    "scheduler.step",
    {
        STEP_ID: int,
        MODE: str,
        BATCH_SIZE: int,
        BATCH_TOKENS: int,
        QUEUE_WAITING: int,
        QUEUE_RUNNING: int,
        KV_USAGE: float,
        DRAFTED_TOKENS: int,
        ACCEPTED_TOKENS: int,
    },
)
SCHEDULE = SpanType("schedule")
RUN_BATCH = SpanType("run_batch")
FORWARD = SpanType(
    "forward",
    {MODE: str, BATCH_SIZE: int, BATCH_TOKENS: int, DEVICE_NAME: str, DEVICE_TIME: float, GRAPH: str},
)
#: Below ``forward``: what `sgl-aspects control --profile` saw the device run.
KERNEL = SpanType(
    "kernel",
    {
        KERNEL_NAME: str,
        OPERATOR_NAME: str,
        KERNEL_STREAM: int,
        IDLE_HOST: float,
        IDLE_TRANSFER: float,
        IDLE_LAUNCH: float,
        GRAPH: str,
        KERNEL_COUNT: int,
        KERNEL_LAYER: str,
    },
)
SAMPLE = SpanType("sample")
#: Of speculation. The step's ``forward`` is the pass that verifies.
DRAFT, DRAFT_EXTEND = SpanType("draft"), SpanType("draft_extend")
PROCESS_RESULT = SpanType("process_result")

_TOKENS: dict[str, type] = {KV_TOKENS: int}
_SHAPE: dict[str, type] = {SHAPE: str}
#: Level 4: role → its span, below a step.
DETAILS = {
    "cache_match": SpanType("cache.match", {KV_TOKENS: int, KV_HIT_TOKENS: int}),
    "cache_insert": SpanType("cache.insert", _TOKENS),
    "cache_evict": SpanType("cache.evict", _TOKENS),
    "cache_load": SpanType("cache.load", {**_TOKENS, KV_BYTES: int}),
    "cache_write_back": SpanType("cache.write_back", {**_TOKENS, KV_BYTES: int}),
    "kv_alloc": SpanType("kv.alloc", _TOKENS),
    "kv_alloc_prefill": SpanType("kv.alloc", _TOKENS),
    "kv_alloc_decode": SpanType("kv.alloc", _TOKENS),
    "kv_free": SpanType("kv.free", _TOKENS),
    "attention": SpanType("attention", {LAYER: int, IMPLEMENTATION: str, **_SHAPE}),
    "operator": SpanType("operator", {OPERATOR_NAME: str, IMPLEMENTATION: str, **_SHAPE}),
    "logits": SpanType("logits", _SHAPE),
    "sampler": SpanType("sampler", _SHAPE),
}

# -- before an engine serves, and between requests: role → its span -------------------------------------
#: A trace of its own, or below the one in which it happens; linked to the requests under way.

PREPARATIONS = {
    "start_engine": SpanType("start_engine"),
    "load_model": SpanType("load_model"),
    "kv_init": SpanType("init_kv_cache"),
    "graph_capture": SpanType("capture_graphs"),
    "update_weights": SpanType("update_weights"),
    "update_weights_by_call": SpanType("update_weights"),
    "update_weights_from_disk": SpanType("update_weights"),
    "update_weights_from_distributed": SpanType("update_weights"),
    "update_weights_from_tensor": SpanType("update_weights"),
    "update_weights_from_ipc": SpanType("update_weights"),
    "load_adapter": SpanType("load_adapter", {ADAPTER: str}),
    "unload_adapter": SpanType("unload_adapter", {ADAPTER: str}),
    "flush_cache": SpanType("flush_cache"),
    "pause": SpanType("pause"),
    "pause_by_abort": SpanType("pause"),
    "resume": SpanType("resume"),
    "sleep": SpanType("sleep"),
    "wake_up": SpanType("wake_up"),
}
