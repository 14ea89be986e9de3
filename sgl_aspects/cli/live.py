"""Answers as they arrive: on a terminal a line for each open request, elsewhere only whole answers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sgl_aspects.terminal import printable
from sgl_aspects.view.text import one_line

if TYPE_CHECKING:
    from sgl_aspects.runtime import RequestHandle, StreamChunk

_REFRESH_SECONDS = 0.1


@dataclass
class Answer:
    """One request's answer so far: written by its own thread, read by the display."""

    prompt: str
    text: str = ""
    tokens: int = 0
    error: BaseException | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)

    def take(self, chunks: Iterable[StreamChunk]) -> None:
        """Add every chunk; an error is kept for :func:`follow_answers`."""
        try:
            for chunk in chunks:
                self.text += chunk.text
                self.tokens += len(chunk.token_ids)
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            self.error = error
        finally:
            self.has_ended.set()


def follow_answers(
    console: Console, prompts: Sequence[str], handles: Sequence[RequestHandle]
) -> list[Answer]:
    """Show every answer while it arrives, and in full once it has ended. Raises the first request's error."""
    answers = [Answer(prompt) for prompt in prompts]
    for answer, handle in zip(answers, handles):
        threading.Thread(target=answer.take, args=(handle,), daemon=True).start()
    under_way = list(answers)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while under_way:
            under_way[0].has_ended.wait(_REFRESH_SECONDS)
            ended = [answer for answer in under_way if answer.has_ended.is_set()]
            under_way = [answer for answer in under_way if answer not in ended]
            for answer in ended:
                if answer.error is not None:
                    raise answer.error
                console.print(_whole(console, answer))
            if console.is_terminal:
                live.update(_lines(under_way, console.width), refresh=True)
    return answers


def _whole(console: Console, answer: Answer) -> Group:
    lines = [Text(f"▸ {one_line(answer.prompt, console.width - 2)}", style="bold cyan")]
    for line in Text(printable(answer.text.strip())).wrap(console, console.width - 2):
        line.rstrip()  # a Padding would add blanks at the end of lines, also in a file
        lines.append(Text("  ").append_text(line))
    return Group(*lines, "")


def _lines(answers: Sequence[Answer], width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    prompt_width = max(width // 3, 16)
    text_width = max(width - prompt_width - 16, 10)
    table.add_column(width=prompt_width, no_wrap=True, style="cyan")
    table.add_column(width=10, no_wrap=True, justify="right", style="dim")
    table.add_column(width=text_width, no_wrap=True)
    for answer in answers:
        tail = printable(" ".join(answer.text.split()))
        if len(tail) > text_width:
            tail = "…" + tail[-text_width + 1 :]
        count = f"{answer.tokens} tokens" if answer.tokens else "waiting"
        table.add_row(one_line(answer.prompt, prompt_width), count, Text(tail))
    return table
