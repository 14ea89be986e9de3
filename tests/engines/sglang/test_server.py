"""Real SGLang, unmodified, on the CPU: hooked, traced, and run on our platform class (make test-sglang)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sgl_aspects.run import process_reports
from tests.support.callers import CALLER, by_trace, one, orphans, parent, trace_id
from tests.support.distributions import install_plugin
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import assert_first_tokens_as_seen, engine_receiver, run_prefix
from tests.support.processes import output_of, python
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import SGLANG_SERVE, Answer, Server, serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPTS = [f"the quick brown fox number {number} jumps" + " over" * (number % 7) for number in range(32)]
CHILDREN = ["tokenize", "queue", "prefill", "decode", "detokenize"]
LAYERS = 4

# A plugin for every process of the server: what the hooks see goes to one file, a line each.
HOOKS = """
import os
import sgl_aspects as aspects

def note(what):
    with open(os.environ["HOOKED"], "a") as file:
        file.write(f"{what}\\n")

@aspects.around("sglang.srt.managers.scheduler:run_scheduler_process")
def scheduler(original_fn, *args, **kwargs):
    note("run_scheduler_process")
    return original_fn(*args, **kwargs)

@aspects.around("sglang.srt.layers.attention.attention_registry:create_torch_native_backend")
def backend(original_fn, *args, **kwargs):
    note("create_torch_native_backend")
    return original_fn(*args, **kwargs)

@aspects.around("sglang.srt.entrypoints.http_server:get_model_info")
async def route(original_fn, *args, **kwargs):
    note("get_model_info")
    return await original_fn(*args, **kwargs)

@aspects.around("sglang.srt.layers.rotary_embedding.factory:get_rope")
def rope(original_fn, *args, **kwargs):
    note("get_rope")
    return original_fn(*args, **kwargs)

@aspects.around("sglang.srt.layers.rotary_embedding.factory:get_rope")
def late_rope(original_fn, *args, **kwargs):
    note("late:get_rope")
    return original_fn(*args, **kwargs)

@aspects.before("sglang.srt.model_executor.model_runner:ModelRunner.load_model")
def load_model(*args, **kwargs):
    import sglang.srt.models.llama  # it has copied get_rope by now
    aspects.weave(late_rope)

def activate():
    aspects.weave(scheduler, backend, route, rope, load_model)
"""
# A vendor's platform. SGLang skips our entry point beside it, because we provide a platform, too.
PLATFORM = """
def activate():
    return "acme_platform.Acme"
"""
PLATFORM_CLASS = """
from sgl_aspects.engines.sglang.cpu_platform import SGLangCpuPlatform

class Acme(SGLangCpuPlatform):
    device_name = "acme"
"""


# A third-party plugin, which uses SGLang's registry only. SGLang itself would never call the first hook.
NEIGHBOUR = """
import os
from sglang.srt.plugins.hook_registry import HookRegistry, HookType, plugin_hook

def note(what):
    with open(os.environ["HOOKED"], "a") as file:
        file.write(f"{what}\\n")

def activate():
    @plugin_hook(
        "sglang.srt.layers.attention.attention_registry.create_torch_native_backend", type=HookType.AROUND
    )
    def backend(original_fn, *args, **kwargs):
        note("neighbour:create_torch_native_backend")
        return original_fn(*args, **kwargs)

    def rope(result, *args, **kwargs):
        note("neighbour:get_rope")

    HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope", rope)
"""


@dataclass
class Run:
    """The results of a server with everything attached."""

    server: Server
    receiver: Receiver
    answers: list[Answer]
    alone: list[Answer]
    hooked: Counter[str]
    traces: dict[str, list[Span]]
    steps: list[Span]
    reports: list[process_reports.ProcessReport]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini(tmp_path_factory.mktemp("models") / "mini")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    install_plugin(folder, "hooks_on_sglang", HOOKS)
    install_plugin(folder, "neighbour", NEIGHBOUR, "sglang.srt.plugins")
    install_plugin(folder, "acme", PLATFORM, "sglang.srt.platforms")
    (folder / "acme_platform.py").write_text(PLATFORM_CLASS)
    return folder


@pytest.fixture(scope="module")
def run(model: Path, plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`sgl-aspects run -- sglang serve`, on another vendor's platform: tracing at level 3, and hooks."""
    folder = tmp_path_factory.mktemp("run")
    hooked = folder / "hooked"
    hooked.touch()
    with engine_receiver() as receiver:
        run = [*run_prefix(receiver, level=3)[:-1], "--report", str(folder / "reports"), "--"]
        names = {
            "PYTHONPATH": os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")]),
            "HOOKED": str(hooked),
            "SGLANG_PLATFORM": "acme",
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        }
        with serve(model, folder / "log", prefix=run, command=SGLANG_SERVE, environment=names) as server:
            assert server.get("/get_model_info") == 200
            # Twice, so that the second time the prompts are in the prefix cache.
            server.chats(PROMPTS, [{}] * len(PROMPTS))
            answers = server.chats(PROMPTS, [parent(number) for number in range(len(PROMPTS))])
            alone = [server.chat(f"alone {turn}", headers=parent(200 + turn)) for turn in range(5)]
            # A random model may end its answer at any token.
            two = {"messages": [{"role": "user", "content": "two"}], "max_tokens": 4, "ignore_eos": True}
            server.post("/v1/chat/completions", {"model": "mini", "n": 2, **two}, parent(101))
            server.post(
                "/generate",
                {"text": "x " * 2000, "sampling_params": {"max_new_tokens": 3}},
                parent(103),
                status=400,
            )
            whole = {"model": "mini", "messages": [{"role": "user", "content": "one piece"}], "max_tokens": 4}
            server.post("/v1/chat/completions", whole, parent(105))
            server.abort("/generate", parent(106), "running")
            server.leave_generation("to be left alone", parent(104))
            server.post(
                "/generate",
                {"text": ["one", "and another"], "sampling_params": {"max_new_tokens": 3}},
                parent(102),
            )
            assert server.get("/health_generate") == 200
            reports = list(process_reports.read_all(folder / "reports"))
        # SGLang has killed all its processes by now; the collector reads what they left.
        last = trace_id(102)
        receiver.wait_for(
            lambda spans: any(span.trace_id == last and span.parent_id == CALLER for span in spans)
        )
        counts, traces = Counter(hooked.read_text().split()), by_trace(receiver.spans)
        steps = receiver.named("scheduler.step")
        yield Run(server, receiver, answers, alone, counts, traces, steps, reports)


def test_each_concurrent_request_has_a_whole_trace_under_its_callers_id(run: Run) -> None:
    for number, answer in enumerate(run.answers):
        spans = run.traces[trace_id(number)]
        assert sorted(span.name for span in spans) == sorted([*CHILDREN, "chat_template", "chat mini"])
        root = one(spans, "chat mini")
        assert root.parent_id == CALLER
        assert {span.parent_id for span in spans if span is not root} == {root.span_id}
        assert root.attributes["gen_ai.request.id"] == answer.rid
        tokenize, queue, prefill, decode = (one(spans, name) for name in CHILDREN[:4])
        assert (
            root.start
            <= tokenize.start
            <= queue.start
            <= prefill.start
            < decode.start
            <= decode.end
            <= root.end
        )
        assert len({span.resource["process.pid"] for span in spans}) == 3


def test_no_span_is_an_orphan(run: Run) -> None:
    assert orphans(run.traces) == []
    assert [span.name for span in run.receiver.spans if span.attributes.get("sgl_aspects.unfinished")] == []


def test_token_counts_are_those_of_the_responses(run: Run) -> None:
    for number, answer in enumerate(run.answers):
        attributes = one(run.traces[trace_id(number)], "chat mini").attributes
        assert attributes["gen_ai.usage.input_tokens"] == answer.usage["prompt_tokens"]
        assert attributes["gen_ai.usage.output_tokens"] == answer.usage["completion_tokens"] == 8
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        assert attributes["gen_ai.usage.cache_read.input_tokens"] == cached > 0
        assert attributes["gen_ai.response.finish_reasons"] == [answer.finish_reason]
        assert attributes["gen_ai.provider.name"] == "sglang"
        prefill = one(run.traces[trace_id(number)], "prefill")
        assert prefill.attributes["sgl_aspects.prefill.tokens"] == answer.usage["prompt_tokens"] - cached


def test_time_to_first_token_is_what_each_client_saw(run: Run) -> None:
    """32 at once and 5 alone. The kernel reports arrivals in ticks of up to 4 ms: the larger part."""
    requests = {**dict(enumerate(run.answers)), **{200 + turn: each for turn, each in enumerate(run.alone)}}
    roots = {number: one(run.traces[trace_id(number)], "chat mini") for number in requests}
    for root in roots.values():
        first = root.attributes["gen_ai.latency.time_to_first_token"]
        assert first == root.attributes["gen_ai.response.time_to_first_chunk"]
    assert_first_tokens_as_seen([(roots[number], answer) for number, answer in requests.items()], 5)


def test_an_answer_in_one_piece_has_its_first_tokens_time_from_the_scheduler(run: Run) -> None:
    spans = run.traces[trace_id(105)]
    root, prefill = one(spans, "chat mini"), one(spans, "prefill")
    assert sorted(span.name for span in spans) == sorted([*CHILDREN, "chat_template", "chat mini"])
    to_first = root.attributes["gen_ai.latency.time_to_first_token"]
    assert to_first == pytest.approx((prefill.end - root.start) / 1e9, abs=1e-6)
    assert "gen_ai.response.time_to_first_chunk" not in root.attributes


def test_several_answers_are_children_of_one_request(run: Run) -> None:
    spans = run.traces[trace_id(101)]
    roots = [span for span in spans if span.name == "chat mini"]
    (root,) = [span for span in roots if span.parent_id == CALLER]
    assert root.attributes["gen_ai.request.choice.count"] == 2
    answers = [span for span in roots if span is not root]
    assert len(answers) == 3  # the prompt, for the cache, and two answers
    assert {span.parent_id for span in answers} == {root.span_id}
    server, internal = 2, 1
    assert [root.kind, *{span.kind for span in answers}] == [server, internal]
    assert not any(span.is_error for span in spans)
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert root.attributes["gen_ai.usage.input_tokens"] == answers[0].attributes["gen_ai.usage.input_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 2 * 4
    assert Counter(span.name for span in spans)["decode"] == 2

    spans = run.traces[trace_id(102)]
    roots = [span for span in spans if span.name == "text_completion mini"]
    (root,) = [span for span in roots if span.parent_id == CALLER]
    assert [span.parent_id for span in roots if span is not root] == [root.span_id] * 2
    assert Counter(span.name for span in spans)["decode"] == 2
    assert not any(span.is_error for span in spans)


def test_a_request_that_is_refused_ends_with_its_error(run: Run) -> None:
    spans = run.traces[trace_id(103)]
    root = one(spans, "text_completion mini")
    assert not root.is_error  # its caller's mistake
    assert root.attributes["http.response.status_code"] == 400
    assert root.attributes["error.type"] == "ValueError"
    assert {span.name for span in spans} <= {"text_completion mini", "tokenize"}


def test_a_client_that_hangs_up_ends_its_request_everywhere(run: Run) -> None:
    spans = run.traces[trace_id(104)]
    root = one(spans, "text_completion mini")
    assert root.is_error
    decode = one(spans, "decode")
    assert decode.attributes["sgl_aspects.finish_reason"] == "abort"
    assert decode.attributes["gen_ai.usage.output_tokens"] < 800


def test_an_aborted_request_is_marked_in_every_process(run: Run) -> None:
    spans = run.traces[trace_id(106)]
    root, decode = one(spans, "text_completion mini"), one(spans, "decode")
    assert root.attributes["error.type"] == "abort"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert decode.attributes["sgl_aspects.finish_reason"] == "abort"
    assert sorted(span.name for span in spans) == sorted([*CHILDREN, "text_completion mini"])


def test_what_precedes_serving_is_traced(run: Run) -> None:
    names = Counter(span.name for span in run.receiver.spans)
    assert names["load_model"] == names["init_kv_cache"] == names["capture_graphs"] == 1


def test_health_checks_leave_no_span(run: Run) -> None:
    ids = [str(span.attributes.get("gen_ai.request.id")) for span in run.receiver.spans]
    assert not [rid for rid in ids if rid.startswith("HEALTH_CHECK")]


def test_steps_are_linked_to_their_requests(run: Run) -> None:
    assert run.steps
    by_id = {span.span_id: span for span in run.receiver.spans}
    linked = Counter(link for step in run.steps for _, link in step.links)
    for number in range(len(PROMPTS)):
        # One step for the prompt and one for each further token; some batches run once more than they need.
        assert linked[one(run.traces[trace_id(number)], "chat mini").span_id] >= 8
    assert all(link in by_id for link in linked)
    for step in run.steps:
        names = Counter(span.name for span in run.traces[step.trace_id])
        assert names["run_batch"] == names["forward"] == names["process_result"] == 1
        # Less: a health check is in it, or (overlapped) a request that ended while it was launched.
        assert step.attributes["sgl_aspects.batch.size"] >= len(step.links)
        (forward,) = (span for span in run.traces[step.trace_id] if span.name == "forward")
        assert forward.attributes["sgl_aspects.device.name"] == "cpu"
        device_time = forward.attributes["sgl_aspects.forward.device_time"]
        assert 0 < device_time <= (step.end - step.start) / 1e9
    numbers = [step.attributes["sgl_aspects.step.id"] for step in run.steps]
    assert len(set(numbers)) == len(numbers)  # an idle scheduler, and both ways of activation, add none


def test_metrics_say_what_the_spans_say(run: Run) -> None:
    receiver = run.receiver
    roots = [span for span in receiver.spans if span.kind == 2]
    durations = receiver.points("gen_ai.server.request.duration")
    assert sum(point.count for point in durations) == len(roots)
    assert {point.attributes["gen_ai.provider.name"] for point in durations} == {"sglang"}
    failed = [span for span in roots if "error.type" in span.attributes]
    assert sum(point.count for point in durations if "error.type" in point.attributes) == len(failed)
    whole = len(roots) - len(failed)
    assert 0 < sum(point.count for point in receiver.points("gen_ai.server.time_to_first_token")) <= whole
    steps = receiver.points("sgl_aspects.step.duration")
    assert sum(point.count for point in steps) == len(run.steps)
    output = sum(span.attributes.get("gen_ai.usage.output_tokens", 0) for span in roots)
    tokens = receiver.points("sgl_aspects.tokens")
    by_type = dict.fromkeys(("input", "output"), 0.0)
    for point in tokens:
        by_type[point.attributes["gen_ai.token.type"]] += point.value
    assert by_type["output"] == output
    assert sum(point.value for point in receiver.points("sgl_aspects.prefix_cache.hit_tokens")) > 0
    # The last that was pushed while the scheduler lived: it had no work any more.
    for name in ("queue.running", "queue.waiting", "batch.size", "kv.usage"):
        (gauge,) = receiver.points(f"sgl_aspects.{name}")
        assert gauge.value >= 0


def test_hooks_reach_what_was_copied(run: Run) -> None:
    """Registered before the engine's modules are imported, but for one. SGLang misses all but get_rope."""
    assert run.hooked == {
        "run_scheduler_process": 1,
        "create_torch_native_backend": 1,
        "get_model_info": 1,
        "get_rope": LAYERS,
        "late:get_rope": LAYERS,
        # Registered with SGLang's own registry by another plugin.
        "neighbour:create_torch_native_backend": 1,
        "neighbour:get_rope": LAYERS,
    }


def test_reports_of_all_processes_list_hooks_by_owner(run: Run) -> None:
    calls: Counter[tuple[str | None, str]] = Counter()
    for process in run.reports:
        for hook in process.report.hooks:
            calls[hook.source.dist_name if hook.source else None, hook.target.rpartition(".")[2]] += (
                hook.calls
            )
    assert calls["neighbour", "get_rope"] == LAYERS
    assert calls["neighbour", "create_torch_native_backend"] == 1
    assert calls["sgl-aspects", "run_batch"] > 0
    assert calls["sgl-aspects", "handle_batch_token_id_out"] > 0


def test_greedy_answers_are_the_same_with_nothing_attached(run: Run, model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path / "log") as server:
        server.chats(PROMPTS, [{}] * len(PROMPTS))
        answers = server.chats(PROMPTS, [{}] * len(PROMPTS))
        alone = [server.chat(f"alone {turn}") for turn in range(5)]
    print(f"start: attached {run.server.start_seconds:.1f} s, nothing attached {server.start_seconds:.1f} s")
    assert [answer.text for answer in alone] == [answer.text for answer in run.alone]
    same = [one.text == other.text for one, other in zip(answers, run.answers)]
    assert all(same), f"{same.count(False)} of {len(same)} differ"


def test_several_workers_and_replicas_beside_sglangs_own_tracing(model: Path, tmp_path: Path) -> None:
    """`sglang serve`, the entry point alone: two HTTP workers and schedulers, SGLang's spans beside ours."""
    with engine_receiver() as receiver:
        more = ["--tokenizer-worker-num", "2", "--dp-size", "2", "--enable-trace"]
        more += ["--otlp-traces-endpoint", f"{receiver.endpoint}/v1/traces"]
        environment = {
            "SGL_ASPECTS_TRACE": "2",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120",  # on a slow machine they import for long
        }
        with serve(
            model, tmp_path / "log", command=SGLANG_SERVE, more=more, environment=environment
        ) as server:
            server.chats(PROMPTS[:8], [parent(number) for number in range(8)])
            ids = {trace_id(number) for number in range(8)}
            receiver.wait_for(
                lambda spans: {span.trace_id for span in spans if " Req" in span.name} >= ids, seconds=60
            )
        receiver.wait_for(lambda spans: {s.trace_id for s in spans if s.name == "chat mini"} >= ids)
        ours = [span for span in receiver.spans if "process.pid" in span.resource]
        schedulers = set()
        for number in range(8):
            spans = [span for span in ours if span.trace_id == trace_id(number)]
            assert sorted(span.name for span in spans) == sorted([*CHILDREN, "chat_template", "chat mini"])
            root = one(spans, "chat mini")
            assert root.parent_id == CALLER
            assert {span.parent_id for span in spans if span is not root} == {root.span_id}
            schedulers.add(one(spans, "decode").resource["process.pid"])
            theirs = [s for s in receiver.spans if s.trace_id == trace_id(number) and s not in ours]
            assert [span.parent_id for span in theirs if " Req" in span.name] == [CALLER]
        assert len(schedulers) == 2


# Hooks on modules that are loaded already: every referrer gets the new object, and the old one back.
LOADED = """
import json, warnings
warnings.simplefilter("ignore")
import sgl_aspects as aspects
from sglang.srt.entrypoints import engine, http_server
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers import scheduler
from sglang.srt.models import llama, qwen2
import inspect, pickle

def referrers():
    route = [one for one in http_server.app.routes if getattr(one, "path", "") == "/get_model_info"][0]
    default = inspect.signature(detokenizer_manager.run_detokenizer_process)
    return {
        "class attribute": vars(engine.Engine)["run_scheduler_process_func"].__func__,
        "registry": attention_registry.ATTENTION_BACKENDS["torch_native"],
        "route": route.endpoint,
        "route's call": route.dependant.call,
        "default": detokenizer_manager.run_detokenizer_process.__defaults__[0],
        "list": llama.EntryClass[0],
        "copied": llama.get_rope,
        "copied elsewhere": qwen2.get_rope,
    }

def originals():
    return {
        "class attribute": scheduler.run_scheduler_process,
        "registry": attention_registry.create_torch_native_backend,
        "route": http_server.get_model_info,
        "route's call": http_server.get_model_info,
        "default": detokenizer_manager.DetokenizerManager,
        "list": llama.LlamaForCausalLM,
        "copied": factory.get_rope,
        "copied elsewhere": factory.get_rope,
    }

def same(one, other):
    return [name for name in one if one[name] is not other[name]]

# Numbers: a dict of the objects themselves would be one more referrer, and be rebound.
before = {name: id(held) for name, held in referrers().items()}
answer = {"before": same(referrers(), originals())}

class Detokenizer(detokenizer_manager.DetokenizerManager):
    pass

class Model(llama.LlamaForCausalLM):
    pass

def through(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs)

async def through_async(original_fn, *args, **kwargs):
    return await original_fn(*args, **kwargs)

hooks = []
for target in (
    "sglang.srt.managers.scheduler:run_scheduler_process",
    "sglang.srt.layers.attention.attention_registry:create_torch_native_backend",
    "sglang.srt.entrypoints.http_server:get_model_info",
    "sglang.srt.layers.rotary_embedding.factory:get_rope",
):
    hook = through_async if "http" in target else through
    hooks.append(aspects.Advice(aspects.Target.parse(target), aspects.HookType.AROUND, hook))
for target, new in (
    ("sglang.srt.managers.detokenizer_manager:DetokenizerManager", Detokenizer),
    ("sglang.srt.models.llama:LlamaForCausalLM", Model),
):
    hooks.append(aspects.Advice(aspects.Target.parse(target), aspects.HookType.REPLACE, new))
handle = aspects.weave(*hooks)
now = referrers()
answer["not woven"] = [name for name in now if id(now[name]) == before[name]]
answer["not the same everywhere"] = same(now, originals())
answer["stale"] = [str(stale) for stale in aspects.report().stale]
answer["pickles"] = pickle.loads(pickle.dumps(now["class attribute"])) is now["class attribute"]
handle.remove()
answer["after"] = [name for name, held in referrers().items() if id(held) != before[name]]
print(json.dumps(answer))
"""


def test_holders_in_loaded_modules_are_rebound_and_put_back(tmp_path: Path) -> None:
    answer = json.loads(output_of(python("-c", LOADED, cwd=tmp_path)).splitlines()[-1])
    stale = answer.pop("stale")
    print(stale)
    assert answer == {
        "before": [],
        "not woven": [],
        "not the same everywhere": [],
        "pickles": True,
        "after": [],
    }


ACTIVATION = """
import json, sys, threading
import sglang.srt.plugins as plugins
import sgl_aspects as aspects

before = set(sys.modules)
plugins.load_plugins()
hooks = len(aspects.report().hooks)
aspects.load_plugins()
new = set(sys.modules) - before
print(json.dumps({
    "hooks": hooks,
    "hooks after both": len(aspects.report().hooks),
    "sglang": sorted(name for name in new if name.startswith("sglang")),
    "tracing": "sgl_aspects.tracing.session" in new,
    "torch": "torch" in new,
    "threads": [thread.name for thread in threading.enumerate()],
}))
"""


@pytest.mark.parametrize("asked", [False, True])
def test_sglangs_own_plugin_loader_activates_once_and_imports_nothing_of_sglang(
    asked: bool, tmp_path: Path
) -> None:
    settings = {"SGL_ASPECTS_TRACE": "3", "SGL_ASPECTS_TRACE_FILE": str(tmp_path / "traces.jsonl")}
    others = ("SGL_", "ASPECTS_", "OTEL_")
    done = python("-W", "ignore", "-c", ACTIVATION, without=others, **settings if asked else {})
    answer = json.loads(output_of(done).splitlines()[-1])
    assert answer["hooks after both"] == answer["hooks"]
    assert answer.pop("hooks") > 0 if asked else answer.pop("hooks") == 0
    assert answer == {
        "hooks after both": answer["hooks after both"],
        "sglang": [],
        "tracing": asked,
        "torch": False,
        "threads": ["MainThread"],
    }


def test_the_platform_answers_what_the_installed_sglang_asks() -> None:
    """Anything else of its interface is a factory, where SGLang's own answer stands."""
    from sglang.srt.platforms.interface import SRTPlatform

    from sgl_aspects.engines.sglang.cpu_platform import SGLangCpuPlatform
    from sgl_aspects.platforms.sglang_bridge import interface_methods

    left = [name for name in interface_methods(SRTPlatform) if name not in vars(SGLangCpuPlatform)]
    assert [
        name for name in left if not name.startswith(("get_", "supports_spec", "verify_", "support_mamba"))
    ] == []
    assert [name for name in left if "_cls" not in name and "speculative" not in name] == [
        "get_communicator_class",
        "get_compile_backend",
        "get_quantization_config",
        "support_mamba_cache_extra_buffer",
        "verify_quantization",
    ]


CHOSEN = "from sglang.srt.platforms import current_platform as chosen; print(type(chosen).__name__)"


@pytest.mark.parametrize(("asked", "chosen"), [("", "SRTPlatform"), ("sgl_aspects_cpu", "SGLangCpuPlatform")])
def test_the_cpu_platform_is_sglangs_only_if_selected(asked: str, chosen: str) -> None:
    done = python("-W", "ignore", "-c", CHOSEN, SGLANG_PLATFORM=asked)
    assert output_of(done).splitlines()[-1] == chosen
