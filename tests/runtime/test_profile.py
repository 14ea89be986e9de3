"""A profile of an engine's next steps, started by its owner and over HTTP."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.errors import InvalidRequestError
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.runtime.messages import ProfileRequest
from sgl_aspects.runtime.scheduling.scheduler import Scheduler
from sgl_aspects.runtime.server_args import ServerArgs
from tests.support.http_server import serving
from tests.support.processes import wait_until
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("forked_schedulers")

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


def operators_of(trace: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}


@pytest.mark.usefixtures("two_devices")
def test_each_rank_writes_what_the_platforms_activities_saw(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    with Engine(model_path=tmp_path / "model", tp_size=2) as engine:
        with pytest.raises(InvalidRequestError, match="num_steps=0"):
            engine.start_profile(0)
        files = engine.start_profile(5, tmp_path / "profile")
        assert files == [tmp_path / "profile" / f"rank{rank}.trace.json" for rank in range(2)]
        assert not any(file.exists() for file in files)
        engine.generate([3, 4, 5], PARAMS)
        for file in files:
            wait_until(file.exists)
            assert "aten::index_select" in operators_of(file)


def test_one_profile_at_a_time(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    ours, theirs = multiprocessing.Pipe()
    scheduler = Scheduler(ServerArgs(tmp_path / "model", max_total_tokens=256), theirs)
    scheduler.handle_message(ProfileRequest(str(tmp_path), 2, number=1))
    scheduler.handle_message(ProfileRequest(str(tmp_path), 2, number=2))
    files = ours.recv().value
    assert files == [tmp_path / "rank0.trace.json"]
    refused = ours.recv()
    assert refused.number == 2
    assert isinstance(refused.error, InvalidRequestError)
    scheduler.finish_profile()
    assert files[0].exists()


def test_control_queries_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_llama(tmp_path / "model")
    with serving(tmp_path / "model", tmp_path / "log", "--admin", forks=True) as server:
        url = f"http://127.0.0.1:{server.port}"
        body = {"model": "model", "prompt": [3, 4, 5], "max_tokens": 8, "ignore_eos": True}
        assert main(["control", "--profile", "4", "--server", url]) == 0  # of an idle server, too
        (file,) = json.loads(capsys.readouterr().out)["files"]
        assert server.request("POST", "/v1/completions", body)[0] == 200
        wait_until(Path(file).exists)
        assert "aten::index_select" in operators_of(Path(file))
        assert main(["control", "--profile", "1001", "--server", url]) == 2
        assert "answers 400" in capsys.readouterr().err
