"""``sgl-aspects conformance``: checks of a platform's methods. A table, JSON, and JUnit."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from sgl_aspects import __version__
from sgl_aspects.cli.arguments import writable_file, write_text
from sgl_aspects.errors import ConfigError
from sgl_aspects.packages import install_command
from sgl_aspects.platforms import SRTPlatform, current_platform_choice

if TYPE_CHECKING:
    from sgl_aspects.conformance import Result

_MARKS = {"passed": "pass", "failed": "FAIL", "skipped": "skip"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--platform",
        metavar="NAME",
        help="an installed or built-in platform, or NAME=pkg.mod:Cls for a class that is not packaged; "
        "by default the one that would be chosen here",
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        default="embedded",
        help="the engine to run on the platform: embedded (the default), or an installed one that has checks",
    )
    parser.add_argument(
        "--only", metavar="CHECKS", help="groups or checks, comma-separated (attention,memory.peak)"
    )
    parser.add_argument(
        "--reference",
        choices=("auto", "transformers", "float64"),
        default="auto",
        help="what generated tokens are compared with; auto is transformers where it is installed",
    )
    parser.add_argument("--json", metavar="FILE", type=writable_file, help="write the results as JSON")
    parser.add_argument("--report", metavar="FILE", type=writable_file, help="write a page (Markdown)")
    parser.add_argument("--junit", metavar="FILE", type=writable_file, help="write the results as JUnit XML")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 where a check failed."""
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # a kernel that crashes is named
    if arguments.platform not in (None, os.environ.get("SGLANG_PLATFORM", "").partition("=")[0]):
        # Through the variable, so that the processes that checks start choose the same.
        os.environ["SGLANG_PLATFORM"] = arguments.platform
    from sgl_aspects.conformance import run_checks, selected_checks
    from sgl_aspects.conformance.report import ReportHead, counted

    only = arguments.only.split(",") if arguments.only else ()
    checks = selected_checks(only, engine=arguments.engine)
    choice = current_platform_choice()
    platform = choice.platform
    print(_heading(choice.name, platform))
    width = max(len(check.name) for check in checks)
    results: list[Result] = []
    lines: list[str] = []
    for result in run_checks(checks, reference=_reference(arguments.reference)):
        results.append(result)
        lines += row(result, width)
        print("\n".join(row(result, width)), flush=True)
    print(f"\n{counted(results)}")
    if arguments.json:
        write_text(arguments.json, json.dumps(as_json(choice.name, platform, results), indent=2) + "\n")
    if arguments.report:
        head = ReportHead.of(choice.name, platform, arguments.engine, results)
        write_text(arguments.report, head.markdown(lines))
    if arguments.junit:
        write_text(arguments.junit, as_junit(choice.name, results) + "\n")
    return 1 if any(result.status == "failed" for result in results) else 0


def row(result: Result, width: int) -> list[str]:
    """Return one line; after a failure also what was found and expected, and the method to write."""
    line = f"{_MARKS[result.status]}  {result.name:<{width}}  {result.seconds:6.2f} s"
    if result.status != "failed":
        return [f"{line}  {result.detail}"]
    indent = " " * 6
    return [
        line,
        f"{indent}write     {result.write}",
        f"{indent}expected  {result.expected}",
        f"{indent}found     {result.detail}",
    ]


def as_json(name: str, platform: SRTPlatform, results: Sequence[Result]) -> dict[str, object]:
    import torch

    from sgl_aspects.conformance.report import class_name, known

    counts = Counter(result.status for result in results)
    return {
        "platform": name,
        "class": class_name(platform),
        "device": known(platform.get_device_name),
        "sgl_aspects": __version__,
        "torch": torch.__version__,
        "counts": {status: counts[status] for status in _MARKS},
        "results": [asdict(result) for result in results],
    }


def as_junit(name: str, results: Sequence[Result]) -> str:
    """Return one test suite, a test case for each check."""
    counts = Counter(result.status for result in results)
    suite = ElementTree.Element(
        "testsuite",
        name=f"conformance of {name}",
        tests=str(len(results)),
        failures=str(counts["failed"]),
        skipped=str(counts["skipped"]),
        errors="0",
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    for result in results:
        group, _, check = result.name.partition(".")
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"{name}.{group}", name=check, time=f"{result.seconds:.3f}"
        )
        if result.status == "failed":
            failure = ElementTree.SubElement(case, "failure", message=f"write {result.write}")
            failure.text = f"expected {result.expected}\nfound {result.detail}"
        elif result.status == "skipped":
            ElementTree.SubElement(case, "skipped", message=result.detail)
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode")


def _heading(name: str, platform: SRTPlatform) -> str:
    import torch

    from sgl_aspects.conformance.report import class_name, known

    return (
        f"Conformance of platform {name!r}: {class_name(platform)}\n"
        f"{known(platform.get_device_name)}, sgl-aspects {__version__}, torch {torch.__version__}\n"
    )


def _reference(wanted: str) -> str:
    installed = importlib.util.find_spec("transformers") is not None
    if wanted == "transformers" and not installed:
        raise ConfigError(
            f"--reference transformers: it is not installed ({install_command('transformers')})"
        )
    if wanted == "auto":
        return "transformers" if installed else "float64"
    return wanted
