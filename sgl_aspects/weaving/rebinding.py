"""Rebinding: replaces objects in all of their referrers, in one pass for all pairs.

`from X import f`, registries, default arguments, closures, partials, class attributes and bound methods on
instances keep the object that X had when they were created. There are three steps, each only for objects
that the previous one left over, because each costs about ten times more:

1. count: an object with no references but those of its attribute and the weaver needs no search;
2. module dictionaries, searched by id;
3. everything that the garbage collector tracks.

Referrers that cannot be changed (tuples, C objects) are returned as :class:`Stale`.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sgl_aspects.weaving.attributes import (
    MISSING,
    Attributes,
    OwnDict,
    class_module,
    class_name,
    derives,
    filled_slots,
    holds,
    inherited,
    is_a,
    is_class,
    is_module,
    namespace,
)
from sgl_aspects.weaving.chain import is_of_caller
from sgl_aspects.weaving.descriptors import C_DESCRIPTORS, descriptor_anew
from sgl_aspects.weaving.functions import are_constants
from sgl_aspects.weaving.hooks import Result
from sgl_aspects.weaving.referrers import Exclusions, referrers, unfrozen
from sgl_aspects.weaving.templates import SUSPENDS

# -- kinds of referrers -------------------------------------------------------------------------------------

New = Callable[..., Any]

_FACTORY: Any = vars(collections.defaultdict)["default_factory"]


def _replace_in_mutable(referrer: Any, new: New) -> bool:
    """Change ``referrer`` in place; False if some of its references cannot be changed."""
    if is_a(referrer, (list, collections.deque)):
        kind: Any = list if is_a(referrer, list) else collections.deque
        for index, value in enumerate(list(kind.__iter__(referrer))):
            if new(value) is not value:
                kind.__setitem__(referrer, index, new(value))
    elif is_a(referrer, set):
        for value in [value for value in set.__iter__(referrer) if new(value) is not value]:
            # In one step of C: another thread may be iterating over the set, and its size must not change.
            # Out and then in: a proxy is equal to the object that it wraps.
            list(map(set.symmetric_difference_update, (referrer, referrer), ({value}, {new(value)})))
    elif is_a(referrer, dict):
        kept = "__wrapped__" if type(referrer) is Attributes else MISSING
        for key, value in list(dict.items(referrer)):
            if new(value) is not value and key is not kept:
                dict.__setitem__(referrer, key, new(value))
        _replace_keys(referrer, new)
        if is_a(referrer, collections.defaultdict):
            _FACTORY.__set__(referrer, new(_FACTORY.__get__(referrer)))
    elif is_a(referrer, types.CellType):
        if not _is_class_cell(referrer):
            referrer.cell_contents = new(referrer.cell_contents)
    elif is_a(referrer, functools.partial):
        _replace_in_partial(referrer, new)
    else:
        _replace_attributes(referrer, new)
        return all(new(value) is value for value in gc.get_referents(referrer))
    # A subclass of a container may have attributes of its own.
    _replace_attributes(referrer, new)
    return True


def _replace_keys(referrer: dict[Any, Any], new: New) -> None:
    """Change the keys of a dictionary, each in its place in the order.

    Not classes, since instances that were made before look up theirs, and not those of an OrderedDict.
    """
    keys = [key for key in dict.keys(referrer) if type(key) is not str]
    changed = [key for key in keys if not is_class(key) and new(key) is not key and not holds(keys, new(key))]
    if not changed or is_a(referrer, collections.OrderedDict):
        return
    keys_anew, anew = OwnDict(zip(changed, map(new, changed))), OwnDict()
    entries = zip(map(keys_anew.get, dict.keys(referrer), dict.keys(referrer)), dict.values(referrer))
    steps = ((dict.update, anew, entries), (dict.clear, referrer), (dict.update, referrer, anew))
    # In one step of C: another thread may be looking up an entry, or iterating.
    list(map(functools.partial.__call__, itertools.starmap(functools.partial, steps)))


def _replace_in_class(cls: type, new: New) -> None:
    """Change the attributes of a class."""
    # Through setattr: writing to the raw dictionary would not invalidate CPython's method cache.
    for name, value in namespace(cls).items():
        if new(value) is not value:
            type.__setattr__(cls, name, new(value))


def _classes_in_c(names: dict[Any, Any]) -> list[type]:
    """Return the class with these attributes, if it is a static one of C, which is not tracked."""
    homes = [value.__objclass__ for value in list(dict.values(names)) if is_a(value, C_DESCRIPTORS)]
    return [cls for cls in homes if holds(gc.get_referents(vars(type)["__dict__"].__get__(cls)), names)][:1]


def _replace_tuple(referrer: tuple[Any, ...], owners: list[Any], new: New) -> int:
    """Change functions and partials that own the tuple; returns how many were changed or need no change."""
    for owner in owners:
        if is_a(owner, functools.partial):
            _replace_in_partial(owner, new)
        elif is_a(owner, types.FunctionType) and owner.__defaults__ is referrer:
            owner.__defaults__ = tuple(new(value) for value in referrer)
        elif is_a(owner, types.FunctionType):  # names and annotations: from now on a dictionary
            _replace_in_mutable(owner.__annotations__, new)
    # The tuples of a class are its bases and the order in which it looks them up.
    return sum(is_a(owner, (functools.partial, types.FunctionType, type)) for owner in owners)


def _replace_in_partial(referrer: functools.partial[Any], new: New) -> None:
    state: list[Any] = list(functools.partial.__reduce__(referrer)[2])
    state[0] = new(state[0])
    state[1] = tuple(new(value) for value in state[1])
    functools.partial.__setstate__(referrer, tuple(state))  # type: ignore[attr-defined]


def _replace_attributes(referrer: Any, new: New) -> None:
    """Change the attributes and slots of an instance.

    :raises _HashDependsError: its hash would change; nothing has changed.
    """
    before = _own_hash(referrer)
    changed = _exchange(referrer, new)
    if before is not None and changed and _own_hash(referrer) != before:
        _exchange(referrer, lambda value: changed.get(id(value), value))
        raise _HashDependsError


def _exchange(instance: Any, new: New) -> dict[int, Any]:
    """Change the attributes and slots of an instance; returns the old values by the ids of the new ones."""
    changed, attributes = OwnDict(), namespace(instance)
    for name, value in list(dict.items(attributes)):
        if new(value) is not value:
            dict.__setitem__(attributes, name, new(value))
            changed[id(new(value))] = value
    for slot, value in filled_slots(instance):
        if new(value) is not value:
            slot.__set__(instance, new(value))
            changed[id(new(value))] = value
    return changed


class _HashDependsError(Exception):
    """Raised where a change would lose an object in the containers that hold it."""


def _own_hash(instance: Any) -> int | None:
    """Return the hash of an instance of a class that defines one; None for others, and if it has none."""
    is_builtin = class_module(type(instance)) == "builtins"
    if is_builtin or inherited(instance, "__hash__") in (None, object.__hash__):
        return None
    try:
        return hash(instance)
    except Exception:  # noqa: BLE001  a user's __hash__ may raise anything
        return None


def _is_class_cell(cell: types.CellType) -> bool:
    """Return whether it is the ``__class__`` cell of `super()`, which always refers to the defining class."""
    if not is_class(cell.cell_contents):
        return False
    closures = [one for one in gc.get_referrers(cell) if is_a(one, tuple)]
    functions = [one for one in gc.get_referrers(*closures) if is_a(one, types.FunctionType)]
    closed = (dict(zip(one.__code__.co_freevars, one.__closure__ or ())) for one in functions)
    return any(cells.get("__class__") is cell for cells in closed)


# -- one pass for all pairs ----------------------------------------------------------------------------------


class Stale(NamedTuple):
    """A referrer that still holds the old object.

    :param target: the name of that object.
    :param holder: a description of the referrer.
    """

    target: str
    holder: str


class Pair(NamedTuple):
    """An object ``old`` to replace by ``new`` in its referrers.

    :param extra: the number of unaccounted references to ``old``; negative if unknown.
    :param exclude: referrers that keep ``old``.
    :param only_bound_to: a class or an instance that inherits ``old``, which its base keeps: only methods
        bound to it, or to its instances, are changed.
    """

    old: Any
    new: Any
    extra: int = -1
    exclude: Exclusions = frozenset()
    only_bound_to: Any = None


def rebind(pairs: Iterable[Pair], remade: Callable[[Any, Any], None]) -> list[Stale]:
    """Replace ``old`` by ``new`` in every referrer; returns the referrers that could not be changed.

    :param remade: called with each method or descriptor around an old object, and the one that replaces it.
    """
    every = list(pairs)
    sought = [pair for pair in every if pair.extra]
    wanted = {id(pair.old): pair for pair in sought if pair.only_bound_to is None}
    found = _rebind_modules(wanted) if wanted else {}
    left = [pair for pair in sought if not 0 <= pair.extra <= found.get(id(pair.old), 0)]
    stale = []
    if left:
        with unfrozen():
            stale = _Collected(left, remade).rebind()
    functions = [one.old for one in every if is_a(one.old, types.FunctionType) and one.only_bound_to is None]
    weak = "a weak reference, as in a WeakSet"
    return [*stale, *(Stale(describe(old), weak) for old in functions if weakref.getweakrefcount(old))]


def _rebind_modules(wanted: dict[int, Pair]) -> dict[int, int]:
    found: dict[int, int] = {}
    for module in list(sys.modules.values()):
        if is_class(module):
            continue  # step three changes classes
        names = namespace(module)
        # A copy: another thread may be importing into this module. The next line runs entirely in C.
        held = dict.copy(names)
        here = list(itertools.compress(held, map(wanted.__contains__, map(id, held.values()))))
        if here and _is_ours(names):
            continue
        for name in here:
            pair = wanted[id(held[name])]
            is_kept = id(names) in pair.exclude or (id(names), name) in pair.exclude
            if not is_kept and names.get(name) is pair.old:
                names[name] = pair.new
                found[id(pair.old)] = found.get(id(pair.old), 0) + 1
    return found


class _Collected:
    """Step three: referrers found through the garbage collector."""

    def __init__(self, pairs: Iterable[Pair], remade: Callable[[Any, Any], None]) -> None:
        self._remade = remade
        self.pairs: dict[int, list[Pair]] = {}
        # First those of subclasses and instances: the others concern every method.
        for pair in sorted(pairs, key=lambda pair: pair.only_bound_to is None):
            self.pairs.setdefault(id(pair.old), []).append(pair)
        self._referrer = 0  # the id of the one that is changed: it may be excluded from some pairs
        self.stale: list[Stale] = []

    def rebind(self) -> list[Stale]:
        """Rebind the referrers of old objects, then those of rebuilt methods and descriptors."""
        anew = self._round()  # a separate call: its lists would be referrers
        for pair in anew:
            self._remade(pair.old, pair.new)
        return [*self.stale, *(rebind(anew, self._remade) if anew else ())]

    def _round(self) -> list[Pair]:
        olds = [pairs[0].old for pairs in self.pairs.values()]
        found = [one for one in referrers(olds) if not _is_of_module(one) and not _is_ours(one)]
        owners = self._owners([one for one in found if type(one) is dict or is_a(one, tuple)], found)
        anew: list[Pair] = []
        dependent: list[Any] = []
        kept: Exclusions = frozenset().union(*(one.exclude for pairs in self.pairs.values() for one in pairs))
        for referrer in found:
            self._referrer = id(referrer)
            owned_by = owners.get(id(referrer), [])
            if is_a(referrer, types.MethodType):
                anew += self._bound_anew(referrer, kept)
            elif is_a(referrer, (staticmethod, classmethod, property)):
                remade = descriptor_anew(referrer, self._new)
                anew += [Pair(referrer, remade, exclude=kept)] if remade is not referrer else []
            elif is_a(referrer, types.FrameType):
                if referrer.f_code.co_flags & SUSPENDS:  # Python 3.10, instead of the generator
                    self._report(gc.get_referents(referrer), f"a generator ({referrer.f_code.co_name})")
            elif not is_a(referrer, C_DESCRIPTORS):  # they refer to their own class
                try:
                    self._replace_in(referrer, owned_by)
                except _HashDependsError:
                    dependent += [one for one in (referrer, *owned_by) if _own_hash(one) is not None]
                except Exception as error:  # noqa: BLE001  a user's __hash__ or descriptor may raise anything
                    held = [*gc.get_referents(referrer), *namespace(referrer).values()]
                    self._report(held, f"{_described(referrer)}: {error!r}")
        holders = referrers(dependent) if dependent else []
        for instance in dependent:
            self._referrer = id(instance)
            self._replace_in_hashed(instance, holders)
        return anew

    def _replace_in_hashed(self, instance: Any, holders: list[Any]) -> None:
        """Change an instance whose hash depends on an old object, unless one of ``holders`` uses its hash."""
        for holder in holders:
            keys = dict.keys(holder) if is_a(holder, dict) else holder
            if is_a(holder, (dict, set, frozenset, tuple)) and holds(keys, instance):
                held = [*gc.get_referents(instance), *namespace(instance).values()]
                where = f"{_described(instance)}, whose hash depends on it, in {_described(holder)}"
                self._report(held, where)
                return
        _exchange(instance, self._new)

    def _replace_in(self, referrer: Any, owners: list[Any]) -> None:
        if is_a(referrer, dict):
            classes = [*filter(is_class, owners)] or _classes_in_c(referrer)
            for cls in classes:
                self._referrer = id(cls)
                _replace_in_class(cls, self._new)
            if classes:
                return
            for owner in owners:
                if namespace(owner) is referrer and _own_hash(owner) is not None:
                    _replace_attributes(owner, self._new)
                    return
                is_own = is_a(owner, types.FunctionType) and owner.__kwdefaults__ is referrer
                if is_own and self._new(owner) is not owner:
                    return  # a function gets itself, to change its own code, as networkx's decorators do
        if is_a(referrer, tuple) and any(self._new(value) is not value for value in tuple.__iter__(referrer)):
            _replace_attributes(referrer, self._new)
            accounted = _replace_tuple(referrer, owners, self._new)
            if accounted < len(owners) or not owners:
                self._report(referrer, _described(referrer) + _where(owners))
        # A class refers to its bases; the dictionary of its attributes is another referrer.
        elif not is_class(referrer) and not _replace_in_mutable(referrer, self._new):
            is_instance = self._new(type(referrer)) is not type(referrer)
            holder = "instances that were made before" if is_instance else _described(referrer)
            self._report(gc.get_referents(referrer), holder)
        if is_a(referrer, dict):
            self._report(list(dict.keys(referrer)), f"a key of a dictionary of {len(referrer)} entries")

    def _bound_anew(self, method: types.MethodType, kept: Exclusions) -> list[Pair]:
        """Pair a bound method, which is immutable, with one of the new function bound to the same object."""
        function, subject = self._new(method.__func__, method.__self__), method.__self__
        if function is not method.__func__:
            return [Pair(method, types.MethodType(function, subject), exclude=kept)]
        self._report([subject], f"the bound method {describe(method.__func__).partition(':')[2]}")
        return []

    # -- old objects ------------------------------------------------------------------------------------

    def _new(self, value: Any, bound_to: Any = None) -> Any:
        """Return the replacement of ``value``; ``value`` itself if it is not an old object."""
        for pair in self.pairs.get(id(value), ()):
            if self._referrer not in pair.exclude and _concerns(pair.only_bound_to, bound_to):
                return self._new(pair.new, bound_to)  # the new object may be old in another pair
        return value

    def _owners(self, held: list[Any], found: list[Any]) -> dict[int, list[Any]]:
        """Return the owners of each of ``held``: classes of dictionaries, functions of defaults."""
        known = {id(referrer) for referrer in held}
        owners: dict[int, list[Any]] = {}
        for owner in referrers(held) if held else ():
            if owner is found or is_a(owner, (types.FrameType, types.ModuleType)) or _is_ours(owner):
                continue
            for referent in gc.get_referents(owner):
                if id(referent) in known:
                    owners.setdefault(id(referent), []).append(owner)
        return owners

    # -- stale referrers --------------------------------------------------------------------------------

    def _report(self, values: Iterable[Any], holder: str) -> None:
        """Report ``holder`` for those of ``values`` that are old objects."""
        for value in values:
            if self._new(value) is not value and Stale(describe(value), holder) not in self.stale:
                self.stale.append(Stale(describe(value), holder))


def _is_ours(referrer: Any) -> bool:
    """Return whether the referrer belongs to the weaver, which holds originals on purpose."""
    if is_of_caller(referrer) or (type(referrer) is tuple and are_constants(referrer)):
        return True
    home = dict.get(referrer, "__name__") if type(referrer) is dict else class_module(type(referrer))
    is_own = isinstance(home, str) and home.startswith("sgl_aspects.weaving")
    return is_own and type(referrer) not in (Attributes, Result)


def _is_of_module(referrer: Any) -> bool:
    """Return whether it is of a module: its namespace, or the state of one in C.

    On Python 3.12 asking `_asyncio` what it refers to spoils its free list.
    """
    name = dict.get(referrer, "__name__") if type(referrer) is dict else None
    module = sys.modules.get(name) if isinstance(name, str) else None
    return is_module(referrer) or (module is not None and namespace(module) is referrer)


def _concerns(only: Any, bound_to: Any) -> bool:
    if only is None:
        return True
    if not is_class(only):
        return bound_to is only
    return derives(bound_to if is_class(bound_to) else type(bound_to), only)


def describe(obj: Any) -> str:
    """Return the qualified name of a function or class, with its module."""
    if is_a(obj, (classmethod, staticmethod, types.MethodType)):
        return describe(obj.__func__)
    if is_a(obj, property):
        return describe(obj.fget)
    if is_a(obj, C_DESCRIPTORS):
        return f"{class_name(obj.__objclass__)}.{obj.__name__}"
    if is_a(obj, (types.FunctionType, types.BuiltinFunctionType, type)):
        return class_name(obj) if is_class(obj) else f"{obj.__module__}:{obj.__qualname__}"
    # From the dictionary, without getattr(), which may run foreign code.
    names, kind = namespace(obj), type(obj)
    module, _, name = class_name(kind).partition(":")
    return f"{names.get('__module__', module)}:{names.get('__qualname__', name)}"


def _described(referrer: Any) -> str:
    if is_a(referrer, (tuple, frozenset, set, dict)):
        return f"a {type(referrer).__name__} of {len(referrer)}"
    named = namespace(referrer).get("__qualname__")
    return f"a {class_name(type(referrer)).replace(':', '.')}" + (f" ({named})" if named else "")


def _where(owners: list[Any]) -> str:
    """Describe the owner of a tuple, if it has a name."""
    if not owners:
        return ""
    if is_a(owners[0], dict):
        return f" in module {owners[0]['__name__']}" if _is_of_module(owners[0]) else " in a dict"
    return f" in {_described(owners[0])}"
