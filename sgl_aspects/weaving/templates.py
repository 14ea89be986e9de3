"""Templates: the code of woven functions, generated once for each shape.

A woven function is ``def f(*args, **kwargs)`` of the target's kind. Its hooks are constants of the code.
From Python 3.11 on, the frame of a plain function is hidden: callers that are looked up, tracebacks and
debuggers see the target's body called by its caller (:func:`.compat.hide_frame`).
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from functools import lru_cache
from typing import Any, NamedTuple

from sgl_aspects import compat
from sgl_aspects.weaving.chain import CHAINS_NAME
from sgl_aspects.weaving.hooks import FunctionKind

SUSPENDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Shape(NamedTuple):
    """The properties that distinguish the templates of woven functions.

    :param observers: for each observer: whether it has enter(), and whether it has exit().
    :param guarded: torch.compile may trace this function: it counts and observes only outside of that.
    :param packed: the chain takes the pair (args, kwargs), as native hooks do.
    :param free: the number of the target's free variables.
    :param body: for a frame that is seen, the number of lines from the target's first line to its first
        statement: a breakpoint on the function stops there, and then in the body.
    """

    kind: FunctionKind
    observers: tuple[tuple[bool, bool], ...] = ()
    guarded: bool = False
    packed: bool = False
    free: int = 0
    body: int = 0


# -- code ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def template(shape: Shape) -> types.CodeType:
    """Return the code of a woven function, with a string such as "<chain>" for each constant.

    It is on the target's first line, where tracebacks show the definition, but for ``body`` and ``_MARKED``.
    """
    tree = ast.parse("\n".join(_source(shape)))
    factory: Any = tree.body[0]
    for node in ast.walk(factory):
        _put(node, _MARKED if isinstance(node, ast.Pass) else 1)
    first = factory.body[0].body[0]
    for node in ast.walk(first.test if shape.guarded else first):
        _put(node, 1 + shape.body)
    names: dict[str, Any] = {}
    exec(compile(tree, "<sgl_aspects>", "exec", dont_inherit=True, optimize=0), names)
    code: types.CodeType = names["factory"](*range(shape.free)).__code__
    if shape.kind is FunctionKind.PLAIN:
        code = compat.hide_frame(code, _MARKED)
    return code.replace(
        co_consts=tuple(
            _CONSTANTS.get(const, const) if type(const) is str else const for const in code.co_consts
        )
    )


_MARKED = 2
"""The line of the statements `pass`, where the frame becomes visible: before the function ends."""


def _put(node: ast.AST, line: int) -> None:
    """Move ``node`` to ``line``, without a column: the source there is the target's own."""
    if "lineno" in node._attributes:
        node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
        node.col_offset = node.end_col_offset = -1 if sys.version_info >= (3, 11) else 0  # type: ignore[attr-defined]


def _source(shape: Shape) -> list[str]:
    free = "".join(f"free{index:04}, " for index in range(shape.free))
    definition = "async def" if shape.kind.value.startswith(("coroutine", "async")) else "def"
    # The first is one statement, so that `template` moves both of its parts to one line.
    body = ["if 1: calls = '<calls>'; calls.number += 1.0", "chain = '<chain>'"]
    body += _observed(shape) if shape.observers else _delegate(shape)
    if shape.guarded:  # the branch of the compiler comes last: `pass` marks the first end of the function
        body = [f"if not {CHAINS_NAME}.compiling():", *_indent(body), *_compiled(shape)]
    if free:
        body.append(f"if 0: {free}")  # never runs: makes the function close over them
    woven = [f"{definition} woven(*args, **kwargs):", *_indent(body), "return woven"]
    return [f"def factory({free}):", *_indent(woven)]


def _compiled(shape: Shape) -> list[str]:
    chain = f"{CHAINS_NAME}._chain"
    result = _result(shape, chain, packed=False)
    return (
        _delegate_async(result)
        if shape.kind is FunctionKind.ASYNC_GENERATOR
        else ["pass", f"return ({result})"]
    )


def _result(shape: Shape, chain: str, packed: bool) -> str:
    """Return an expression that calls the chain, without keywords if empty: packing none takes time, too."""
    wait = {FunctionKind.COROUTINE: "await ", FunctionKind.GENERATOR: "yield from "}.get(shape.kind, "")
    if packed:
        return f"{wait}{chain}(args, kwargs)"
    return f"{wait}({chain}(*args, **kwargs) if kwargs else {chain}(*args))"


def _delegate(shape: Shape) -> list[str]:
    """Return statements that call the chain and return its result, as this kind of function does."""
    result = _result(shape, "chain", shape.packed)
    if shape.kind is FunctionKind.ASYNC_GENERATOR:
        return [*_delegate_async(result), "return"]
    if shape.kind is FunctionKind.PLAIN:
        body = [f"result = {result}", "pass", "return result"]
        return ["try:", *_indent(body), "except:", "    pass", "    raise"]
    return [f"return ({result})"]


def _observed(shape: Shape) -> list[str]:
    """Return statements that call the chain with its observers; methods that they lack are not called."""
    enters = [index for index, (enters, _) in enumerate(shape.observers) if enters]
    exits = [index for index, (_, leaves) in enumerate(shape.observers) if leaves]
    names = [f"{part}{i}" for i in enters for part in ("enter", "failed")]
    names += [f"{part}{i}" for i in exits for part in ("exit", "failed")]
    lines = [f"{name} = '<{name}>'" for name in dict.fromkeys(names)]
    if enters:
        # A copy, so that an observer cannot change the call.
        lines.append("if kwargs: seen = {**kwargs}")
        lines.append("else: seen = {}" if shape.packed else "else: seen = kwargs; kwargs = None")
    for i in enters:
        lines += [
            f"try: token{i} = enter{i}(args, seen)",
            f"except '<Exception>' as error: token{i} = failed{i}(error)",
        ]
    if not exits:
        return lines + _delegate(shape)
    result = _result(shape, "chain", shape.packed)
    body = [f"result = ({result})"]
    if shape.kind is FunctionKind.ASYNC_GENERATOR:
        body = [*_delegate_async(result), "result = None"]
    lines += ["try:", *_indent(body)]
    lines += [
        "except '<BaseException>' as error:",
        *_indent(_exits(shape, exits, "None", "error")),
        *("    pass", "    raise"),
        "else:",  # its code comes before the first `pass`: exit() does not see the frame
        *_indent(_exits(shape, exits, "result", "None")),
    ]
    return [
        *lines,
        *(["return"] if shape.kind is FunctionKind.ASYNC_GENERATOR else ["pass", "return result"]),
    ]


def _exits(shape: Shape, exits: list[int], result: str, error: str) -> list[str]:
    lines = []
    for i in reversed(exits):
        has_token = shape.observers[i][0]
        leave = [
            f"try: exit{i}({f'token{i}' if has_token else None}, {result}, {error})",
            f"except '<Exception>' as broken: failed{i}(broken)",
        ]
        # `failed` is the token of an enter() that raised: its exit() is not called.
        lines += [f"if token{i} is not failed{i}:", *_indent(leave)] if has_token else leave
    return lines


def _delegate_async(call: str) -> list[str]:
    """Return ``yield from`` for an async generator: asend, athrow and aclose reach the inner one."""
    return [
        "adapt = '<_adapted>'",  # first: Python warns about a call of a string
        f"inner = adapt({call})",
        "try:",
        "    item = await inner.asend(None)",
        "    while True:",
        "        try:",
        "            sent = yield item",
        "        except '<GeneratorExit>':",
        "            await inner.aclose()",
        "            raise",
        "        except '<BaseException>' as thrown:",
        "            item = await inner.athrow(thrown)",
        "        else:",
        "            item = await inner.asend(sent)",
        "except '<StopAsyncIteration>':",
        "    pass",
    ]


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _adapted(items: Any) -> Any:
    """Return an async generator for what a hook has put in its place, any object with ``__aiter__``."""
    return items if hasattr(items, "asend") else _generated(items)


async def _generated(items: Any) -> Any:
    async for item in items:
        yield item


# As constants: names would be looked up in the target's module, which may define the same ones.
_CONSTANTS: dict[str, Any] = {
    f"<{value.__name__}>": value
    for value in (BaseException, Exception, GeneratorExit, StopAsyncIteration, _adapted)
}
