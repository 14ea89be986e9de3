"""Graph capture, where the platform has graphs."""

from __future__ import annotations

from typing import Any

import torch

from sgl_aspects.conformance.check import Bench, NotApplicableError, check, if_declared, require
from sgl_aspects.conformance.in_process import generating
from sgl_aspects.platforms import DeviceGraph

MIB = 2**20


def _captured(bench: Bench) -> tuple[DeviceGraph, torch.Tensor, torch.Tensor, list[bool]]:
    """Capture ``x * 2 + 1``: returns the graph, x, the output, and is_capturing() during the capture."""
    platform = bench.platform
    graph = if_declared(platform.create_graph, needed=platform.support_cuda_graph())
    require(isinstance(graph, DeviceGraph), "a DeviceGraph", type(graph).__qualname__, "create_graph")
    x = torch.zeros(MIB // 4, device=bench.device)
    seen: list[bool] = []

    def work() -> Any:
        seen.append(platform.is_capturing())
        return x * 2 + 1

    work()  # as every engine does: libraries set themselves up outside the capture
    platform.synchronize()
    seen.clear()
    output = graph.capture(work)
    platform.synchronize()
    return graph, x, output, seen


@check(write="create_graph", expects="a replay to compute from the current values of its input")
def replay(bench: Bench) -> str:
    with bench.platform.inference_mode():
        graph, x, output, _ = _captured(bench)
        address = output.data_ptr()
        for number in (3.0, -7.0):
            x.fill_(number)
            graph.replay()
            bench.platform.synchronize()
            found = (output.min().item(), output.max().item())
            right = number * 2 + 1
            require(found == (right, right), f"{right} for an input of {number}", found, "DeviceGraph.replay")
        require(output.data_ptr() == address, "the output where it was", "elsewhere", "DeviceGraph.replay")
    return f"a {bench.platform.get_graph_label()}"


@check(write="is_capturing", expects="True while a graph is captured, and only then")
def capturing(bench: Bench) -> str:
    require(not bench.platform.is_capturing(), "False before a capture", True)
    with bench.platform.inference_mode():
        _, _, _, seen = _captured(bench)
    require(bool(seen) and all(seen), "True while capture() runs the work", seen)
    require(not bench.platform.is_capturing(), "False after a capture", True)
    return "as declared"


@check(write="DeviceGraph.replay", expects="replays to allocate nothing")
def memory(bench: Bench) -> str:
    rounds = 40
    with bench.platform.inference_mode():
        graph, _, _, _ = _captured(bench)
        graph.replay()
        grown = min(_growth(bench, graph, rounds) for _ in range(3))  # the least: hosts are shared
    allowed = rounds * MIB // 4  # a quarter of the growth if each replay kept its output
    require(grown <= allowed, f"no new memory in {rounds} replays", f"{grown} bytes")
    return f"{max(grown, 0) / MIB:.1f} MiB in {rounds} replays"


@check(
    write="get_graph_runner_cls",
    expects="replayed decode steps to give the tokens of eager ones, and again after a new capture",
)
def decode_steps(bench: Bench) -> str:
    if not bench.platform.support_cuda_graph():
        raise NotApplicableError("not declared")
    folder = bench.folder / "tiny-llama-graphs"
    with generating(folder, disable_graphs=True) as eager:
        right = eager.tokens()
    with generating(folder) as replaying:
        runner = replaying.scheduler.model_runner
        for part in (runner.attention_backend, runner.model):
            name = type(part).__name__
            require(part.capturable, "True: graphs are declared", "False", f"capturable of {name}")
        with replaying.watched_replays() as replays:
            for number in range(2):
                found = replaying.tokens()
                method = "get_graph_runner_cls, create_graph, or the attention backend's decoding"
                require(found == right, f"{right}", f"{found}, capture {number + 1}", method)
                method = "can_run, replay of the graph runner"
                require(bool(replays.sizes), "decode steps to be replayed", "none", method)
                calls = f"the model called {replays.model_calls} times in {len(replays.sizes)} steps"
                method = "replay of the graph runner"
                require(replays.model_calls == 0, "a replay of what was captured", calls, method)
                runner.weights_changed()
    sizes = ", ".join(map(str, sorted(set(replays.sizes))))
    return f"{len(replays.sizes)} replays of batches of {sizes}"


def _growth(bench: Bench, graph: DeviceGraph, rounds: int) -> int:
    """Return the bytes that the device has less after some replays."""
    bench.platform.synchronize()
    before = bench.platform.get_available_memory()[0]
    for _ in range(rounds):
        graph.replay()
    bench.platform.synchronize()
    return before - bench.platform.get_available_memory()[0]
