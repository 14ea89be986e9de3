"""``sgl-aspects platforms``: the platforms found, the one that runs, and why not the others."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms import PlatformChoice, SRTPlatform, current_platform_choice
from sgl_aspects.platforms.builtins import BUILTIN_PLATFORMS
from sgl_aspects.platforms.discovery import find_plugins
from sgl_aspects.platforms.misnamed import misnamed_attributes
from sgl_aspects.terminal import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags. SGLANG_PLATFORM chooses, here as everywhere."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.epilog = (
        "SGLANG_PLATFORM=NAME chooses one by name; SGLANG_PLATFORM=NAME=pkg.mod:Cls one that is not packaged."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table. If the choice fails, shows the candidates before the error."""
    try:
        choice = current_platform_choice()
    except PlatformError as error:
        found = [(plugin.name, plugin.distribution) for plugin in find_plugins()]
        found += [(row.name, "built-in") for row in BUILTIN_PLATFORMS]
        if arguments.json:
            named = [{"name": name, "source": source} for name, source in found]
            print(json.dumps({"chosen": None, "error": str(error), "candidates": named}, indent=2))
        else:
            print(aligned([("PLATFORM", "FROM"), *found]))
        raise
    if arguments.json:
        print(json.dumps(as_json(choice), indent=2))
        return 0
    rows = [(c.name, c.source, "chosen" if c.chosen else "not chosen", c.reason) for c in choice.candidates]
    print(aligned([("PLATFORM", "FROM", "STATUS", "WHY"), *rows]))
    print()
    print(aligned(list(_details(choice).items())))
    return 0


def as_json(choice: PlatformChoice) -> dict[str, object]:
    """Return the content: the choice, every candidate with its reason, and the platform's properties."""
    return {
        "chosen": choice.name,
        "candidates": [asdict(candidate) for candidate in choice.candidates],
        "platform": _details(choice),
        "capabilities": asdict(choice.platform.capabilities),
    }


def _details(choice: PlatformChoice) -> dict[str, str]:
    platform = choice.platform
    facts: dict[str, Callable[[], str]] = {
        "class": lambda: f"{type(platform).__module__}:{type(platform).__qualname__}",
        "devices": lambda: f"{platform.device_count():d} × {platform.get_device_name()}",
        "capability": lambda: _capability(platform),
        "memory": lambda: _memory(platform),
        "host": lambda: platform.get_cpu_architecture().value,
        "attention": platform.get_default_attention_backend,
        "graphs": lambda: "yes" if platform.support_cuda_graph() else "no",
    }
    wrong = misnamed_attributes(type(platform))
    if wrong:
        facts["never called"] = lambda: ", ".join(f"{name} ({right}?)" for name, right in wrong.items())
    return {name: _answer(query) for name, query in facts.items()}


def _answer(query: Callable[[], str]) -> str:
    try:
        return str(query())
    except NotImplementedError as error:  # an incomplete class of a vendor is shown as far as it works
        return f"not implemented: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # likewise
        return f"failed: {type(error).__name__}: {error}"


def _capability(platform: SRTPlatform) -> str:
    capability = platform.get_device_capability()
    return capability.as_version_str() if capability else "not numbered"


def _memory(platform: SRTPlatform) -> str:
    free, total = platform.get_available_memory()
    return f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
