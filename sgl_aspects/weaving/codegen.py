"""Real Python functions with the exact signature of their target.

Why not a proxy: `torch.compile` traces through a plain function and its closure, and silently bypasses a
proxy; and a call through a plain function costs a third. Why `__code__` is swapped and not the function:
the function that stands in the engine keeps its identity, so every binding to it stays good.

All variants of one woven function share the same free variables (:data:`CELLS`):

    head            the behavioural chain, see chain.py; always callable with the target's arguments
    calls           how often the function was called
    compiling       says whether torch is tracing this call, so that observers stand aside
    pairs1..pairs4  the observers, flattened: (enter, exit, failed) for each

A variant with k observers reads only ``pairs<k>``, and these cells always hold exactly k observers. So a
thread that entered the function just before its code was swapped sees the hooks from before or after the
swap, never a mixture: no lock is needed in the call.

Hooks see required parameters by position and optional ones by keyword, whichever way the caller passed
them, with defaults filled in. (Functions with ``*args`` pass all positional parameters by position.)
"""

from __future__ import annotations

import enum
import inspect
import types
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_FLAT_OBSERVERS = 4
FLAT = tuple(f"pairs{count}" for count in range(1, MAX_FLAT_OBSERVERS + 1))
CELLS = ("head", "calls", "compiling", *FLAT)


class FunctionKind(enum.Enum):
    """What calling the function gives; the woven function is of the same kind."""

    PLAIN = "plain"
    COROUTINE = "coroutine"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"

    @classmethod
    def of(cls, function: types.FunctionType) -> FunctionKind:
        if inspect.iscoroutinefunction(function):
            return cls.COROUTINE
        if inspect.isasyncgenfunction(function):
            return cls.ASYNC_GENERATOR
        if inspect.isgeneratorfunction(function):
            return cls.GENERATOR
        return cls.PLAIN


@dataclass(frozen=True)
class Signature:
    """Parameters as source text, ready for the generated function (hashable: variants are cached by it)."""

    parameters: str
    positional: str
    keywords: str
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
            names=frozenset(names[: both + keyword + var_positional + var_keyword]),
        )

    @property
    def call(self) -> str:
        """The arguments of a call that hands everything on."""
        named = ", ".join(_as_keyword(part) for part in self.keywords.split(", ") if part)
        return self.positional + named


def _as_keyword(packed: str) -> str:
    if packed.startswith("**"):
        return packed
    name, _, value = packed.partition(": ")
    return f"{name[1:-1]}={value}"


ANYTHING = Signature("*args, **kwargs", "*args, ", "**kwargs", frozenset({"args", "kwargs"}))
"""For a REPLACE hook whose parameters are not the target's: whatever comes is handed on."""


@lru_cache(maxsize=2048)
def variant(kind: FunctionKind, signature: Signature, observers: int, guarded: bool) -> types.CodeType:
    """The code of a woven function.

    :param observers: how many are flattened into it, 0 to :data:`MAX_FLAT_OBSERVERS`.
    :param guarded: torch.compile may trace this function: count and observe only outside of it.
    """
    source = _Source(kind, signature, observers, guarded).text()
    factory = compile(source, "<sgl_aspects>", "exec", dont_inherit=True, optimize=0)
    return _code_named("woven", _code_named("factory", factory))


def _code_named(name: str, outer: types.CodeType) -> types.CodeType:
    return next(
        const for const in outer.co_consts if isinstance(const, types.CodeType) and const.co_name == name
    )


class _Source:
    """Writes the source of one variant."""

    def __init__(self, kind: FunctionKind, signature: Signature, observers: int, guarded: bool) -> None:
        self.kind = kind
        self.signature = signature
        self.observers = observers
        self.guarded = guarded
        self.prefix = "_"
        while any(name.startswith(self.prefix) for name in signature.names):
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
        if self.guarded:
            body += [f"if {self.local('compiling')}():", *_indent(self._hand_on())]
        body.append(f"{self.local('calls')} += 1")
        body += self._observed() if self.observers else self._hand_on()
        lines += ["        " + line for line in body]
        return "\n".join(lines)

    def _hand_on(self) -> list[str]:
        """Call the chain and return what it gives, as this kind of function does."""
        if self.kind is FunctionKind.ASYNC_GENERATOR:
            return [*self._delegate_async(), "return"]
        return [f"return ({self._result()})"]

    def _result(self) -> str:
        call = f"{self.local('head')}({self.signature.call})"
        if self.kind is FunctionKind.COROUTINE:
            return f"await {call}"
        if self.kind is FunctionKind.GENERATOR:
            return f"yield from {call}"
        return call

    def _observed(self) -> list[str]:
        local = self.local
        indices = range(self.observers)
        result, error, args, kwargs = local("result"), local("error"), local("args"), local("kwargs")
        pairs = ", ".join(
            f"{local(f'enter{i}')}, {local(f'exit{i}')}, {local(f'failed{i}')}" for i in indices
        )
        lines = [
            f"{pairs} = {local(f'pairs{self.observers}')}",
            f"{args} = ({self.signature.positional})",
            f"{kwargs} = {{{self.signature.keywords}}}",
        ]
        for i in indices:
            lines += [
                f"try: {local(f'token{i}')} = {local(f'enter{i}')}({args}, {kwargs})",
                f"except Exception as {error}: {local(f'token{i}')} = {local(f'failed{i}')}({error})",
            ]
        body = [f"{result} = ({self._result()})"]
        if self.kind is FunctionKind.ASYNC_GENERATOR:
            body = [*self._delegate_async(), f"{result} = None"]
        lines += ["try:", *_indent(body)]
        lines += [f"except BaseException as {error}:", *_indent(self._exits("None", error)), "    raise"]
        lines += [*self._exits(result, "None")]
        if self.kind is not FunctionKind.ASYNC_GENERATOR:
            lines.append(f"return {result}")
        return lines

    def _exits(self, result: str, error: str) -> list[str]:
        local = self.local
        lines = []
        for i in reversed(range(self.observers)):
            # `failed` answers itself as the token of an enter() that raised: its exit() is not called.
            lines += [
                f"if {local(f'token{i}')} is not {local(f'failed{i}')}:",
                f"    try: {local(f'exit{i}')}({local(f'token{i}')}, {result}, {error})",
                f"    except Exception as {local('broken')}: {local(f'failed{i}')}({local('broken')})",
            ]
        return lines

    def _delegate_async(self) -> list[str]:
        """``yield from`` for an async generator: asend, athrow and aclose reach the inner one."""
        local = self.local
        inner, item, sent, thrown = local("inner"), local("item"), local("sent"), local("thrown")
        return [
            f"{inner} = {local('head')}({self.signature.call})",
            "try:",
            f"    {item} = await {inner}.__anext__()",
            "    while True:",
            "        try:",
            f"            {sent} = yield {item}",
            "        except GeneratorExit:",
            f"            await {inner}.aclose()",
            "            raise",
            f"        except BaseException as {thrown}:",
            f"            {item} = await {inner}.athrow({thrown})",
            "        else:",
            f"            {item} = await {inner}.asend({sent})",
            "except StopAsyncIteration:",
            "    pass",
        ]


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


class WovenFunction:
    """A generated function and the cells that steer it."""

    def __init__(self, original: types.FunctionType) -> None:
        self.kind = FunctionKind.of(original)
        self.signature = Signature.of(original)
        self.steered = False
        self._code: tuple[Signature, int, bool] | None = None
        self._cells = {name: types.CellType() for name in CELLS}
        self._cells["calls"].cell_contents = 0
        self.function = self._make(original)

    @property
    def calls(self) -> int:
        count: int = self._cells["calls"].cell_contents
        return count

    def steer(
        self,
        head: Any,
        observers: tuple[Any, ...],
        *,
        signature: Signature | None = None,
        compiling: Any = None,
    ) -> None:
        """Swap the hooks: from the next call on, ``head`` and ``observers`` are what runs.

        :param observers: (enter, exit, failed) triples, outermost first; ``failed(error)`` returns itself.
        :param signature: the parameters to accept, where a REPLACE hook changed them.
        :param compiling: torch's ``is_compiling``, once torch.compile is loaded in this process.
        """
        if compiling is not None:
            self._cells["compiling"].cell_contents = compiling
        count = len(observers)
        if count:
            flat = tuple(part for triple in observers for part in triple)
            self._cells[FLAT[count - 1]].cell_contents = flat
        self._cells["head"].cell_contents = head
        self.steered = True
        wanted = (signature or self.signature, count, compiling is not None)
        if wanted != self._code:
            self.function.__code__ = self._named(variant(self.kind, *wanted))
            self._code = wanted

    def _make(self, original: types.FunctionType) -> types.FunctionType:
        self._original_code = original.__code__
        code = self._named(variant(self.kind, self.signature, 0, False))
        # Free variables are our cell names with a prefix, sorted by the compiler.
        closure = tuple(self._cells[name.lstrip("_")] for name in code.co_freevars)
        function = types.FunctionType(
            code, original.__globals__, original.__name__, original.__defaults__, closure
        )
        function.__kwdefaults__ = dict(original.__kwdefaults__) if original.__kwdefaults__ else None
        function.__qualname__ = original.__qualname__
        function.__module__ = original.__module__
        function.__doc__ = original.__doc__
        function.__annotations__ = original.__annotations__
        if hasattr(original, "__type_params__"):  # Python 3.12
            function.__type_params__ = original.__type_params__  # type: ignore[attr-defined]
        function.__dict__.update(original.__dict__)
        function.__dict__["__wrapped__"] = original
        self._code = (self.signature, 0, False)
        return function

    def _named(self, code: types.CodeType) -> types.CodeType:
        """``code`` under the target's own name, so that profiles and tracebacks read as before."""
        names: dict[str, Any] = {"co_name": self._original_code.co_name}
        if hasattr(code, "co_qualname"):
            names["co_qualname"] = self._original_code.co_qualname  # type: ignore[attr-defined]
        return code.replace(**names)
