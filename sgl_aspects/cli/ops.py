"""``sgl-aspects ops``: each operator's implementation and why; other policies, also live."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_aspects.errors import ConfigError, OperatorError

if TYPE_CHECKING:
    from sgl_aspects.runtime.dispatch.configuration import Settings
    from sgl_aspects.runtime.dispatch.manager import OpManager

_DTYPES = ("float32", "bfloat16", "float16")
_WAIT_SECONDS = 5.0
_ANSWER = "sgl_aspects.runtime.dispatch.process:answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="these; left out: every operator")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="for tensors of this type")
    parser.add_argument(
        "--check", metavar="FILE", type=Path, help="check a YAML configuration, and nothing else"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="as with SGL_ASPECTS_OP_KEY=VALUE: shows the result, or applies it in live processes",
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")
    live = parser.add_argument_group("live processes of the engine")
    live.add_argument("--live", action="store_true", help="show them, and let --set change them")
    live.add_argument("--control", metavar="FOLDER", type=Path, help="those that follow this folder")
    live.add_argument("--pid", type=int, help="only this process")
    live.add_argument(
        "--wait",
        type=float,
        default=_WAIT_SECONDS,
        metavar="SECONDS",
        help="seconds to wait for live processes",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the operators here or in live processes, or check a file."""
    if arguments.check is not None:
        return _check(arguments.check)
    if arguments.live or arguments.control or arguments.pid:
        return _live(arguments)
    return _show(arguments)


# -- here -------------------------------------------------------------------------------------------------


def _check(file: Path) -> int:
    """Print the settings of the file, as an engine would read them here."""
    from sgl_aspects.runtime.dispatch.configuration import merged, read_file
    from sgl_aspects.runtime.dispatch.process import new_registry

    settings = merged([read_file(file)], new_registry())
    print(f"{file}: OK. {settings.policy.describe()}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    import torch

    from sgl_aspects.platforms import current_platform
    from sgl_aspects.runtime.dispatch.configuration import load_settings
    from sgl_aspects.runtime.dispatch.manager import OpManager
    from sgl_aspects.runtime.dispatch.process import new_registry

    given = _parse_settings(arguments.set)
    registry = new_registry()
    settings = load_settings(registry, given)
    manager = OpManager(registry, settings.policy)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    device = current_platform.get_device(0)
    names = arguments.operators or registry.op_names()
    rows = [_resolved(manager, name, dtype, device) for name in names]
    if arguments.json:
        report = {
            "platform": current_platform.device_name,
            "dtype": arguments.dtype,
            "files": list(settings.files),
            "policy": _policy(settings),
            "operators": rows,
        }
        print(json.dumps(report, indent=2))
        return 0
    print(f"platform {current_platform.device_name}, {arguments.dtype} on {device}")
    for key, entry in _policy(settings).items():
        print(f"  {key} = {entry['value']}   ({entry['from']})")
    print()
    for row in rows:
        print(f"{row['operator']} → {row['implementation'] or 'no implementation: ' + str(row['error'])}")
        for other in row["considered"]:
            print(f"    {other['implementation']}: {other['reason'] or 'chosen'}")
    return 0


def _parse_settings(pairs: list[str]) -> dict[str, str]:
    """Return ``--set`` as keys and values."""
    given = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}: write KEY=VALUE")
        given[key.strip()] = value.strip()
    return given


def _policy(settings: Settings) -> dict[str, dict[str, str]]:
    """Return each key that was set, and always prefer."""
    return {
        key: {"value": settings.policy.written(key), "from": settings.origin(key)}
        for key in vars(settings.policy)
        if key in settings.origins or key == "prefer"
    }


def _resolved(manager: OpManager, name: str, dtype: Any, device: Any) -> dict[str, Any]:
    try:
        selection = manager.select(name, dtype, device)
    except OperatorError as error:
        manager.registry.spec(
            name
        )  # an unknown operator is the user's mistake, unlike one without an implementation
        return {"operator": name, "implementation": None, "error": str(error), "considered": []}
    return {
        "operator": name,
        "implementation": selection.impl.impl_id,
        "error": None,
        "considered": [
            {"implementation": each.impl.impl_id, "kind": each.impl.kind.value, "reason": each.reason}
            for each in selection.considered
        ],
    }


# -- in live processes -------------------------------------------------------------------------------------


def _live(arguments: argparse.Namespace) -> int:
    from sgl_aspects.run.requests import ask, control_folder, prepared_processes

    folder = arguments.control or control_folder()
    request: dict[str, Any] = {}
    if arguments.set:
        request["set"] = _parse_settings(arguments.set)
    processes = [
        one for one in prepared_processes(folder) if arguments.pid is None or one.process_id == arguments.pid
    ]
    # The live processes check names of operators and vendors: they may have others than this one.
    answers = ask(processes, _ANSWER, request, arguments.wait)
    for process, answer in zip(processes, answers):
        if answer.get("error"):
            raise ConfigError(f"process {process.process_id}: {answer['error']}")
    states = [answer for answer in answers if answer]
    if not states:
        raise ConfigError(
            f"no live process follows {folder}: start an engine with SGL_ASPECTS_OP_CONTROL=on (or FOLDER)"
        )
    for state in states if arguments.operators else ():
        state["resolved"] = [row for row in state["resolved"] if row[0] in arguments.operators]
    if arguments.json:
        print(json.dumps(states, indent=2))
    else:
        for state in states:
            print("\n".join(_state_lines(state)))
    return 0


def _state_lines(state: dict[str, Any]) -> list[str]:
    lines = [f"process {state['pid']}: {state['policy']}"]
    lines += [f"  {op} → {impl}   ({tensors})" for op, tensors, impl in state["resolved"]]
    return lines + [f"  {op}: {impl} failed {count} times" for op, impl, count in state["failures"]]
