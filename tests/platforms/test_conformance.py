"""The conformance kit: the CPU and the loopback device pass; each fault is found by the check that should."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_platform.platform import LoopbackPlatform

from sgl_aspects.cli.main import main
from sgl_aspects.conformance import GROUPS, Result, run_checks, selected_checks
from sgl_aspects.conformance.operators import random_tensor
from sgl_aspects.conformance.tiny_model import right_tokens, write_tiny_model
from sgl_aspects.errors import ConfigError, UnsupportedCallError
from sgl_aspects.platforms import SRTPlatform, set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.runtime.ops import Operator, SiluAndMul
from tests.support.broken_platforms import FAULTS, POOL_FAULTS, Broken
from tests.support.broken_runners import HearsNoTensors, ScattersNothing
from tests.support.processes import command, output_of

pytestmark = pytest.mark.slow

#: Those that need no other process.
HERE = [group for group in GROUPS if group not in ("memory", "distributed", "generation")]


@pytest.fixture(autouse=True)
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPBACK_VISIBLE_DEVICES", "0,1")


def results(platform: SRTPlatform, only: list[str]) -> dict[str, Result]:
    set_current_platform(platform)
    return {result.name: result for result in run_checks(selected_checks(only))}


def failed(found: dict[str, Result]) -> set[str]:
    return {name for name, result in found.items() if result.status == "failed"}


@pytest.mark.parametrize("make", [CpuPlatform, LoopbackPlatform])
def test_a_good_platform_passes(make: Callable[[], SRTPlatform]) -> None:
    found = results(make(), HERE)
    assert failed(found) == set(), found
    skipped = {name for name, result in found.items() if result.status == "skipped"}
    undeclared = {f"capabilities.{name}" for name in ("triton", "fp8", "quantized")}
    if make is CpuPlatform:
        undeclared |= {"operations.streams", "capabilities.compiled"}
        undeclared |= {f"graphs.{name}" for name in ("replay", "capturing", "memory", "decode_steps")}
    assert skipped == undeclared


@pytest.mark.parametrize("make", FAULTS, ids=lambda make: make.__name__)
def test_each_fault_is_found_by_its_check(make: type[LoopbackPlatform]) -> None:
    found = results(make(), HERE)
    assert failed(found) == FAULTS[make], [result for result in found.values() if result.status == "failed"]
    for name in FAULTS[make]:
        assert found[name].write, "says which method to write"
        assert found[name].expected, "says what was expected"
        assert found[name].detail, "says what was found"


def refuses(x: torch.Tensor) -> torch.Tensor:
    raise UnsupportedCallError("not such tensors")


class BrokenActivation(Broken):
    """Its activation is one of the broken ones below, by name."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._key = f"activation_{fault}"
        self._fault: Any = {
            "raises": lambda x: x.no_such_kernel(),
            "shape": lambda x: x[..., :7],
            "numbers": lambda x: x.chunk(2, dim=-1)[0] * float("nan"),
            "nothing": lambda x: None,
            "pair": lambda x: (x.chunk(2, dim=-1)[0], None),
            "refuses": refuses,
            "arguments": lambda gate, up: gate * up,
        }[fault]

    def init_backend(self) -> None:
        Operator.register_oot_forward(SiluAndMul, self._fault, self._key)

    def get_dispatch_key_name(self) -> str:
        return self._key


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("raises", "AttributeError: 'Tensor' object has no attribute 'no_such_kernel' ("),
        ("shape", "[1, 7]"),
        ("numbers", "48 NaN or infinite"),
        ("nothing", "NoneType"),
        ("pair", "Tensor, NoneType"),
    ],
)
def test_of_an_operator_it_is_said_what_is_wrong(fault: str, found: str) -> None:
    (result,) = results(BrokenActivation(fault), ["operators.silu_and_mul"]).values()
    assert (result.status, result.write) == ("failed", f"oot.activation_{fault}.silu_and_mul")
    assert result.detail.startswith(found)


def test_an_operator_that_refuses_calls_is_not_said_to_have_served_them() -> None:
    (result,) = results(BrokenActivation("refuses"), ["operators.silu_and_mul"]).values()
    assert result.status == "passed"
    told = "oot.activation_refuses.silu_and_mul, which refused calls that another served, error at most"
    assert result.detail.startswith(told)


def test_a_kernel_that_crashes_is_named(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text("""
import ctypes
from sgl_aspects.platforms.cpu import CpuPlatform
class Crashing(CpuPlatform):
    def init_backend(self): ctypes.string_at(0)
""")
    platform = ("--platform", "crash=crashing:Crashing")
    done = command("conformance", *platform, "--only", "identity.family", PYTHONPATH=str(tmp_path))
    assert done.returncode < 0
    assert 'crashing.py", line 5 in init_backend' in done.stderr


def test_kernels_that_cannot_be_registered_are_a_fault_of_their_own() -> None:
    (result,) = results(BrokenActivation("arguments"), HERE).values()
    assert (result.name, result.status, result.write) == ("setup.backend", "failed", "init_backend")
    assert "operator silu_and_mul is called with (x: 'Tensor')" in result.detail


@pytest.mark.parametrize("make", POOL_FAULTS, ids=lambda make: make.__name__)
def test_each_fault_of_a_pool_is_found_by_its_check(make: type[LoopbackPlatform]) -> None:
    assert failed(results(make(), ["identity", "kv_pools"])) == POOL_FAULTS[make]


@pytest.mark.parametrize(
    ("make", "method", "found"),
    [
        (ScattersNothing, "reduce_scatter", "[[10.0, 12.0], [14.0, 16.0]]"),
        (HearsNoTensors, "send_tensor_dict, recv_tensor_dict", "OSError: link down"),
    ],
)
def test_a_communicators_method_that_fails_is_named(
    make: type[LoopbackPlatform], method: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", f"broken={make.__module__}:{make.__name__}")
    (result,) = results(make(), ["distributed"]).values()
    assert (result.status, result.write) == ("failed", f"{method} of the communicator")
    assert result.detail == found


def test_what_is_not_written_fails_with_the_name_of_the_method() -> None:
    class Bare(SRTPlatform):
        device_name, device_type = "bare", "cpu"

    (result,) = results(Bare(), HERE).values()
    assert (result.name, result.status, result.write) == ("setup.device", "failed", "get_device")
    assert "get_device()" in result.detail


def test_an_unknown_check_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'speed'.*attention.*attention\.decode"):
        selected_checks(["speed"])


def test_checks_are_in_the_order_of_their_groups() -> None:
    order = [check.group for check in selected_checks()]
    assert order == sorted(order, key=GROUPS.index)
    assert set(order) == set(GROUPS)


def test_both_references_give_the_same_tokens(tmp_path: Path) -> None:
    prompts = [[1], [200, 3, 77, 12, 5, 9]]
    folder = tmp_path / "model"
    weights = write_tiny_model(folder)
    found = [right_tokens(name, folder, weights, prompts, 12) for name in ("transformers", "float64")]
    assert found[0] == found[1]


def test_the_command_reports_faults_that_processes_show(tmp_path: Path) -> None:
    """Memory, distributed and a whole generation, in a table, as JSON and as JUnit."""
    files = {name: tmp_path / f"report.{name}" for name in ("json", "junit")}
    root = Path(__file__).parents[2]
    done = command(
        *("conformance", "--platform", "broken=tests.support.broken_platforms:ManyFaults"),
        *("--only", "identity.family,memory,kv_pools.write,capabilities.fp8,distributed,generation"),
        *("--reference", "float64", "--json", str(files["json"]), "--junit", str(files["junit"])),
        PYTHONPATH=os.pathsep.join([str(root), str(root / "examples/vendor_platform")]),
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(files["json"].read_text())
    status = {result["name"]: result["status"] for result in report["results"]}
    assert status == {
        "identity.family": "passed",
        "memory.available": "failed",
        "memory.total": "failed",
        "memory.allocating": "failed",
        "memory.releasing": "failed",
        "memory.peak": "failed",
        "kv_pools.write": "failed",
        "capabilities.fp8": "skipped",
        "distributed.collectives": "failed",
        "generation.greedy": "failed",
        "generation.latent": "passed",  # its pool is the engine's own
    }
    assert report["counts"] == {"passed": 2, "failed": 8, "skipped": 1}
    assert (report["platform"], report["class"]) == ("broken", "tests.support.broken_platforms:ManyFaults")
    for part in (
        "pass  identity.family",
        "FAIL  memory.peak",
        "write     get_current_memory_usage",
        "expected  about 134217728 bytes less free with it",
        "no_such_backend",
        "2 passed, 8 failed, 1 skipped",
    ):
        assert part in done.stdout
    suite = ElementTree.parse(files["junit"]).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("11", "8", "1")
    failure = suite.find("testcase[@name='peak']/failure")
    assert failure is not None
    assert failure.get("message") == "write get_current_memory_usage"


def test_a_platform_by_the_name_that_the_environment_gives_its_class() -> None:
    """As in every command: a class that is not packaged yet."""
    chosen = {"SGLANG_PLATFORM": "mine=sgl_aspects.platforms.cpu:CpuPlatform"}
    words = ("conformance", "--platform", "mine", "--only", "identity.family")
    assert "Conformance of platform 'mine'" in output_of(command(*words, **chosen))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--only", "speed"], "no check is called 'speed'"),
        (["--json", "/no/such/folder/report.json"], "write a file in a folder that exists"),
    ],
)
def test_arguments_that_cannot_be_met(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["conformance", *words])
    except SystemExit as ended:  # argparse's own way
        status = int(str(ended.code))
    assert status == 2
    assert part in capsys.readouterr().err


def test_inputs_are_made_on_the_host_wherever_tensors_go_by_default() -> None:
    with torch.device("meta"):
        assert random_tensor(3, dtype=torch.float32, seed=1).device == torch.device("cpu")
