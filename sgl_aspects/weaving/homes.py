"""Homes: the attribute that join points stand in, written and put back.

Most homes have one point. A property has up to three, for getting, setting and deleting: whichever of them
come and go, in any order, the property that stands there has the woven functions of those that are there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sgl_aspects.weaving.kinds import Rebuild
from sgl_aspects.weaving.places import MISSING, Place, current

logger = logging.getLogger("sgl_aspects")


class Home:
    """One attribute: its original, and what stands there as far as we know.

    :param rebuild: makes the attribute anew around woven callables, given by part (see :class:`Place`).
    """

    def __init__(self, place: Place, rebuild: Rebuild) -> None:
        self.original = place.raw
        self.standing = place.raw
        self._place = place
        self._rebuild = rebuild
        self._residents: dict[str, Any] = {}
        self._made: dict[frozenset[tuple[str, int]], Any] = {}

    @property
    def is_ours(self) -> bool:
        """Nobody else has written there."""
        vacant = self._place.inherited and not self._residents
        return current(self._place.owner, self._place.name) is (MISSING if vacant else self.standing)

    def with_resident(self, part: str, woven: Any) -> Any:
        """What stands there when ``woven`` is in."""
        return self._with({**self._residents, part: woven})

    def move_in(self, part: str, woven: Any) -> None:
        """Put ``woven`` there.

        :raises Exception: the attribute cannot be written; nothing has changed then.
        """
        self._stand({**self._residents, part: woven})

    def move_out(self, part: str) -> None:
        """Take away what was put there; the last one leaves the original behind."""
        self._stand({other: woven for other, woven in self._residents.items() if other != part})

    def follow(self, below: Any, rebuild: Rebuild) -> None:
        """Another original: what an inherited attribute comes from has changed."""
        self.original = below
        self._rebuild = rebuild
        self._made = {_key(self._residents): self.standing} if self._residents else {}
        if not self._residents:
            self.standing = below

    def own_containers(self) -> list[Any]:
        """Everything of ours that holds the original on purpose."""
        cells = _cells(self._rebuild)
        nested = [cell for outer in cells for cell in _cells(outer.cell_contents)]
        ours = [self, self.__dict__, self._residents, self._made, *self._made.values()]
        return [*ours, self.original, *cells, *nested]

    def _stand(self, residents: dict[str, Any]) -> None:
        owner, name = self._place.owner, self._place.name
        wanted = self._with(residents)
        if not self.is_ours:
            logger.info("%s: somebody else's patch stands there; it is left in place", self._place)
        elif self._place.inherited and not residents:
            delattr(owner, name)
        else:
            setattr(owner, name, wanted)
        self._residents = residents
        self.standing = wanted

    def _with(self, residents: Mapping[str, Any]) -> Any:
        if not residents:
            return self.original
        key = _key(residents)
        if key not in self._made:
            self._made[key] = self._rebuild(residents)
        return self._made[key]


def _key(residents: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    return frozenset((part, id(woven)) for part, woven in residents.items())


def _cells(function: Any) -> tuple[Any, ...]:
    return getattr(function, "__closure__", None) or ()
