"""Live control from outside: levels, samples, off and on, of running engines and of processes to come."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.control import Control
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.collect import rings as collect_rings
from sgl_aspects.tracing.collect.rings import rings
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from tests.support import workers
from tests.support.processes import command, error_of, is_running, output_of, wait_until
from tests.support.sessions import begin, read_file
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("forked_schedulers", "forked_collectors")

spawn = multiprocessing.get_context("spawn")


def test_what_a_crash_has_left_is_not_taken_for_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders = []
    for name in ("crashed", "also", "live"):
        (tmp_path / name).mkdir()
        recorders.append(RingRecorder(str(tmp_path / name), 1))
        assert recorders[-1].open()
    monkeypatch.setattr(collect_rings, "runs", lambda: sorted(tmp_path.iterdir()))
    for recorder in recorders[:2]:
        recorder.close()
    (ring,) = rings()
    assert ring.path.parent.name == "live"
    ring.close()
    recorders[2].close()
    with pytest.raises(ConfigError, match="several runs"):
        next(rings())


def test_a_live_engine_is_turned_up_down_off_and_on(tmp_path: Path) -> None:
    make_llama(tmp_path / "model", max_position_embeddings=1024)
    file = tmp_path / "traces.jsonl"
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)

    with attach(level=1, file=str(file)) as session, Engine(model_path=tmp_path / "model") as engine:

        def serve(rid: str, *words: str) -> None:
            if words:
                printed = output_of(command("control", "--run", session.run_folder, *words))
                assert printed.count("process ") == 2
            engine.generate("hello", sampling, rid=rid)

        serve("requests")
        serve("steps", "--level", "2")
        serve("forwards", "--level", "3")
        serve("nothing", "--off")
        serve("again", "--on")
        serve("unsampled", "--sample", "0")
        serve("level-0", "--sample", "1", "--level", "0")
        said = command("control", "--run", session.run_folder)
        assert "off (level 3 when on), sample 1" in said.stdout
    spans = [*read_file(file)]
    served = {span.attributes["gen_ai.request.id"]: span for span in spans if span.kind == 2}
    assert set(served) == {"requests", "steps", "forwards", "again"}
    assert session.close().not_sampled > 0
    assert session.close().unjoined == session.close().dropped == session.close().damaged == 0

    def during(rid: str) -> set[str]:
        """The scheduler's work for a request."""
        steps = {span.trace_id for span in spans if (served[rid].trace_id, served[rid].span_id) in span.links}
        return {span.name for span in spans if span.trace_id in steps}

    two = {"scheduler.step", "schedule", "run_batch", "process_result"}
    assert during("requests") == set()
    assert during("steps") == two
    assert during("forwards") == during("again") == {*two, "forward"}


def test_one_process_alone(tmp_path: Path) -> None:
    first, second = (spawn.Process(target=workers.record_by_level, args=(str(tmp_path),)) for _ in range(2))
    for process in (first, second):
        process.start()
    try:
        wait = f"import time, pathlib\nwhile len(list(pathlib.Path({str(tmp_path)!r}).glob('*.ring'))) < 2:"
        subprocess.run([sys.executable, "-c", wait + " time.sleep(0.01)"], timeout=60, check=True)
        done = command("control", "--run", str(tmp_path), "--pid", str(first.pid), "--off")
        assert done.stdout.startswith(f"process {first.pid}: off")
        said = command("control", "--run", str(tmp_path)).stdout
        assert f"process {first.pid}: off" in said
        assert f"process {second.pid}: level 3, sample 1" in said
    finally:
        for process in (first, second):
            process.kill()
            process.join()
            process.close()
    assert command("control", "--run", str(tmp_path)).stdout.count("(ended)") == 2


def test_settings_apply_to_processes_that_start_later(tmp_path: Path) -> None:
    (tmp_path / "control").write_bytes(Control(0, 2, 0.25).pack())
    process = spawn.Process(target=workers.record_by_level, args=(str(tmp_path), True))
    process.start()
    process.join(60)
    process.close()
    assert "off (level 2 when on), sample 0.25" in command("control", "--run", str(tmp_path)).stdout


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"level": 1}, Control(1, 1, 0.5)),
        ({"level": 0}, Control(0, 3, 0.5)),
        ({"on": False}, Control(0, 3, 0.5)),
        ({"on": False, "level": 2}, Control(0, 2, 0.5)),
        ({"sample": 0.1}, Control(3, 3, 0.1)),
    ],
)
def test_changes(change: dict[str, float], expected: Control) -> None:
    assert Control(3, 3, 0.5).changed(**change) == expected  # type: ignore[arg-type]
    assert Control(0, 2).changed(sample=0.5) == Control(0, 2, 0.5)  # off stays off


def test_no_run_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    done = command("control", "--run", str(tmp_path), "--off")
    assert "start the engine under sgl-aspects run" in error_of(done)


def test_a_run_is_its_user_s_own_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        with attach(file=str(tmp_path / "traces.jsonl")) as session:
            begin(session, "r")()
            assert main(["control", "--run", session.run_folder, "--sample", "0.5"]) == 0
            run = Path(session.run_folder)
            wait_until(lambda: (run / "collector.lock").exists())
            assert run.stat().st_mode & 0o777 == 0o700
            assert {path.stat().st_mode & 0o777 for path in run.iterdir()} == {0o600}
            assert (run / "control").exists()
    finally:
        os.umask(before)


def test_a_run_that_ends_while_it_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RingRecorder(str(tmp_path)).open()
    first = next(rings(str(tmp_path)))
    first.path.unlink()
    monkeypatch.setattr("sgl_aspects.cli.control.rings", lambda *_: [first])
    assert main(["control", "--run", str(tmp_path), "--off"]) == 0
    assert not (tmp_path / "control").exists()


def test_on_and_off_at_once(tmp_path: Path) -> None:
    done = command("control", "--run", str(tmp_path), "--on", "--level", "0")
    assert "leave one of them out" in error_of(done)


@pytest.mark.parametrize("share", ["much", "nan", "1.5", "-0.1"])
def test_a_share_that_is_none(share: str) -> None:
    assert f"{share}: write a number from 0 to 1" in command("control", f"--sample={share}").stderr


@pytest.mark.usefixtures("exports_at_once")
def test_a_look_from_within_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands called in the traced process itself, as a server's own page might."""
    file = tmp_path / "traces.jsonl"
    with attach(file=str(file)) as session:
        begin(session, "before")()
        assert main(["control", "--run", session.run_folder, "--level", "2"]) == 0
        assert main(["dump", "--run", session.run_folder]) == 0
        said = capsys.readouterr().out
        assert f"process {os.getpid()}: level 2, sample 1\n" in said
        assert "id=before" in said
        assert session.recorder.level == 2
        collector = session.collector_process_id
        assert collector is not None
        begin(session, "meanwhile")()
        wait_until(lambda: file.exists() and '"meanwhile"' in file.read_text())
        assert is_running(collector)
        begin(session, "after")()
    spans = [*read_file(file)]
    assert [span.attributes["gen_ai.request.id"] for span in spans] == ["before", "meanwhile", "after"]
