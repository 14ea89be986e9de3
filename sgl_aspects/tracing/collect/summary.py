"""The counts of a run's spans: written by the collector, read by the process that started it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from sgl_aspects.terminal import counted


@dataclass(frozen=True)
class TraceSummary:
    """Counts of one run. For every exporter: ``exported + not_delivered == spans_recorded``.

    ``unfinished``: spans whose process ended first, exported with an error status. ``not_sampled``: spans of
    requests that their caller or our sampling left out. ``dropped``: records lost because a ring was full.
    ``unjoined``: spans whose request was never read. ``damaged``: records that could not be read.
    ``restarted``: the collector was killed, and these are the counts of its successor. ``problem``: why the
    counts are missing, "" if they are complete.
    """

    spans_recorded: int = 0
    exported: dict[str, int] = field(default_factory=dict)
    not_delivered: dict[str, int] = field(default_factory=dict)
    unfinished: int = 0
    not_sampled: int = 0
    dropped: int = 0
    unjoined: int = 0
    damaged: int = 0
    restarted: bool = False
    problem: str = ""

    @property
    def has_losses(self) -> bool:
        """Return whether spans are missing at an exporter, or may be."""
        lost = self.dropped + self.unjoined + self.damaged + sum(self.not_delivered.values())
        return bool(self.problem or lost)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TraceSummary:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        """Return one line for people."""
        if self.problem:
            return self.problem
        parts = [f"{counted(self.spans_recorded, 'span')} recorded"]
        for name, count in self.exported.items():
            missing = self.not_delivered[name]
            parts.append(f"{name}: {count} delivered" + (f", {missing} NOT delivered" if missing else ""))
        if self.dropped + self.damaged:
            parts.append(f"{self.dropped + self.damaged} records lost")
        if self.unjoined:
            parts.append(f"{self.unjoined} spans left out: the beginning of their requests was not recorded")
        if self.restarted:
            parts.append("counted since the collector was started again")
        return "; ".join(parts)
