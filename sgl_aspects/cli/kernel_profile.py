"""``sgl-aspects control --profile``: wish for a profile of a run's next forward passes, and wait for it."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sgl_aspects.errors import ConfigError
from sgl_aspects.run.control import WITHDRAWN, Wish, read_answers, read_control, write_wish
from sgl_aspects.terminal import counted, printable
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.rings import rings
from sgl_aspects.tracing.record.codec import DamagedError
from sgl_aspects.view.text import duration

_LOOK_SECONDS = 0.05
# Seconds after which the command says what it waits for, and for which it waits for a run's other ranks.
_PATIENCE_SECONDS, _OTHERS_SECONDS = 2.0, 0.5
_FORWARD = 3  # the level

#: What has come of a wish, by process.
Answers: TypeAlias = "Mapping[int, Mapping[str, Any]]"


@dataclass(frozen=True)
class Wished:
    """A wish that was written into the rings of a run's live processes."""

    wish: Wish
    rings: Sequence[Path]

    @property
    def folder(self) -> Path:
        return self.rings[0].parent

    def lives(self, process: str = "") -> bool:
        """Return whether this process lives, or any of them."""
        return any(_is_alive(ring) for ring in self.rings if ring.name.startswith(process))

    def answers(self) -> Answers:
        """Return what has come of it so far, by process; at the end with ``problem``, "" if there is none."""
        found = read_answers(self.folder, self.wish.number)
        for process, answer in found.items():
            if "problem" not in answer and not self.lives(f"{process}-"):
                answer["problem"] = "the process has ended"
        return found

    def ended(self) -> Answers:
        """Return the answers if every process that began has ended its profile; otherwise none."""
        found = self.answers()
        return found if all("problem" in answer for answer in found.values()) else {}

    def withdraw(self) -> None:
        """Withdraw the wish, and stop a profile that is being taken."""
        _write(self.rings, Wish(WITHDRAWN, self.wish.number))


def wish(steps: int, folder: str | None, process_id: int | None = None) -> Wished:
    """Wish for a profile in the run's live processes.

    :raises ConfigError: there is no such process, none records forward passes, or the run is another user's.
    """
    living = []
    for ring in rings(folder, process_id):
        if ring.is_alive():
            living.append(ring.path)
        run = ring.path.parent
        ring.close()
    if not living:
        raise ConfigError(f"every process of {run} has ended: start the engine again")
    level = max(read_control(path).level for path in living)
    if level < _FORWARD:
        raise ConfigError(
            f"the run records at level {level}, and forward passes from level {_FORWARD} on: "
            f"sgl-aspects control --level {_FORWARD} first"
        )
    made = Wished(Wish(steps, secrets.randbelow(0xFFFF_FFFF) + 1), living)
    _write(living, made.wish)
    return made


def _is_alive(path: Path) -> bool:
    try:
        ring = RingReader(path, read_only=True)
    except (DamagedError, OSError):  # the run has ended
        return False
    try:
        return ring.is_alive()
    finally:
        ring.close()


def _write(paths: Sequence[Path], wish: Wish) -> None:
    for path in paths:
        try:
            write_wish(path, wish)
        except FileNotFoundError:  # the run has ended meanwhile
            continue
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; only its own user can profile a run") from error


def take(steps: int, folder: str | None, process_id: int | None) -> int:
    """Wish for a profile, wait for it, and print what it shows. Ctrl-C withdraws the wish."""
    wished = wish(steps, folder, process_id)
    try:
        answers = _wait(wished)
    except KeyboardInterrupt:
        wished.withdraw()
        print("\nwithdrawn: no profile is taken", file=sys.stderr)
        return 130
    for process, answer in sorted(answers.items()):
        print(printable(f"process {process}: {_head(answer)}"))
        for name, seconds, share in _parts(answer):
            print(printable(f"  {share:6.1%}  {duration(seconds):>8}  {name}"))
    if all(answer["problem"] for answer in answers.values()):
        return 1
    print(f"sgl-aspects report {wished.folder} shows each step's kernels; --format perfetto, on a timeline")
    return 0


def in_a_line(answers: Answers) -> str:
    """Return what the first process answers: its kernels, and the operators that took most."""
    answer = next(iter(answers.values()))
    first = [f"{share:.0%} {name}" for name, _, share in _parts(answer)[:3]]
    return printable("  ".join([_head(answer), *first]))


def _wait(wished: Wished) -> Answers:
    """Wait until every process that began has ended its profile; a rank may begin a little later."""
    begin, said, ended = time.monotonic(), "", 0.0
    while True:
        now = time.monotonic()
        if answers := wished.ended():
            ended = ended or now
            if now - ended > _OTHERS_SECONDS:
                return answers
        elif not wished.lives():
            raise ConfigError("the run has ended before its profile did: start the engine again")
        elif (answers := wished.answers()) or now - begin > _PATIENCE_SECONDS:
            text = _progress(answers, wished.wish.steps)
            if text != said:
                print(text, file=sys.stderr)
                said = text
        time.sleep(_LOOK_SECONDS)


def _progress(answers: Answers, steps: int) -> str:
    if not answers:
        return (
            f"waiting for {counted(steps, 'forward pass')}: an idle server makes none, so send it requests; "
            "`sgl-aspects top` shows whether it has steps. Ctrl-C withdraws the wish"
        )
    done = min(answer["steps"] for answer in answers.values())
    paused = max(answer.get("paused", 0.0) for answer in answers.values())
    return f"the engine paused {duration(paused)} before the first pass; {done} of {steps} passes profiled"


def _head(answer: Mapping[str, Any]) -> str:
    if answer["problem"]:
        return f"no profile: {answer['problem']}"
    return (
        f"{counted(answer['kernels'], 'kernel')} in {counted(answer['steps'], 'forward pass')}; the engine "
        f"paused {duration(answer['paused'])} before and {duration(answer['read'])} after"
    )


def _parts(answer: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return what the device's time was spent on: name, seconds and share."""
    idle = {f"idle, {reason}": seconds for reason, seconds in answer.get("idle", {}).items() if seconds}
    parts = {**answer.get("operators", {}), **idle}
    total = sum(parts.values()) or 1.0
    return [(name, seconds, seconds / total) for name, seconds in parts.items()]
