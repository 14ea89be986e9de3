"""``sgl-aspects control --profile``: ask for a profile of a run's next forward passes, and wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sgl_aspects.errors import ConfigError
from sgl_aspects.run.control import own_folder, read_control, write_asked
from sgl_aspects.run.requests import Request
from sgl_aspects.terminal import counted, printable, say
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.rings import rings
from sgl_aspects.view.text import duration

_LOOK_SECONDS = 0.05
# Seconds after which the command says what it waits for, and for which it waits for a run's other ranks.
_PATIENCE_SECONDS, _OTHERS_SECONDS = 2.0, 0.5
_FORWARD = 3  # the level

#: What has come of a request, by process.
Answers: TypeAlias = "Mapping[int, Mapping[str, Any]]"


@dataclass(frozen=True)
class Asked:
    """Requests to a run's live processes, each with the process's ring.

    ``close`` withdraws the requests, which also stops a profile that is being taken.
    """

    requests: Sequence[tuple[RingReader, Request]]
    close: Callable[[], None]

    def lives(self) -> bool:
        """Return whether any of the processes does."""
        return any(ring.is_alive() for ring, _ in self.requests)

    def answers(self) -> Answers:
        """Return what has come of it so far, by process; at the end with ``problem``, "" if there is none."""
        found = {}
        for ring, request in self.requests:
            is_alive = ring.is_alive()
            if (answer := request.read()) is not None:
                found[request.process_id] = (
                    answer if is_alive else {"problem": "the process has ended", **answer}
                )
        return found

    def ended(self) -> Answers:
        """Return the answers if every process that began has ended its profile; otherwise none."""
        found = self.answers()
        return found if all("problem" in answer for answer in found.values()) else {}


def ask(steps: int, folder: str | None, process_id: int | None = None) -> Asked:
    """Ask a run's live processes for a profile.

    :raises ConfigError: there is no such process, none records forward passes, or the run is another user's.
    """
    with contextlib.ExitStack() as undo:
        living = []
        for ring in rings(folder, process_id):
            run = ring.path.parent
            if ring.is_alive():
                undo.callback(ring.close)
                living.append(ring)
            else:
                ring.close()
        if not living:
            raise ConfigError(f"every process of {run} has ended: start the engine again")
        try:
            level = max(read_control(ring.path).level for ring in living)
            if level < _FORWARD:
                raise ConfigError(
                    f"the run records at level {level}, and forward passes from level {_FORWARD} on: "
                    f"sgl-aspects control --level {_FORWARD} first"
                )
            asked = []
            with own_folder(run):
                for ring in living:
                    request = Request(run, ring.process_id, "profile", {"steps": steps})
                    undo.callback(request.remove)
                    asked.append((ring, request))
            for ring in living:
                write_asked(ring.path)
        except OSError as error:
            raise ConfigError(
                f"{run}: {error.strerror}; only its own user can profile a run that lives"
            ) from error
        return Asked(asked, undo.pop_all().close)


def take(steps: int, folder: str | None, process_id: int | None) -> int:
    """Ask for a profile, wait for it, and print what it shows. Ctrl-C withdraws the request."""
    asked = ask(steps, folder, process_id)
    try:
        answers = _wait(asked, steps)
    except KeyboardInterrupt:
        say("\nwithdrawn: no profile is taken")
        return 130
    finally:
        asked.close()
    for process, answer in sorted(answers.items()):
        print(printable(f"process {process}: {_head(answer)}"))
        for name, seconds, share in _parts(answer):
            print(printable(f"  {share:6.1%}  {duration(seconds):>8}  {name}"))
    if all(answer["problem"] for answer in answers.values()):
        return 1
    run = asked.requests[0][0].path.parent
    print(f"sgl-aspects report {run} shows each step's kernels; --format perfetto, on a timeline")
    return 0


def in_a_line(answers: Answers) -> str:
    """Return what the first process answers: its kernels, and the operators that took most."""
    answer = next(iter(answers.values()))
    first = [f"{share:.0%} {name}" for name, _, share in _parts(answer)[:3]]
    return printable("  ".join([_head(answer), *first]))


def _wait(asked: Asked, steps: int) -> Answers:
    """Wait until every process that began has ended its profile; a rank may begin a little later."""
    begin, said, ended = time.monotonic(), "", 0.0
    while True:
        now = time.monotonic()
        if answers := asked.ended():
            ended = ended or now
            if now - ended > _OTHERS_SECONDS:
                return answers
        elif not asked.lives():
            raise ConfigError("the run has ended before its profile did: start the engine again")
        elif (answers := asked.answers()) or now - begin > _PATIENCE_SECONDS:
            text = _progress(answers, steps)
            if text != said:
                say(text)
                said = text
        time.sleep(_LOOK_SECONDS)


def _progress(answers: Answers, steps: int) -> str:
    if not answers:
        return (
            f"waiting for {counted(steps, 'forward pass')}: an idle server makes none, so send it requests; "
            "`sgl-aspects top` shows whether it has steps. Ctrl-C withdraws the request"
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
    """Return what the device's time was spent on: name, seconds and share; the layers are the same again."""
    idle = {f"idle, {reason}": seconds for reason, seconds in answer.get("idle", {}).items() if seconds}
    parts = {**answer.get("operators", {}), **idle}
    total = sum(parts.values()) or 1.0
    layers = {f"in {name}": seconds for name, seconds in answer.get("layers", {}).items()}
    return [(name, seconds, seconds / total) for name, seconds in (parts | layers).items()]
