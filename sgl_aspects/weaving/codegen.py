"""Source text for functions with the exact signature of their target, and the code made of it.

Why not a proxy: `torch.compile` traces through a plain function and its closure, and silently bypasses a
proxy; and a call through a plain function costs a third.

The hooks are constants of the code: setting a function's ``__code__`` swaps all of them in one step. A call
that has begun goes on with the hooks it began with, the next one finds the new ones, none sees a mixture,
and no call takes a lock. Three cells are shared by all variants of one woven function (:data:`CELLS`):

    calls      how often the function was called
    compiling  says whether torch is tracing this call, so that observers stand aside
    head       the behavioural chain, see chain.py, where torch can trace it

Hooks see required parameters by position and optional ones by keyword, whichever way the caller passed
them, with defaults filled in. (Functions with ``*args`` pass all positional parameters by position.)
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

MAX_FLAT_OBSERVERS = 4
CELLS = ("calls", "compiling", "head")


class FunctionKind(enum.Enum):
    """What calling the function gives; the woven function is of the same kind."""

    PLAIN = "plain"
    COROUTINE = "coroutine"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"

    @classmethod
    def of(cls, function: Any) -> FunctionKind:
        """The kind of a function, of a partial or method around one, or of an instance's ``__call__``."""
        if isinstance(function, (functools.partial, types.MethodType)):
            return cls.of(function.func if isinstance(function, functools.partial) else function.__func__)
        if not isinstance(function, types.FunctionType):
            call = inspect.getattr_static(type(function), "__call__", None)
            return cls.of(call) if isinstance(call, types.FunctionType) else cls.PLAIN
        if inspect.iscoroutinefunction(function):
            return cls.COROUTINE
        if inspect.isasyncgenfunction(function):
            return cls.ASYNC_GENERATOR
        if inspect.isgeneratorfunction(function):
            return cls.GENERATOR
        return cls.PLAIN


@dataclass(frozen=True)
class Signature:
    """Parameters as source text, ready for the generated function (hashable: variants are cached by it).

    :param parameters: as they stand in its definition.
    :param positional: the elements of a tuple of what is handed on by position.
    :param keywords: the entries of a dictionary of what is handed on by name.
    :param call: the arguments of a call that hands everything on.
    """

    parameters: str
    positional: str
    keywords: str
    call: str
    names: frozenset[str]

    @classmethod
    def of(cls, function: types.FunctionType) -> Signature:
        code = function.__code__
        names = list(code.co_varnames)
        defaults = len(function.__defaults__ or ())
        only, both, keyword = code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount
        var_positional = bool(code.co_flags & inspect.CO_VARARGS)
        var_keyword = bool(code.co_flags & inspect.CO_VARKEYWORDS)
        parameters: list[str] = []
        positional: list[str] = []
        keywords: list[str] = []
        for index, name in enumerate(names[:both]):
            optional = index >= both - defaults
            parameters.append(f"{name}=None" if optional else name)
            if optional and index >= only and not var_positional:
                keywords.append(name)
            else:
                positional.append(name)
            if index == only - 1:
                parameters.append("/")
        # co_varnames lists keyword-only parameters before *args.
        rest = both + keyword
        if var_positional:
            parameters.append(f"*{names[rest]}")
            positional.append(f"*{names[rest]}")
            rest += 1
        elif keyword:
            parameters.append("*")
        kwdefaults = function.__kwdefaults__ or {}
        for name in names[both : both + keyword]:
            parameters.append(f"{name}=None" if name in kwdefaults else name)
            keywords.append(name)
        call = [*positional, *(f"{name}={name}" for name in keywords)]
        packed = [f"{name!r}: {name}" for name in keywords]
        if var_keyword:
            parameters.append(f"**{names[rest]}")
            call.append(f"**{names[rest]}")
            packed.append(f"**{names[rest]}")
        return cls(
            parameters=", ".join(parameters),
            positional="".join(f"{name}, " for name in positional),
            keywords=", ".join(packed),
            call=", ".join(call),
            names=frozenset(names[: both + keyword + var_positional + var_keyword]),
        )


ANYTHING = Signature(
    "*args, **kwargs", "*args, ", "**kwargs", "*args, **kwargs", frozenset({"args", "kwargs"})
)
"""For a REPLACE hook whose parameters are not the target's: whatever comes is handed on."""


class Shape(NamedTuple):
    """What distinguishes the variants of one woven function.

    :param signature: the parameters it accepts.
    :param observers: how many are flattened into it.
    :param guarded: torch.compile may trace this function: count and observe only outside of it.
    :param packed: the chain takes the pair (args, kwargs), as native hooks do.
    """

    signature: Signature
    observers: int = 0
    guarded: bool = False
    packed: bool = False


@lru_cache(maxsize=2048)
def variant(kind: FunctionKind, shape: Shape) -> types.CodeType:
    """The code of a woven function, with a text in the place of each hook; see :func:`filled`."""
    source = _Source(kind, shape).text()
    factory = compile(source, "<sgl_aspects>", "exec", dont_inherit=True, optimize=0)
    code = _code_named("woven", _code_named("factory", factory))
    return code.replace(co_consts=tuple(_constant(const) for const in code.co_consts))


def filled(code: types.CodeType, hooks: dict[str, Any], **identity: Any) -> types.CodeType:
    """``code``, one of :func:`variant`, with its hooks: by name, ``chain``, and ``enter0`` and so on.

    :param identity: further fields of the code to set.
    """
    values = {f"<{name}>": _hashable(hook) for name, hook in hooks.items()}
    consts = tuple(values.get(const, const) if type(const) is str else const for const in code.co_consts)
    return code.replace(co_consts=(*consts, _OURS), **identity)


def is_ours(consts: Any) -> bool:
    """Whether a tuple holds the constants of a woven function: it holds an original on purpose."""
    return len(consts) > 0 and consts[-1] is _OURS


_OURS = object()


class _Called:
    """Stands for a callable that has no hash: debuggers hash the code of functions, and so its constants."""

    __slots__ = ("called",)

    def __init__(self, called: Any) -> None:
        self.called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.called(*args, **kwargs)


def _hashable(hook: Any) -> Any:
    try:
        hash(hook)
    except TypeError:
        return _Called(hook)
    return hook


async def _close(inner: Any) -> None:
    if hasattr(inner, "aclose"):
        await inner.aclose()


def _throw(inner: Any, error: BaseException) -> Any:
    if hasattr(inner, "athrow"):
        return inner.athrow(error)
    raise error


# The source names these by a text that is then replaced in the code's constants: as global names they would
# be looked up in the target's module, which may have names like these of its own.
_CONSTANTS: dict[str, Any] = {
    f"<{value.__name__}>": value
    for value in (BaseException, Exception, GeneratorExit, StopAsyncIteration, _close, _throw)
}


def _constant(const: Any) -> Any:
    return _CONSTANTS.get(const, const) if isinstance(const, str) else const


def _code_named(name: str, outer: types.CodeType) -> types.CodeType:
    return next(
        const for const in outer.co_consts if isinstance(const, types.CodeType) and const.co_name == name
    )


class _Source:
    """Writes the source of one variant."""

    def __init__(self, kind: FunctionKind, shape: Shape) -> None:
        self.kind = kind
        self.signature = shape.signature
        self.shape = shape
        self.prefix = "_"
        while any(name.startswith(self.prefix) for name in shape.signature.names):
            self.prefix += "_"  # our locals and cells must not collide with the target's parameters

    def local(self, name: str) -> str:
        return self.prefix + name

    def text(self) -> str:
        cells = ", ".join(self.local(name) for name in CELLS)
        definition = "async def" if self.kind.value.startswith(("coroutine", "async")) else "def"
        lines = [
            f"def factory({cells}):",
            f"    {definition} woven({self.signature.parameters}):",
            f"        nonlocal {self.local('calls')}",
            # Never runs: it makes every variant close over the same cells, in the same order.
            f"        if 0: {cells}",
        ]
        body: list[str] = []
        if self.shape.guarded:
            body += [f"if {self.local('compiling')}():", *_indent(self._hand_on("head"))]
        # A float: adding to it costs less than to an int, and is exact up to 2 ** 53.
        body.append(f"{self.local('calls')} += 1.0")
        body.append(f"{self.local('chain')} = '<chain>'")
        body += self._observed() if self.shape.observers else self._hand_on("chain")
        lines += ["        " + line for line in body]
        return "\n".join(lines)

    def _hand_on(self, chain: str) -> list[str]:
        """Call the chain in the cell ``chain`` and return what it gives, as this kind of function does."""
        if self.kind is FunctionKind.ASYNC_GENERATOR:
            return [*self._delegate_async(chain), "return"]
        return [f"return ({self._result(chain)})"]

    def _result(self, chain: str) -> str:
        call = self._call(chain)
        if self.kind is FunctionKind.COROUTINE:
            return f"await {call}"
        if self.kind is FunctionKind.GENERATOR:
            return f"yield from {call}"
        return call

    def _call(self, chain: str) -> str:
        if self.shape.packed and chain == "chain":
            return f"{self.local(chain)}(({self.signature.positional}), {{{self.signature.keywords}}})"
        return f"{self.local(chain)}({self.signature.call})"

    def _observed(self) -> list[str]:
        local = self.local
        indices = range(self.shape.observers)
        result, error, args, kwargs = local("result"), local("error"), local("args"), local("kwargs")
        names = [f"{part}{i}" for i in indices for part in ("enter", "exit", "failed")]
        lines = [
            *(f"{local(name)} = '<{name}>'" for name in names),
            f"{args} = ({self.signature.positional})",
            f"{kwargs} = {{{self.signature.keywords}}}",
        ]
        for i in indices:
            lines += [
                f"try: {local(f'token{i}')} = {local(f'enter{i}')}({args}, {kwargs})",
                f"except '<Exception>' as {error}: {local(f'token{i}')} = {local(f'failed{i}')}({error})",
            ]
        body = [f"{result} = ({self._result('chain')})"]
        if self.kind is FunctionKind.ASYNC_GENERATOR:
            body = [*self._delegate_async("chain"), f"{result} = None"]
        lines += ["try:", *_indent(body)]
        lines += [f"except '<BaseException>' as {error}:", *_indent(self._exits("None", error)), "    raise"]
        lines += [*self._exits(result, "None")]
        if self.kind is not FunctionKind.ASYNC_GENERATOR:
            lines.append(f"return {result}")
        return lines

    def _exits(self, result: str, error: str) -> list[str]:
        local = self.local
        lines = []
        for i in reversed(range(self.shape.observers)):
            # `failed` answers itself as the token of an enter() that raised: its exit() is not called.
            lines += [
                f"if {local(f'token{i}')} is not {local(f'failed{i}')}:",
                f"    try: {local(f'exit{i}')}({local(f'token{i}')}, {result}, {error})",
                f"    except '<Exception>' as {local('broken')}: {local(f'failed{i}')}({local('broken')})",
            ]
        return lines

    def _delegate_async(self, chain: str) -> list[str]:
        """``yield from`` for an async generator: asend, athrow and aclose reach the inner one."""
        local = self.local
        inner, item, sent, thrown = local("inner"), local("item"), local("sent"), local("thrown")
        return [
            # In two steps: Python warns of a call of what looks like a text.
            f"{local('close')} = '<_close>'; {local('throw')} = '<_throw>'",
            f"{inner} = {self._call(chain)}.__aiter__()",
            "try:",
            f"    {item} = await {inner}.__anext__()",
            "    while True:",
            "        try:",
            f"            {sent} = yield {item}",
            "        except '<GeneratorExit>':",
            f"            await {local('close')}({inner})",
            "            raise",
            f"        except '<BaseException>' as {thrown}:",
            f"            {item} = await {local('throw')}({inner}, {thrown})",
            "        else:",
            f"            {item} = await ({inner}.__anext__() if {sent} is None else {inner}.asend({sent}))",
            "except '<StopAsyncIteration>':",
            "    pass",
        ]


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]
