"""Throughput and time to first token beside real SGLang's server and transformers' batched generate.

    OMP_NUM_THREADS=1 python -m benchmarks.serving --model FOLDER --sglang PYTHON [--rounds 5]

FOLDER is a Hugging Face folder, PYTHON the interpreter of an environment with SGLang (make sglang-env). All
run the same model in float32 on the same processor, in turns, batch by batch, so that a neighbour on the
machine slows all of them alike; servers that wait are suspended (an idle SGLang scheduler spins).
Prompts are new in each round, so that no prefix cache helps. The table has medians, and the medians of the
rounds' own ratios.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SIZES = (1, 4, 8, 16)
TOKENS = 48
START_SECONDS = 240
PROMPT = (
    "Prompt number {number}. The bicycle is the most efficient machine ever made to turn human strength into "
    "movement. A person on a bicycle uses about one fifth of the energy that the same person needs to walk "
    "the same distance, and travels three to four times faster. In a few words, this means that"
)


@dataclass
class Measured:
    """The result of one batch: output tokens a second, and the mean time to the first token in seconds."""

    throughput: float
    first: float


Subject = Callable[[list[str]], Measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--sglang", type=Path, help="left out where it is not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        subjects: dict[str, Subject] = {}
        subjects["sgl-aspects"] = stack.enter_context(_ours(arguments.model, Path(logs)))
        if arguments.sglang:
            subjects["SGLang"] = stack.enter_context(_sglang(arguments.model, arguments.sglang, Path(logs)))
        subjects["transformers"] = _transformers(arguments.model)
        print(
            f"{TOKENS} output tokens, float32, {os.environ.get('OMP_NUM_THREADS', 'all')} threads, ", end=""
        )
        print(f"medians of {arguments.rounds} rounds")
        print("| batch | subject | output tokens/s | ratio | time to first token, ms | ratio |")
        print("| --- | --- | --- | --- | --- | --- |")
        for size in arguments.sizes:
            _compare(subjects, size, arguments.rounds)


def _compare(subjects: dict[str, Subject], size: int, rounds: int) -> None:
    found: dict[str, list[Measured]] = {name: [] for name in subjects}
    names = list(subjects)
    for turn in range(rounds + 1):
        for step in range(len(names)):
            name = names[(turn + step) % len(names)]
            prompts = [PROMPT.format(number=(turn * 1000 + size * 100 + i)) for i in range(size)]
            measured = subjects[name](prompts)
            if turn:  # the first round warms up
                found[name].append(measured)
    ours = found[names[0]]
    for name, values in found.items():
        fast = statistics.median(one.throughput for one in values)
        first = statistics.median(one.first for one in values)
        faster = statistics.median(our.throughput / one.throughput for our, one in zip(ours, values))
        later = statistics.median(our.first / one.first for our, one in zip(ours, values))
        print(
            f"| {size} | {name} | {fast:.1f} | {faster:.2f} | {1000 * first:.0f} | {later:.2f} |", flush=True
        )


@contextmanager
def _ours(model: Path, logs: Path) -> Iterator[Subject]:
    command = [sys.executable, "-m", "sgl_aspects", "serve", "--model", str(model), "--dtype", "float32"]
    command += ["--served-model-name", "m", "--max-total-tokens", "16384", "--max-running-requests", "32"]
    command += ["--context-length", "1024"]
    with _server(command, logs / "ours", {}) as subject:
        yield subject


@contextmanager
def _sglang(model: Path, python: Path, logs: Path) -> Iterator[Subject]:
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
    command += ["--served-model-name", "m", "--dtype", "float32", "--attention-backend", "torch_native"]
    command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--max-total-tokens", "16384"]
    command += ["--max-running-requests", "32", "--context-length", "1024", "--log-level", "warning"]
    environment = {"SGLANG_PLATFORM": "sgl_aspects_cpu", "HF_HUB_OFFLINE": "1"}
    with _server(command, logs / "sglang", environment) as subject:
        yield subject


@contextmanager
def _server(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[Subject]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            cwd=log.parent,
        )

    def measure(prompts: list[str]) -> Measured:
        _signal_all(process.pid, signal.SIGCONT)
        try:
            with ThreadPoolExecutor(len(prompts)) as pool:
                start = time.perf_counter()
                firsts = list(pool.map(lambda prompt: _stream(port, prompt), prompts))
                took = time.perf_counter() - start
            return Measured(len(prompts) * TOKENS / took, statistics.mean(firsts))
        finally:
            _signal_all(process.pid, signal.SIGSTOP)

    try:
        _wait_until_healthy(process, port, log)
        _stream(port, "warm up")
        _signal_all(process.pid, signal.SIGSTOP)
        yield measure
    finally:
        _signal_all(process.pid, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _signal_all(pid: int, number: int) -> None:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in processes:
        process.send_signal(number)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.5)
        finally:
            connection.close()
    raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")


def _stream(port: int, prompt: str) -> float:
    """Seconds to the first token of a streamed completion, which is read to its end."""
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(response.read().decode())
    first = 0.0
    for line in response:
        if line.startswith(b"data: {") and not first:
            first = time.perf_counter() - start
    connection.close()
    return first


def _transformers(folder: Path) -> Subject:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def generate(prompts: list[str], tokens: int) -> float:
        start = time.perf_counter()
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            model.generate(
                **batch,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        return time.perf_counter() - start

    def measure(prompts: list[str]) -> Measured:
        first = generate(prompts, 1)
        return Measured(len(prompts) * TOKENS / generate(prompts, TOKENS), first)

    return measure


if __name__ == "__main__":
    main()
