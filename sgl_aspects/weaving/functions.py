"""Woven functions: the Python function that replaces a target, and how its hooks are set.

A woven function is ``def f(*args, **kwargs)`` of the target's kind (plain, coroutine, generator, async
generator) with the target's signature, name, file and line. It keeps its identity while hooks come and go:
only its ``__code__`` changes, so every binding to it stays valid. It is a plain function and not a proxy,
because `torch.compile` traces through a function and silently bypasses a proxy.

The hooks are constants of the code, so one assignment swaps all of them: a call in progress keeps the hooks
with which it began, the next one gets the new ones, and no call takes a lock. The code has the names and free
variables of the target's own, so that `inspect.getclosurevars` and debuggers show the target.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import gc
import inspect
import sys
import types
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

from sgl_aspects.weaving.attributes import Attributes, OwnDict, claims_to_be, holds, is_a
from sgl_aspects.weaving.hooks import CHAINS_NAME, CompiledChain, NativeLink, calls_original

Observers = tuple[tuple[Any, Any, Any], ...]
"""(enter, exit, failed) for each observer, outermost first; enter or exit may be None.

``failed(error)`` handles their exceptions, and returns itself.
"""

SUSPENDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class FunctionKind(enum.Enum):
    """The kind of a function, by the result of a call; the woven function is of the same kind."""

    PLAIN = "plain"
    COROUTINE = "coroutine"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"

    @classmethod
    def of(cls, function: Any) -> FunctionKind:
        """Return the kind of a function, a partial or method around one, or an instance's ``__call__``."""
        if claims_to_be(function, (functools.partial, types.MethodType)):
            return cls.of(function.func if claims_to_be(function, functools.partial) else function.__func__)
        code: Any = function.__code__ if claims_to_be(function, types.FunctionType) else None
        if is_a(code, types.CodeType):
            kind = _kind_of_code(code)
        else:  # a mock object's is none
            call = inspect.getattr_static(type(function), "__call__", None)
            kind = cls.of(call) if claims_to_be(call, types.FunctionType) else cls.PLAIN
        with contextlib.suppress(Exception):  # an object may answer in any way
            if kind is cls.PLAIN and inspect.iscoroutinefunction(function):
                return cls.COROUTINE
        return kind


def _kind_of_code(code: types.CodeType) -> FunctionKind:
    flags = code.co_flags
    if flags & inspect.CO_COROUTINE:
        return FunctionKind.COROUTINE
    if flags & inspect.CO_ASYNC_GENERATOR:
        return FunctionKind.ASYNC_GENERATOR
    return FunctionKind.GENERATOR if flags & inspect.CO_GENERATOR else FunctionKind.PLAIN


class Shape(NamedTuple):
    """The properties that distinguish the templates of woven functions.

    :param observers: for each observer: whether it has enter(), and whether it has exit().
    :param guarded: torch.compile may trace this function: it counts and observes only outside of that.
    :param packed: the chain takes the pair (args, kwargs), as native hooks do.
    :param free: the number of the target's free variables.
    :param body: the number of lines from the target's first line to its first statement.
    """

    kind: FunctionKind
    observers: tuple[tuple[bool, bool], ...] = ()
    guarded: bool = False
    packed: bool = False
    free: int = 0
    body: int = 0


class WovenFunction:
    """The function that replaces a target, and its hooks.

    :param original: the function whose name, documentation and attributes it copies.
    :param anonymous: ``original`` is a callable of another type; the function runs behind a proxy.
    :ivar code: its code. Others may give it a copy, which needs the chain that lives as long as this.
    :ivar function: the replacement of the target.
    """

    __slots__ = (
        *("_body", "_calls", "_compiled", "_in_c", "_iterable", "_model", "_run", "_signature", "_taken"),
        *("applied", "code", "function", "kind"),
    )

    code: types.CodeType

    def __init__(self, original: Any, *, anonymous: bool = False) -> None:
        self.kind = FunctionKind.of(original)
        self.applied = False
        self._calls = _Calls()
        self._in_c: Any = None
        self._signature: _Signature | None = None
        self._taken: dict[str, Any] = OwnDict()
        self._compiled: CompiledChain | None = None
        code = _call_hooks.__code__ if anonymous else original.__code__
        self._model = code
        self._iterable = code.co_flags & inspect.CO_ITERABLE_COROUTINE
        self._body = 0 if anonymous else _first_line(code) - code.co_firstlineno
        # torch.compile finds them as those of a module.
        namespace = globals() if anonymous else original.__globals__
        closure = () if anonymous else original.__closure__
        if self.kind is not _kind_of_code(code):  # a function cannot change its kind later
            code = self._code(Shape(self.kind), {})
        # Not callable until set_hooks() assigns its code.
        self._run = types.FunctionType(code, namespace, code.co_name, None, closure)
        self.function: Any = self._run
        if not anonymous:
            self._run.__dict__ = Attributes()
            self._signature = _Signature.of(self._run)
            self.take_attributes(original)

    @property
    def calls(self) -> int:
        return int(getattr(self._calls, _COUNT)) + (0 if self._in_c is None else self._in_c.calls)

    @property
    def patch(self) -> types.CodeType | None:
        """The code that others have assigned to the function, which runs without hooks; None if none have."""
        code = self._run.__code__
        return None if not self.applied or holds(code.co_consts, self._calls) else code

    def _assign(self, code: types.CodeType) -> None:
        """Make ``code`` the function's, and that of functions that others have made with its code.

        Code that others have assigned to the function, which calls those, is left in place.
        """
        if self.patch is None:
            self._run.__code__ = code
        else:
            for copy in _copies(self.code):
                copy.__code__ = code
        self.code = code

    def set_hooks(self, head: Any, observers: Observers, compiling: Any = None, caller: Any = None) -> None:
        """Swap the hooks: from the next call on, ``head`` and ``observers`` run.

        :param compiling: torch's ``is_compiling``, once torch.compile is loaded in this process.
        :param caller: for a single observer: called with the function, ``head`` and the observer's parts, it
            makes the function's vectorcall run them without Python code, as long as its result is the last
            of the code's constants.
        """
        if compiling is not None:
            self._compiled = self._compiled or CompiledChain(self._run.__globals__)
        packed = isinstance(head, NativeLink)
        hooks = {"chain": _hashable(head.run if packed else head)}
        for index, triple in enumerate(observers):
            hooks |= zip((f"enter{index}", f"exit{index}", f"failed{index}"), triple)
        parts = tuple((enter is not None, leave is not None) for enter, leave, _ in observers)
        code = self._code(Shape(self.kind, parts, compiling is not None, packed), hooks)
        before, self._in_c = self._in_c, None
        if caller is not None and self.kind is FunctionKind.PLAIN and not packed:
            self._in_c = caller(self._run, head, *observers[0])
            code = code.replace(co_consts=(*code.co_consts, self._in_c))
        if self._compiled is not None and compiling is not None:
            self._compiled.set(head, compiling, code)
        self._assign(code)
        if before is not None:
            counted = float(before.calls)
            setattr(
                self._calls, _COUNT, getattr(self._calls, _COUNT) + counted
            )  # in place, like the function itself: other threads may be counting
        self.applied = True

    def release(self, head: Any) -> None:
        """Remove all hooks: remaining references to the function call ``head``."""
        self.set_hooks(head, ())
        original = self._run.__dict__.get("__wrapped__")
        if type(original) is types.FunctionType and weakref.getweakrefcount(self._run):
            # Weak references live as long as the original.
            kept = [*original.__dict__.get(_KEPT, ()), self._run]
            original.__dict__[_KEPT] = [one for one in kept if weakref.getweakrefcount(one)]
        if self._compiled is not None and self.kind is FunctionKind.PLAIN:
            self._compiled.remove()
        self._compiled = None

    def take_attributes(self, original: types.FunctionType) -> None:
        """Copy the attributes of ``original`` to the woven function."""
        self._taken = OwnDict({name: getattr(original, name) for name in _ATTRIBUTES})
        for name, value in self._taken.items():
            setattr(self.function, name, value)
        _copy_attributes(original, self.function)
        self.function.__dict__["__wrapped__"] = original
        # Unless the original has them: `inspect` then follows those.
        if {"__wrapped__", "__signature__"}.isdisjoint(original.__dict__):
            self.function.__dict__["__signature__"] = self._signature

    def give_attributes(self, original: types.FunctionType) -> None:
        """Copy the attributes that were set on the woven function back to ``original``."""
        if self.function.__dict__.get("__signature__") is self._signature:
            self.function.__dict__.pop("__signature__", None)
        for name, value in self._taken.items():
            if getattr(self.function, name) is not value:
                setattr(original, name, getattr(self.function, name))
        _copy_attributes(self.function, original)
        if self.patch is not None:
            for copy in _copies(self.code):
                copy.__code__ = original.__code__
            original.__code__, self._run.__code__ = self.patch, self.code

    def _code(self, shape: Shape, hooks: dict[str, Any]) -> types.CodeType:
        """Return the code of ``shape`` with these hooks, and the model's names and lines."""
        model = self._model
        shape = shape._replace(free=len(model.co_freevars), body=self._body)
        code = template(shape)
        values = {f"<{name}>": hook for name, hook in hooks.items()}
        values["<calls>"] = self._calls
        names = tuple(_COUNT if name == "number" else name for name in code.co_names)
        if shape.guarded and self._compiled is not None:
            names = tuple(self._compiled.name if name == "_chain" else name for name in names)
        changes: dict[str, Any] = {
            "co_name": model.co_name,
            "co_filename": model.co_filename,
            "co_firstlineno": model.co_firstlineno,
            "co_names": (*names, *(name for name in model.co_names if name not in names)),
            "co_freevars": model.co_freevars,
            "co_varnames": _apart_from(model.co_freevars, code.co_varnames),
            "co_consts": tuple(
                values.get(const, const) if type(const) is str else const for const in code.co_consts
            ),
            # `await` accepts a generator only with the flag that types.coroutine sets.
            "co_flags": code.co_flags | self._iterable,
        }
        if sys.version_info >= (3, 11):
            changes["co_qualname"] = model.co_qualname
        return code.replace(**changes)


class _Signature(inspect.Signature):
    """The signature of a woven function, read from its original on first access."""

    __slots__ = ("_function",)

    _function: Any

    @classmethod
    def of(cls, function: types.FunctionType) -> _Signature:
        """Create it without the constructor, which `replace` and pickling call."""
        signature = cls.__new__(cls)
        signature._function = function
        return signature

    def __getattr__(self, name: str) -> Any:
        if name not in inspect.Signature.__slots__:
            raise AttributeError(name)
        read = inspect.signature(self._function.__wrapped__)
        for slot in inspect.Signature.__slots__:
            setattr(self, slot, getattr(read, slot))
        return getattr(self, name)


_COUNT = "None"
"""The attribute with the number of calls: `inspect.getclosurevars` ignores this name."""


class _Calls:
    """The number of calls: a float, because adding to it costs less than to an int; exact up to 2 ** 53."""

    __slots__ = (_COUNT,)

    def __init__(self) -> None:
        setattr(self, _COUNT, 0.0)


def _hashable(constant: Any) -> Any:
    """Return ``constant``, or a partial that calls it: debuggers hash the code of functions."""
    try:
        hash(constant)
    except Exception:  # noqa: BLE001  a user's __hash__ may raise anything
        return calls_original(functools.partial(constant))
    return constant


def _call_hooks(*args: Any, **kwargs: Any) -> Any:
    """The function behind a proxy, as tracebacks show it."""


def _copies(code: types.CodeType) -> list[types.FunctionType]:
    return [one for one in gc.get_referrers(code) if type(one) is types.FunctionType]


def _first_line(code: types.CodeType) -> int:
    """Return the line of the first statement."""
    begin = code.co_firstlineno
    lines = (line for _, _, line in code.co_lines() if line is not None and line > begin)
    return next(lines, begin)


def _apart_from(taken: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    while not set(names).isdisjoint(taken):
        names = tuple(f"_{name}" for name in names)
    return names


# Without parameters of their names, the defaults fill in nothing; tools and rebinding look at them.
_ATTRIBUTES = (
    *("__name__", "__qualname__", "__module__", "__doc__"),
    *("__defaults__", "__kwdefaults__", "__annotations__"),
    *(("__type_params__",) if sys.version_info >= (3, 12) else ()),
)


_KEPT = "__sgl_aspects_released__"
_OWN = {"__wrapped__", _KEPT}


def _copy_attributes(source: types.FunctionType, target: types.FunctionType) -> None:
    for name in target.__dict__.keys() - source.__dict__.keys() - _OWN:
        del target.__dict__[name]
    for name, value in list(source.__dict__.items()):
        if name not in _OWN:
            target.__dict__[name] = value


# -- templates ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def template(shape: Shape) -> types.CodeType:
    """Return the code of a woven function, with a string such as "<chain>" for each constant.

    Its first statement is on the line of the target's first statement and the rest on the target's first
    line: a breakpoint on the function stops in the target's body, and a traceback shows its definition.
    """
    tree = ast.parse("\n".join(_source(shape)))
    factory: Any = tree.body[0]
    woven = factory.body[0]
    for node in ast.walk(factory):
        _put(node, 1)
    for node in ast.walk(woven.body[0]):
        _put(node, 1 + shape.body)
    names: dict[str, Any] = {}
    exec(compile(tree, "<sgl_aspects>", "exec", dont_inherit=True, optimize=0), names)
    code: types.CodeType = names["factory"](*range(shape.free)).__code__
    return code.replace(
        co_consts=tuple(
            _CONSTANTS.get(const, const) if type(const) is str else const for const in code.co_consts
        )
    )


def _put(node: ast.AST, line: int) -> None:
    """Move ``node`` to ``line``, without a column: the source there is the target's own."""
    if "lineno" in node._attributes:
        node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
        node.col_offset = node.end_col_offset = -1 if sys.version_info >= (3, 11) else 0  # type: ignore[attr-defined]


def _source(shape: Shape) -> list[str]:
    free = "".join(f"free{index:04}, " for index in range(shape.free))
    definition = "async def" if shape.kind.value.startswith(("coroutine", "async")) else "def"
    body = ["if 1: calls = '<calls>'; calls.number += 1.0"]
    if shape.guarded:
        body = [
            f"if {CHAINS_NAME}.compiling():",
            *_indent(_delegate(shape, f"{CHAINS_NAME}._chain", packed=False)),
            *body,
        ]
    if free:
        body.append(f"if 0: {free}")  # never runs: makes the function close over them
    body.append("chain = '<chain>'")
    body += _observed(shape) if shape.observers else _delegate(shape, "chain", packed=shape.packed)
    woven = [f"{definition} woven(*args, **kwargs):", *_indent(body), "return woven"]
    return [f"def factory({free}):", *_indent(woven)]


def _result(shape: Shape, chain: str, packed: bool) -> str:
    """Return an expression that calls the chain, without keywords if empty: packing none takes time, too."""
    wait = {FunctionKind.COROUTINE: "await ", FunctionKind.GENERATOR: "yield from "}.get(shape.kind, "")
    if packed:
        return f"{wait}{chain}(args, kwargs)"
    return f"{wait}({chain}(*args, **kwargs) if kwargs else {chain}(*args))"


def _delegate(shape: Shape, chain: str, *, packed: bool) -> list[str]:
    """Return statements that call the chain and return its result, as this kind of function does."""
    result = _result(shape, chain, packed)
    if shape.kind is FunctionKind.ASYNC_GENERATOR:
        return [*_delegate_async(result), "return"]
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
        return lines + _delegate(shape, "chain", packed=shape.packed)
    result = _result(shape, "chain", shape.packed)
    body = [f"result = ({result})"]
    if shape.kind is FunctionKind.ASYNC_GENERATOR:
        body = [*_delegate_async(result), "result = None"]
    lines += ["try:", *_indent(body)]
    lines += [
        "except '<BaseException>' as error:",
        *_indent(_exits(shape, exits, "None", "error")),
        "    raise",
    ]
    lines += _exits(shape, exits, "result", "None")
    if shape.kind is not FunctionKind.ASYNC_GENERATOR:
        lines.append("return result")
    return lines


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
        # Assigned first: Python warns about a call of a string literal.
        "begin = '<_begin>'; following = '<_following>'; close = '<_close>'; throw = '<_throw>'",
        f"inner = begin({call})",
        "try:",
        "    item = await following(inner, None)",
        "    while True:",
        "        try:",
        "            sent = yield item",
        "        except '<GeneratorExit>':",
        "            await close(inner)",
        "            raise",
        "        except '<BaseException>' as thrown:",
        "            item = await throw(inner, thrown)",
        "        else:",
        "            item = await following(inner, sent)",
        "except '<StopAsyncIteration>':",
        "    pass",
    ]


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _begin(items: Any) -> Any:
    return type(items).__aiter__(items)


def _following(inner: Any, sent: Any) -> Any:
    return inner.__anext__() if sent is None else inner.asend(sent)


async def _close(inner: Any) -> None:
    if hasattr(inner, "aclose"):
        await inner.aclose()


def _throw(inner: Any, error: BaseException) -> Any:
    if hasattr(inner, "athrow"):
        return inner.athrow(error)
    raise error


# As constants: names would be looked up in the target's module, which may define the same ones.
_CONSTANTS: dict[str, Any] = {
    f"<{value.__name__}>": value
    for value in (
        *(BaseException, Exception, GeneratorExit, StopAsyncIteration),
        *(_begin, _following, _close, _throw),
    )
}
