"""``sgl-aspects conformance --engine sglang``: real SGLang on the platform, each part in its own process.

SGLang's entry points name the platform. For a platform without one, a built-in or a class in development, a
bridge is made for the run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from sgl_aspects.conformance.check import Bench, BrokenPromiseError, Check, NotApplicableError, require
from sgl_aspects.conformance.generation import prompts
from sgl_aspects.conformance.tiny_model import LATENT, largest_gap, right_tokens, write_tiny_model
from sgl_aspects.platforms import current_platform_choice, resolve_qualified_name

GROUP = "sglang.srt.platforms"
MULTIMODAL_GROUP = "sglang.multimodal_gen.platforms"
TOKENS = 12
#: The largest gap of a token in half precision to the best one, in standard deviations of the logits.
_GAP = 0.1
_SECONDS = 300
#: A Granite that computes the same as a Llama. SGLang's Llama needs more of NVIDIA's packages on its devices.
_GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
#: The last line of a traceback, with its exception.
_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b")
CHECKS: list[Check] = []


def _check(write: str, expects: str) -> Callable[[Callable[[Bench], str]], Callable[[Bench], str]]:
    def add(function: Callable[[Bench], str]) -> Callable[[Bench], str]:
        CHECKS.append(Check(f"sglang.{function.__name__}", write, expects, function))
        return function

    return add


def run_child(bench: Bench, what: str, *words: str, group: str = GROUP) -> Any:
    """Run :mod:`sgl_aspects.engines.sglang.conformance.child` in its own process; return its answer."""
    name, environment = _chosen(bench, group)
    environment |= {
        "SGLANG_PLATFORM": name,
        "SGLANG_DIFFUSION_PLATFORM_OVERRIDE": name,
        "HF_HUB_OFFLINE": "1",
        "TRITON_F32_DEFAULT": "ieee",  # no rounding of float32 kernels to tf32
    }
    command = [sys.executable, "-W", "ignore", "-m", "sgl_aspects.engines.sglang.conformance.child", what]
    done = subprocess.run(
        [*command, *words],
        env=environment,
        cwd="/",  # -m imports from there
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        found = f"exit code {done.returncode}: {_cause(done.stderr)}"
        raise BrokenPromiseError("SGLang to start", found, "")
    return json.loads(done.stdout.splitlines()[-1])


def _cause(log: str) -> str:
    """Return the first error, which is the cause: a dead scheduler's parent only reports the death."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return "; ".join(dict.fromkeys(line[:300] for line in (errors or lines)[:1] + lines[-1:])) or "no output"


def _chosen(bench: Bench, group: str) -> tuple[str, dict[str, str]]:
    """Return the platform's name in SGLang's group, and the environment that provides it."""
    name = current_platform_choice().name
    environment = dict(os.environ)
    if any(point.name == name for point in entry_points(group=group)):
        return name, environment
    if group == MULTIMODAL_GROUP:
        raise NotApplicableError(f"no entry point {name!r} in group {group}")
    site = bench.folder / "bridge"
    metadata = site / "conformance_bridge-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    kind = type(bench.platform)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance-bridge\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\nbridged_{name} = conformance_bridge:activate\n")
    (site / "conformance_bridge.py").write_text(
        "def activate():\n    return 'conformance_bridged.Platform'\n", encoding="utf-8"
    )
    (site / "conformance_bridged.py").write_text(
        "from sgl_aspects.engines.sglang.bridge.platform import bridged\n"
        "from sgl_aspects.platforms import resolve_qualified_name\n"
        f"Platform = bridged(resolve_qualified_name('{kind.__module__}:{kind.__qualname__}'))\n"
    )
    environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [environment.get("PYTHONPATH")])])
    return f"bridged_{name}", environment


@_check("the entry point of group sglang.srt.platforms", "SGLang to choose the platform")
def chosen(bench: Bench) -> str:
    found = run_child(bench, "identity")
    platform = bench.platform
    require(found["out_of_tree"], "is_out_of_tree()", found["class"])
    for name in ("device_name", "device_type"):
        require(found[name] == getattr(platform, name), getattr(platform, name), found[name], name)
    return f"{found['class']}, SGLang {found['version']}"


@_check("the method that is named", "every method of SGLang's interface to return its type")
def questions(bench: Bench) -> str:
    answers = run_child(bench, "questions")
    for name, answer in answers.items():
        require(answer["right"], answer["expected"], answer["found"], name)
    return f"{len(answers)} questions"


@_check("capabilities", "everything declared for SGLang to exist")
def capabilities(bench: Bench) -> str:
    found = run_child(bench, "capabilities")
    for name, problem in found.items():
        require(problem is None, f"{name}: the kernels or the library", problem, "capabilities")
    return ", ".join(found) or "none declared"


@_check("get_kv_pool_cls", "None, or a pool made with SGLang's arguments that keeps what is written")
def pools(bench: Bench) -> str:
    found = run_child(bench, "pools")
    for kind, (right, name) in found.items():
        require(right, f"a {kind} pool that SGLang can use, or None", name, "get_kv_pool_cls")
    return ", ".join(f"{kind}: {name}" for kind, (_, name) in found.items())


@_check("get_paged_allocator_cls", "slots of prompts and decodes in pages, each once, and all of them back")
def allocator(bench: Bench) -> str:
    found = run_child(bench, "allocator")
    require("wrong" not in found, "None, or an allocator that SGLang can use", found.get("wrong"))
    return str(found["name"])


@_check(
    "get_default_attention_backend, get_device",
    "real SGLang, no --device, to give the tokens of the reference",
)
def greedy(bench: Bench) -> str:
    return _generate(bench, "tiny-granite", _GRANITE)


@_check("get_attention_backends", "the tokens of the reference from a model with latent keys and values")
def latent(bench: Bench) -> str:
    platform = bench.platform
    own = platform.get_attention_backends().get(platform.get_default_attention_backend())
    kinds = getattr(None if own is None else resolve_qualified_name(own), "kinds", ())
    if "mla" not in kinds:
        raise NotApplicableError("no attention backend of the platform's own with 'mla' among its kinds")
    return _generate(bench, "tiny-deepseek", LATENT)


def _generate(bench: Bench, name: str, config: dict[str, Any]) -> str:
    folder = bench.folder / name
    weights, given = write_tiny_model(folder, config), prompts()
    file = folder / "prompts.json"
    file.write_text(json.dumps(given))
    # SGLang's kernels for devices of torch.cuda take half precision only.
    dtype = "bfloat16" if bench.platform.device_type == "cuda" else "float32"
    answer = run_child(bench, "greedy", str(folder), str(file), str(TOKENS), dtype)
    found, backend = answer["tokens"], answer["attention_backend"]
    own, wanted = bench.platform.get_attention_backends(), bench.platform.get_default_attention_backend()
    require(wanted not in own or backend == wanted, f"the platform's attention backend {wanted!r}", backend)
    if dtype != "float32":
        gap = largest_gap(weights, given, found)
        require(gap <= _GAP, f"tokens at most {_GAP} standard deviations from the best", f"{gap:.3f}")
        return f"{len(given)} prompts × {TOKENS} tokens in {dtype}, {gap:.3f} from the best, by {backend}"
    right = right_tokens(bench.reference, folder, weights, given, TOKENS)
    require(found == right, str(right), found)
    return f"{len(given)} prompts × {TOKENS} tokens, equal to {bench.reference}, by {backend}"


@_check("MMPlatform", "the engine for images and video to choose the platform, and its methods to work")
def multimodal(bench: Bench) -> str:
    answers = run_child(bench, "multimodal", group=MULTIMODAL_GROUP)
    if "missing" in answers:
        raise NotApplicableError(answers["missing"])
    for name, answer in answers.items():
        require(answer["right"], answer["expected"], answer["found"], name)
    return f"{len(answers)} questions"
