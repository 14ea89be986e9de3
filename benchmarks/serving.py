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
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import lines_of
from benchmarks.turns import signal_all
from tests.support import sglang_server
from tests.support.engine_server import EngineServer
from tests.support.http_server import Server, serving
from tests.support.sglang_server import LAUNCH

SIZES = (1, 4, 8, 16)
TOKENS = 48
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
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        print(f"{TOKENS} output tokens, float32, {threads} threads, medians of {arguments.rounds} rounds")
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
    flags = ("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "32")
    with serving(model, logs / "ours", *flags, "--context-length", "1024") as server, _resting(server) as one:
        yield one


@contextmanager
def _sglang(model: Path, python: Path, logs: Path) -> Iterator[Subject]:
    command = (str(python), *LAUNCH[1:])
    with sglang_server.serve(model, logs / "sglang", command=command) as server, _resting(server) as one:
        yield one


@contextmanager
def _resting(server: Server | EngineServer) -> Iterator[Subject]:
    """The server as a subject, suspended while another is measured: an idle SGLang scheduler spins."""
    main = server.process.pid
    name = server.model if isinstance(server, Server) else "mini"

    def measure(prompts: list[str]) -> Measured:
        signal_all(main, signal.SIGCONT)
        try:
            with ThreadPoolExecutor(len(prompts)) as pool:
                start = time.perf_counter()
                firsts = list(pool.map(lambda prompt: _stream(server.port, name, prompt), prompts))
                took = time.perf_counter() - start
            return Measured(len(prompts) * TOKENS / took, statistics.mean(firsts))
        finally:
            signal_all(main, signal.SIGSTOP)

    _stream(server.port, name, "warm up")
    signal_all(main, signal.SIGSTOP)
    try:
        yield measure
    finally:
        signal_all(main, signal.SIGCONT)


def _stream(port: int, model: str, prompt: str) -> float:
    """Seconds to the first token of a streamed completion, which is read to its end."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    start, first = time.perf_counter(), 0.0
    for line in lines_of(port, body):
        if line.startswith(b"data: {") and not first:
            first = time.perf_counter() - start
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
            exactly: Any = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            model.generate(**batch, **exactly, pad_token_id=tokenizer.pad_token_id)
        return time.perf_counter() - start

    def measure(prompts: list[str]) -> Measured:
        first = generate(prompts, 1)
        return Measured(len(prompts) * TOKENS / generate(prompts, TOKENS), first)

    return measure


if __name__ == "__main__":
    main()
