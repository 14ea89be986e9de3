"""The terminal application of ``sgl-aspects top``: a screen that is redrawn periodically, and its keys."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from sgl_aspects.view.live import LiveRun
from sgl_aspects.view.top_screen import screen

_LEVELS = ("Off", "Requests", "Steps", "Forward", "Layers")


class TopApp(App[None]):
    """Ends by itself when every process of the run has ended."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "VerticalScroll { padding: 0 1; } Footer { dock: bottom; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        *(Binding(str(level), f"level({level})", name) for level, name in enumerate(_LEVELS)),
        Binding("s", "sample", "Sample"),
    ]

    def __init__(self, live: LiveRun, interval: float) -> None:
        super().__init__()
        self._live = live
        self._interval = interval
        self._is_paused = False

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="screen")
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(self._interval, self._look)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._draw()

    def action_level(self, level: int) -> None:
        self._live.change(lambda control: control.changed(level=level))
        self._draw()

    def action_sample(self) -> None:
        """Cycle the sampling: all of the requests, a tenth, a hundredth."""
        self._live.change(
            lambda control: control.changed(sample=1.0 if control.sample < 0.05 else control.sample / 10)
        )
        self._draw()

    def _look(self) -> None:
        self._live.poll()  # even while paused: records that are not read in time are lost
        if self._live.has_ended():
            self.exit()
        elif not self._is_paused:
            self._draw()

    def _draw(self) -> None:
        width, height = self.size
        note = "paused" if self._is_paused else ""
        controls = self._live.controls()
        self.query_one("#screen", Static).update(screen(self._live, controls, width - 2, height - 1, note))
