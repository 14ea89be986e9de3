"""Starting, dying and ending: errors with the cause, and nothing left behind."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.errors import ConfigError, EngineError, ModelLoadError, SchedulerDiedError
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.runtime.execution.model_runner import ModelRunner
from sgl_aspects.runtime.server_args import ServerArgs
from tests.support.forked_schedulers import ForkedContext
from tests.support.processes import is_running, python, wait_until, wait_until_gone
from tests.support.threads import in_threads
from tests.support.tiny_models import make_llama
from tests.support.workers import own_an_engine

LONG = SamplingParams(max_new_tokens=15000, ignore_eos=True)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_llama(folder, max_position_embeddings=16384, max_shard_size="100KB")
    return folder


def scheduler_children() -> list[Any]:
    return [child for child in multiprocessing.active_children() if "scheduler" in child.name]


# -- death -------------------------------------------------------------------------------------------


def shared_memory(process_id: int) -> set[str]:
    """The files in shared memory that a process has open or mapped; none where there is no ``/proc``."""
    process = Path(f"/proc/{process_id}")
    if not process.exists():
        return set()
    names = [os.path.realpath(descriptor) for descriptor in (process / "fd").iterdir()]
    names += [line.split(None, 5)[-1] for line in (process / "maps").read_text().splitlines()]
    return {name for name in names if name.startswith("/dev/shm/")}


def test_kill_9_of_the_scheduler_reaches_every_caller(folder: Path) -> None:
    engine = Engine(model_path=folder, max_total_tokens=80000)
    streaming = engine.stream([5, 6], LONG)
    errors: list[tuple[float, BaseException]] = []

    def call(ask: Callable[[], object]) -> None:
        try:
            ask()
        except BaseException as error:  # noqa: BLE001 - the test looks at what it is
            errors.append((time.monotonic(), error))

    asks: list[Callable[[], object]] = [
        lambda: engine.generate([5, 6], LONG),
        lambda: engine.generate([[7], [8, 9]], LONG),
        lambda: engine.submit([4], LONG).result(),
        lambda: list(streaming),
        lambda: [engine.stats() for _ in range(10**9)],
    ]
    next(streaming)
    with in_threads(*(partial(call, ask) for ask in asks)):
        wait_until(lambda: engine.stats()["running_requests"] >= 5)
        shared = shared_memory(engine.scheduler_pid)
        killed = time.monotonic()
        os.kill(engine.scheduler_pid, signal.SIGKILL)
    assert len(errors) == len(asks)
    for moment, error in errors:
        assert moment - killed < 20
        assert isinstance(error, SchedulerDiedError)
        assert "killed by signal 9, SIGKILL" in str(error)
        assert "Start a new Engine" in str(error)
    assert len({id(error) for _, error in errors}) == len(errors)  # each its own traceback
    for ask in asks[:3]:
        before = time.monotonic()
        with pytest.raises(SchedulerDiedError, match="SIGKILL"):
            ask()
        assert time.monotonic() - before < 10
    assert not scheduler_children()
    assert not is_running(engine.scheduler_pid)
    assert not [name for name in shared if os.path.exists(name)]
    engine.shutdown()
    engine.shutdown()


@pytest.mark.usefixtures("forked_scheduler")
def test_an_error_in_the_scheduler_reaches_callers_with_its_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "failing=tests.support.failing_platform:FailingPlatform")
    with Engine(model_path=folder, max_total_tokens=20000) as engine:
        with pytest.raises(SchedulerDiedError, match="failed with RuntimeError: the device is on fire"):
            engine.generate([5, 6], LONG)
        wait_until_gone(engine.scheduler_pid)
        with pytest.raises(SchedulerDiedError, match="on fire"):
            engine.generate([5, 6], LONG)


@pytest.mark.parametrize(("busy", "fork"), [(True, True), (False, False)])
def test_the_scheduler_ends_when_its_owner_is_killed(folder: Path, busy: bool, fork: bool) -> None:
    context = ForkedContext()  # of the owner alone: it spawns its scheduler
    ours, theirs = context.Pipe()
    owner = context.Process(target=own_an_engine, args=(theirs, str(folder), busy, fork))
    owner.start()
    assert ours.poll(300)  # a loaded machine takes minutes to import torch
    scheduler, forked = ours.recv()
    assert is_running(scheduler)
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join()
    try:
        wait_until_gone(scheduler)
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)


# -- ends in order -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_scheduler")
def test_shutdown_ends_requests_and_is_welcome_twice(folder: Path) -> None:
    with Engine(model_path=folder, max_total_tokens=20000) as engine:
        handle = engine.submit([5, 6], LONG)
        chunks = iter(handle)
        next(chunks)
        engine.shutdown()
        with pytest.raises(SchedulerDiedError, match="shut down"):
            handle.result(timeout=0)
        with pytest.raises(SchedulerDiedError, match="shut down"):
            engine.generate([5])
        assert not is_running(engine.scheduler_pid)
        engine.shutdown()
    assert not scheduler_children()


def test_a_forgotten_engine_takes_its_scheduler_along(folder: Path) -> None:
    engine = Engine(model_path=folder, max_total_tokens=20000)
    pid = engine.scheduler_pid
    engine.generate([5], SamplingParams(max_new_tokens=2))
    del engine
    gc.collect()
    wait_until_gone(pid)


SCRIPT = """{before}
import sys
from sgl_aspects.runtime import Engine, SamplingParams
{guard}
    engine = Engine(model_path=sys.argv[1], max_total_tokens=20000)
    print(engine.scheduler_pid, flush=True)
    engine.generate([5], SamplingParams(max_new_tokens={tokens}, ignore_eos=True))
"""


def start_script(
    tmp_path: Path, folder: Path, guard: str, tokens: int, before: str = ""
) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard, tokens=tokens, before=before))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )


# The script's finalizers then run after multiprocessing's end, which waits for the processes that are left.
EARLY_FINALIZER = "import weakref; weakref.finalize(int, print)"


@pytest.mark.parametrize("before", ["", EARLY_FINALIZER])
def test_a_script_that_forgets_to_shut_down_ends_clean(tmp_path: Path, folder: Path, before: str) -> None:
    script = start_script(tmp_path, folder, 'if __name__ == "__main__":', tokens=3, before=before)
    output, errors = script.communicate(timeout=60)
    assert (script.returncode, errors) == (0, "")
    assert not is_running(int(output))


def test_a_script_without_a_main_guard_is_an_error(tmp_path: Path, folder: Path) -> None:
    script = start_script(tmp_path, folder, "if True:", tokens=3)
    _, errors = script.communicate(timeout=60)
    assert script.returncode == 1
    assert errors.count('if __name__ == "__main__"') == 2  # from the scheduler process and from the owner
    last = errors.strip().splitlines()[-1]
    assert last.startswith("sgl_aspects.errors.SchedulerDiedError")
    assert "__main__" in last


def test_ctrl_c_ends_both_processes_with_one_traceback(tmp_path: Path, folder: Path) -> None:
    script = start_script(tmp_path, folder, 'if __name__ == "__main__":', tokens=15000)
    assert script.stdout is not None
    scheduler = int(script.stdout.readline())
    os.killpg(script.pid, signal.SIGINT)
    _, errors = script.communicate(timeout=60)
    wait_until_gone(scheduler)
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("KeyboardInterrupt")


def test_sigterm_to_all_of_its_processes_ends_a_script_that_does_not_handle_it(
    tmp_path: Path, folder: Path
) -> None:
    script = start_script(tmp_path, folder, 'if __name__ == "__main__":', tokens=15000)
    assert script.stdout is not None
    scheduler = int(script.stdout.readline())
    os.killpg(script.pid, signal.SIGTERM)
    _, errors = script.communicate(timeout=60)
    assert (script.returncode, errors) == (-signal.SIGTERM, "")
    wait_until_gone(scheduler)


# -- models that cannot be loaded --------------------------------------------------------------------


def expect_load_error(path: Path, message: str, **settings: Any) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Engine(model_path=path, **settings)
    assert not scheduler_children()


def expect_error_of_the_scheduler(error: type[Exception], path: Path, message: str, **settings: Any) -> None:
    """What its process finds, without the process: ``test_configs_that_do_not_fit`` has one case with it."""
    with pytest.raises(error, match=message):
        ModelRunner(ServerArgs(str(path), **settings))


def test_no_folder_and_wrong_files(tmp_path: Path) -> None:
    expect_load_error(tmp_path / "nowhere", "nowhere: it does not exist")
    expect_load_error(tmp_path, "holds neither config.json nor a GGUF file")
    (tmp_path / "notes.txt").write_text("hello")
    expect_load_error(tmp_path / "notes.txt", "not a .gguf file")
    (tmp_path / "a.gguf").write_bytes(b"nonsense")
    expect_load_error(tmp_path, "does not start with the letters GGUF")
    (tmp_path / "a.gguf").write_bytes(b"")
    expect_load_error(tmp_path, "a.gguf cannot be read")
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x05")
    expect_load_error(tmp_path, "damaged or cut short")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    expect_load_error(tmp_path, r"several GGUF files \(a.gguf, b.gguf\)")


def edited_config(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config.update(changes)
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen3NextForCausalLM"]},
            "Qwen3NextForCausalLM is not supported.*known: .*, LlamaForCausalLM.* Other engines run more",
        ),
        ({"hidden_size": ...}, "lacks the key 'hidden_size'"),
        ({"hidden_size": "big"}, "hidden_size='big': a whole number"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported; known: silu"),
        ({"dtype": "float8"}, "float8"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported; known: default"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"attention_bias": True}, r"lacks model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_configs_that_do_not_fit(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    expect_load_error(edited_config(folder, tmp_path, **changes), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 400},
            r"'(lm_head|model.embed_tokens).weight' has shape \[\d+, 64\].*requires \[400, 64\]",
        ),
        ({"num_hidden_layers": 4}, r"lacks model.layers.3.input_layernorm.weight,.* and 4 more"),
        ({"num_hidden_layers": 2}, r"does not have: model.layers.2.input_layernorm.weight"),
    ],
)
def test_weights_that_do_not_fit(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    expect_error_of_the_scheduler(ModelLoadError, edited_config(folder, tmp_path, **changes), message)


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    copy = edited_config(folder, tmp_path)
    shards = sorted(copy.glob("*.safetensors"))
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[: len(whole) // 2])
    expect_error_of_the_scheduler(ModelLoadError, copy, f"{shards[0].name} cannot be read")
    shards[0].unlink()
    expect_error_of_the_scheduler(ModelLoadError, copy, f"names {shards[0].name}, which is not there")
    index = copy / "model.safetensors.index.json"
    for name in (f"../{folder.name}/{shards[0].name}", str(folder / shards[0].name)):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        expect_error_of_the_scheduler(ModelLoadError, copy, "which is not a file of this folder")
    index.write_text("{")
    expect_error_of_the_scheduler(ModelLoadError, copy, "index.json cannot be read as JSON")
    for file in (*copy.glob("*.safetensors"), index):
        file.unlink()
    (copy / "pytorch_model.bin").write_text("")
    expect_error_of_the_scheduler(ModelLoadError, copy, "pytorch_model.bin cannot be read: convert")
    (copy / "tokenizer.json").write_text("{}")
    expect_load_error(copy, "tokenizer.json cannot be read")
    (copy / "tokenizer.json").unlink()
    expect_load_error(copy, "tokenizer.json is missing")
    (copy / "config.json").write_text("[]")
    expect_load_error(copy, "not a JSON object")


def test_settings_that_the_model_or_machine_cannot_meet(folder: Path) -> None:
    no_backend = "attention_backend='magic': choose one of torch_native"
    expect_error_of_the_scheduler(ConfigError, folder, no_backend, attention_backend="magic")
    no_room = "no room for a key-value cache of 100000000000 tokens"
    expect_error_of_the_scheduler(ConfigError, folder, no_room, max_total_tokens=10**11)
    with pytest.raises(ConfigError, match="context_length=99999 is more than the 16384"):
        Engine(model_path=folder, context_length=99999)
    with pytest.raises(EngineError, match=r"did not load the model within 0\.01 s"):
        Engine(model_path=folder, startup_timeout=0.01)
    assert not scheduler_children()


# -- imports -----------------------------------------------------------------------------------------


def test_the_entry_point_imports_nothing_that_a_plugin_may_hook() -> None:
    code = (
        "import sys; import sgl_aspects.runtime; "
        "assert not {m for m in sys.modules if m.startswith('sgl_aspects.runtime.')}; "
        "import sgl_aspects.runtime.processes.worker, sgl_aspects.runtime.server_args; "
        "names = [m for m in sorted(sys.modules) if m.startswith('sgl_aspects.runtime.')]; "
        "print(names, 'torch' in sys.modules)"
    )
    output = python("-c", code, cwd=ROOT)
    names = ("checks", "messages", "processes", "processes.worker", "sampling_params", "server_args")
    assert output.stdout.strip() == f"{[f'sgl_aspects.runtime.{name}' for name in names]} False"
