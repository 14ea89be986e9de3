"""Commands of pages that are not whole guides: each block runs as printed, or it is said why none does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.distributions import install_plugin, wheel
from tests.support.pages import blocks, run_script
from tests.support.simulated_run import SimulatedRun
from tests.support.tree import ROOT

SERVED = """
until curl --silent --fail http://127.0.0.1:8000/health; do sleep 0.2; done
"""
# A server that is there until the commands of the block have run.
SERVE = """
import pathlib, time
while not pathlib.Path("over").exists():
    time.sleep(0.05)
"""
PLUGIN = """
from sgl_aspects import HookRegistry, HookType

def activate():
    HookRegistry.register("{}", lambda *args: None, HookType.BEFORE)
"""


class Case(NamedTuple):
    """``begins``: the first words of the block. ``said``: what its output has, in this order.

    ``replaced``: what stands for something else in it, such as a model, and what is not waited for there.
    """

    page: str
    begins: str
    said: str
    prepare: Callable[[Path], object] = lambda _: None
    replaced: tuple[tuple[str, str], ...] = ()


def hooked_program(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "mod.py").write_text("def f(): pass\n")
    (folder / "serve.py").write_text("import pkg.mod\npkg.mod.f()\n")
    install_plugin(folder, "mine", PLUGIN.format("pkg.mod:f"))


def hooked_vllm(folder: Path) -> None:
    (folder / "vllm.py").write_text("def f(): return 1\n")
    changed = {"vllm.py": "def f(): return 2\n"}
    wheel(folder, "vllm-0.33.0-py3-none-any.whl", changed)
    install_plugin(folder, "mine", PLUGIN.format("vllm:f"))


def simulated(*names: str) -> Callable[[Path], object]:
    return lambda folder: [
        SimulatedRun(40, seed=seed, name=name).write(folder / f"{name}.jsonl")
        for seed, name in enumerate(names)
    ]


CASES = [
    Case(
        "hooks.md",
        "sgl-aspects run --report reports",
        r"pkg\.mod:f(.|\n)*pkg\.mod:f(.|\n)*pkg\.mod:f",
        hooked_program,
    ),
    Case("hooks.md", "sgl-aspects hooks lock", r"hooks\.lock(.|\n)*body", hooked_vllm),
    Case(
        "cluster.md",
        "sgl-aspects report prefill.jsonl",
        r"report\.html: 80 requests(.|\n)*timeline\.json: 80 requests",
        simulated("prefill", "decode"),
    ),
    Case(
        "operating.md",
        "sgl-aspects report --compare",
        r"before\.jsonl(.|\n)*report\.html: both runs",
        simulated("before", "after"),
        (("after.jsonl\n", "after.jsonl || test $? = 1\n"),),
    ),
    Case(
        "tracing.md",
        'pip install -e ".[prometheus]"',
        "sgl_aspects_records_dropped",
        lambda folder: (folder / "serve.py").write_text(SERVE),
        (
            ("serve.py ", "serve.py & "),
            ("curl ", "curl --silent --retry 100 --retry-connrefused --retry-delay 1 "),
            ("9464", "8000"),
            ("_seconds\n", "_seconds\ntouch over; wait\n"),
        ),
    ),
]
SLOW = [
    Case(
        "ops.md",
        "SGL_ASPECTS_OP_CONTROL=on",
        "rms_norm",
        replaced=(("serve … ", f'serve --model "$MODEL" --port 8000 & {SERVED}'),),
    ),
    Case(
        "serving.md",
        'pip install -e ".[serve]"',
        "",
        replaced=(("path/to/model ", f'"$MODEL" --port 8000 & {SERVED}'),),
    ),
    Case(
        "serving.md",
        "sgl-aspects run --endpoint",
        "",
        replaced=(("path/to/model", f'"$MODEL" --port 8000 & {SERVED}'),),
    ),
    Case("platforms.md", "sgl-aspects new-platform acme", r"acme(.|\n)*0 failed(.|\n)* passed"),
]
GUIDES = ("quickstart.md", "operating.md")  # tests/test_docs.py
ELSEWHERE = {
    "git clone": "tests/test_readme.py",
    "pip install -e . && python run.py": "tests/engines/test_new_engine.py",
    "helm install": "tests/test_kubernetes.py",
    "make demo": "tests/cli/test_demo.py",
}
REAL_SGLANG = "needs SGLang (make test-sglang drives it)"
LEFT = {
    "sgl-aspects run --level 3 --file spans.jsonl -- python -m sglang": REAL_SGLANG,
    "$ sgl-aspects attach 4242": REAL_SGLANG,
    "sgl-aspects run --dormant": REAL_SGLANG,
    "ASPECTS_TRACE=3": REAL_SGLANG,
    "export SGL_ASPECTS_TRACE=3": "needs vLLM (make test-vllm drives it)",
    "python3 -m venv phoenix-venv": REAL_SGLANG,
    "make sglang-env": REAL_SGLANG,
    "sgl-aspects doctor --platform acme": REAL_SGLANG,
    "sgl-aspects run --level 3 -- transformers serve": "needs a model (tests/engines/transformers starts it)",
    "python3 -m venv .venv": "installs from the package index, as the README's does",
    "pip download": "downloads vLLM",
    "SGL_ASPECTS_TRACE=3": "needs an engine and a backend (tests/tracing/test_engine.py has both)",
}


def block(page: str, begins: str) -> str:
    (found,) = [each.text for each in blocks(ROOT / page) if each.text.startswith(begins)]
    return found


def run(case: Case, folder: Path, **variables: str) -> None:
    script = block(f"docs/{case.page}", case.begins)
    for printed, replacement in case.replaced:
        assert printed in script
        script = script.replace(printed, replacement)
    (folder / "work").mkdir()
    case.prepare(folder / "work")
    done = run_script(script, folder, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(case.said, done.stdout), done.stdout[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.begins)
def test_a_block_runs_as_printed(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.begins)
def test_a_block_with_an_engine_runs_as_printed(case: Case, tmp_path: Path) -> None:
    from tests.support.tiny_models import make_llama

    make_llama(tmp_path / "model")
    run(case, tmp_path, MODEL=str(tmp_path / "model"))


def test_of_each_block_of_commands_it_is_known_whether_it_runs() -> None:
    known = (*(case.begins for case in (*CASES, *SLOW)), *ELSEWHERE, *LEFT)
    found: set[str] = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for each in blocks(page):
            is_guide = page.name in GUIDES and each.language == "bash"
            has_commands = each.language in ("", "bash") and re.search(
                r"^(\$ )?(sgl-aspects|python|pip|make|git|helm|vllm|(export )?(SGL_)?ASPECTS_\w+=)",
                each.text,
                re.MULTILINE,
            )
            if has_commands and not is_guide:
                matching = [begins for begins in known if each.text.startswith(begins)]
                assert matching, f"{page}:{each.line}: say in this test whether these commands run"
                found.update(matching)
    assert found == set(known)
