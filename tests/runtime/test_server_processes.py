"""The server's process: access, shutdown, errors when its engine dies; hooks and traces."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from sgl_aspects.cli.main import main
from tests.support.http_server import LOCAL, Server, serving
from tests.support.processes import is_running, wait_until
from tests.support.threads import in_threads
from tests.support.tiny_models import llama_fixture

model = llama_fixture(max_position_embeddings=16384)


def body(tokens: int, **more: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": "the quick", "max_tokens": tokens, "ignore_eos": True}
    return {**asked, "temperature": 0, **more}


def ask(server: Server, tokens: int, **more: Any) -> tuple[int, Any]:
    return server.request("POST", "/v1/completions", body(tokens, **more))


def is_unwell(server: Server) -> bool:
    """It reports not ready, or has ended."""
    try:
        return server.request("GET", "/health")[0] == 503
    except OSError:
        return server.process.wait(60) == 2


def requests_of(server: Server) -> tuple[int, int]:
    """How many run, how many wait."""
    found = server.metrics()
    names = ("sgl_aspects_scheduler_running_requests", "sgl_aspects_scheduler_waiting_requests")
    return int(found[names[0]]), int(found[names[1]])


def wait_until_running(server: Server, count: int) -> None:
    wait_until(lambda: requests_of(server)[0] == count)


# -- ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_answers_finish_and_takes_no_more(model: Path, tmp_path: Path, number: int) -> None:
    """It reaches every process of the server, as from a terminal or from systemd."""
    flags = ("--max-total-tokens", "20000", "--shutdown-timeout", "120")
    group = serving(model, tmp_path / "log", *flags, prefix=("setsid",))
    with group as server, ThreadPoolExecutor(4) as pool:
        scheduler = server.scheduler_pid
        kept = http.client.HTTPConnection(LOCAL, server.port, timeout=60)
        whole = pool.submit(ask, server, 400)
        streamed = pool.submit(ask, server, 400, stream=True)
        wait_until_running(server, 2)
        os.killpg(server.process.pid, number)
        wait_until(lambda: "stopping: 2 answers under way" in server.log.read_text())
        with contextlib.suppress(OSError):  # once it listens no more
            assert ask(server, 1)[0] == 503
        kept.close()
        status, answer = whole.result(120)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 400)
        status, events = streamed.result(120)
        assert status == 200
        assert events.endswith("data: [DONE]\n\n")
        assert server.process.wait(60) == 0
        wait_until(lambda: not is_running(scheduler))
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_answers_that_take_too_long_at_the_end_are_failed_in_words(model: Path, tmp_path: Path) -> None:
    flags = ("--max-total-tokens", "40000", "--shutdown-timeout", "0.5")
    with serving(model, tmp_path / "log", *flags) as server, ThreadPoolExecutor(4) as pool:
        whole = pool.submit(ask, server, 16000)
        streamed = pool.submit(ask, server, 16000, stream=True)
        wait_until_running(server, 2)
        assert server.stop() == 0
        status, answer = whole.result(60)
        assert (status, answer["error"]["type"]) == (503, "server_error")
        assert "the server is stopping" in answer["error"]["message"]
        status, events = streamed.result(60)
        last = events.strip().rpartition("data: ")[2]
        assert "the server is stopping" in json.loads(last)["error"]["message"]
    assert "Traceback" not in server.log.read_text()


def test_kill_9_of_the_scheduler_under_load(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log", "--max-total-tokens", "80000") as server:
        answers: list[tuple[int, Any]] = []
        errors: list[Exception] = []

        def use(number: int) -> None:
            answers.append(ask(server, 15000, stream=number % 2 == 0))

        def use_client() -> None:
            with openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client:
                try:
                    for _ in client.completions.create(
                        model="tiny",
                        prompt="a",
                        max_tokens=15000,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    ):
                        pass
                except openai.APIError as error:
                    errors.append(error)

        with in_threads(*(partial(use, number) for number in range(12)), use_client, use_client):
            scheduler = server.scheduler_pid
            wait_until(lambda: sum(requests_of(server)) == 14)  # none comes when the server has ended
            assert requests_of(server)[0] >= 5
            os.kill(scheduler, signal.SIGKILL)
            wait_until(lambda: is_unwell(server))
        assert len(answers) == 12
        for status, answer in answers:
            if status == 200:  # streams that had begun: the last event is the error
                answer = json.loads(answer.strip().rpartition("data: ")[2])
            else:
                assert status == 503
            assert "killed by signal 9, SIGKILL" in answer["error"]["message"]
        assert ["SIGKILL" in str(error) for error in errors] == [True, True]
        assert server.process.wait(60) == 2
    last = server.log.read_text().strip().splitlines()[-1]
    assert last.startswith("sgl-aspects: error: the scheduler process was killed by signal 9, SIGKILL")


@pytest.mark.slow
def test_a_signal_while_the_model_is_loading_leaves_no_process(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log", wait=False) as server:
        children: list[psutil.Process] = []

        def is_scheduler(child: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):  # libraries start some that end at once
                return any("spawn_main" in word for word in child.cmdline())
            return False

        def has_a_scheduler() -> bool:
            children[:] = psutil.Process(server.process.pid).children()
            return any(map(is_scheduler, children))

        wait_until(has_a_scheduler, seconds=60)
        assert server.stop() != 0
        wait_until(lambda: all(not is_running(child.pid) for child in children))


# -- access -------------------------------------------------------------------------------------


RIGHT = {"authorization": "Bearer sécret".encode().decode("latin-1")}


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key."""
    log, key = tmp_path_factory.mktemp("guarded") / "log", {"SGL_ASPECTS_API_KEY": "sécret"}
    with serving(model, log, environment=key, forks=True) as server:
        yield server
        assert server.stop() == 0


def test_with_a_key_nothing_is_answered_without_it(guarded: Server) -> None:
    assert guarded.request("GET", "/health") == (200, {"status": "ok"})
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic c8OpY3JldA=="},
        {"authorization": "Bearer"},
    ):
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions")):
            status, answer = guarded.request(method, path, "{" if method == "POST" else None, headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert "sécret" not in str(answer)
    assert guarded.request("POST", "/v1/completions", body(3), RIGHT)[0] == 200
    with (
        openai.OpenAI(base_url=guarded.base_url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_an_answer_does_not_wait_until_the_client_has_acknowledged_its_head(guarded: Server) -> None:
    seconds = []
    with contextlib.closing(http.client.HTTPConnection(LOCAL, guarded.port, timeout=30)) as connection:
        for _ in range(60):
            start = time.monotonic()
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            seconds.append(time.monotonic() - start)
    assert min(seconds[30:]) < 0.03, "a client acknowledges after 40 ms, once it has received some"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host", "0.0.0.0"), "--host '0.0.0.0' lets other machines in: set an --api-key"),
        (("--host", "::"), "--host '::' lets other machines in"),
        (("--api-key", " "), "--api-key is empty"),
        (("--max-body-bytes", "0"), "--max-body-bytes 0: write a whole number of at least 1"),
        (("--port", "99999"), "--port 99999: write a number from 0 to 65535"),
        (("--page-size", "0"), "--page-size 0: write a whole number of at least 1"),
        (("--port", "TAKEN"), "is not available: Address already in use"),
        (("--model", "/nowhere"), "no model at /nowhere"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_model_is_loaded(
    model: Path, flags: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--model", str(model), "--port", "0", *(port if flag == "TAKEN" else flag for flag in flags)]
        assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


# -- hooks and traces --------------------------------------------------------------------------------


@pytest.mark.slow
def test_time_is_not_lost_by_a_slow_reader(model: Path, tmp_path: Path) -> None:
    """A client that does not read delays no other."""
    with serving(model, tmp_path / "log", "--max-total-tokens", "20000") as server:
        with socket.create_connection((LOCAL, server.port), timeout=30) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            content = json.dumps(body(2000, stream=True, logprobs=20)).encode()
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(content), content)
            )
            assert slow.recv(10)
            begin = time.monotonic()
            assert ask(server, 5)[0] == 200
            assert time.monotonic() - begin < 60
        wait_until(server.is_quiet)
