"""The terminal application of ``sgl-aspects top``: a screen that is redrawn periodically, and its keys."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from sgl_aspects.cli import kernel_profile
from sgl_aspects.errors import ConfigError
from sgl_aspects.view.live import LiveRun, causes_of
from sgl_aspects.view.top_screen import ORDERS, View, ranked, screen

# Seconds between two readings of the chosen request's causes, which takes a second of a full ring.
_CAUSES_SECONDS = 3.0
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
        Binding("o", "order", "Order"),
        Binding("k", "kernels", "Kernels"),
        Binding("up", "select(-1)", "Select", show=False, priority=True),
        Binding("down", "select(1)", "Select", show=False, priority=True),
        Binding("escape", "select(0)", "Select none", show=False),
        Binding("question_mark", "help", "Keys", key_display="?"),
    ]

    def __init__(self, live: LiveRun, interval: float) -> None:
        super().__init__()
        self._live = live
        self._interval = interval
        self._is_paused = self._is_asking = False
        self._view = View()
        self._asked: kernel_profile.Asked | None = None
        self._profile = ""  # what has come of it

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="screen")
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(self._interval, self._look)
        self.set_interval(_CAUSES_SECONDS, self._ask_why)
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

    def action_order(self) -> None:
        orders = list(ORDERS)
        self._view = replace(self._view, order=orders[(orders.index(self._view.order) + 1) % len(orders)])
        self._draw()

    def action_select(self, by: int) -> None:
        """Select the request so many rows further; 0: none."""
        ids = [request.id for request in ranked(self._live, self._view.order)] if by else []
        at = ids.index(self._view.selected) if self._view.selected in ids else -1
        selected = ids[min(max(at + by, 0), len(ids) - 1)] if ids else None
        self._view = replace(self._view, selected=selected, causes=())
        self._ask_why()
        self._draw()

    def action_kernels(self) -> None:
        """Ask for a profile of the next forward pass; its kernels are in the report, too."""
        try:
            self._end_profile()
            self._asked = kernel_profile.ask(1, str(self._live.folder))
            self._profile = "profiling the next forward pass"
        except ConfigError as error:
            self._profile = str(error)
        self._draw()

    def _end_profile(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._asked = None

    on_unmount = _end_profile

    def action_help(self) -> None:
        self._view = replace(self._view, has_keys=not self._view.has_keys)
        self._draw()

    def _ask_why(self) -> None:
        selected = self._view.selected
        # A thread cannot be cancelled: one that reads a full ring on a busy machine must not get company.
        if selected is not None and not self._is_paused and not self._is_asking:
            self._is_asking = True
            self.run_worker(partial(self._read_causes, selected), thread=True)

    def _read_causes(self, selected: str) -> None:
        try:
            with contextlib.suppress(ConfigError):  # the run has just ended
                self.call_from_thread(self._show_causes, selected, causes_of(self._live.folder, selected))
        finally:
            self._is_asking = False

    def _show_causes(self, selected: str, causes: Sequence[tuple[str, float, list[str]]]) -> None:
        if self._view.selected == selected:
            self._view = replace(self._view, causes=causes)
            self._draw()

    def _look(self) -> None:
        self._live.poll()  # even while paused: records that are not read in time are lost
        if self._asked is not None and (answers := self._asked.ended()):
            self._profile = kernel_profile.in_a_line(answers)
            self._end_profile()
        if self._live.has_ended():
            self.exit()
        elif not self._is_paused:
            self._draw()

    def _draw(self) -> None:
        width, height = self.size
        note = "  ".join(filter(None, ("paused" if self._is_paused else "", self._profile)))
        view = replace(self._view, note=note)
        controls = self._live.controls()
        self.query_one("#screen", Static).update(screen(self._live, controls, width - 2, height - 1, view))
