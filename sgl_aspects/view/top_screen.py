"""The screen of ``sgl-aspects top``, for a terminal of any width from about 60 columns."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sgl_aspects.analysis.numbers import PHASES
from sgl_aspects.run.collector import collector_state
from sgl_aspects.run.control import Control
from sgl_aspects.tracing import schema
from sgl_aspects.view.live import IMAGE_PHASES, REQUEST_PHASES, STEP_PARTS, LiveRun, Request, Second
from sgl_aspects.view.text import duration, one_line

STYLES = {
    "queue": "yellow",
    **dict(zip(IMAGE_PHASES, ("magenta", "green", "bright_magenta"))),
    "prefill": "magenta",
    "mixed": "bright_magenta",
    "decode": "green",
    "other": "white",
    "schedule": "blue",
    "forward": "cyan",
    "sample": "magenta",
    schema.PROCESS_RESULT.name: "yellow",
}
# Phases are distinct without colours, too.
_GLYPHS = {"queue": "▒", **dict(zip(IMAGE_PHASES, "▚▇▄")), "prefill": "▓", "decode": "█"}
_LEVELS = {0: "off", 1: "requests", 2: "+ scheduler", 3: "+ forward", 4: "+ layers"}
_WIDE = 120
_MOST_SPARKS = 40
_MOST_CAUSES = 5


#: What requests are sorted by: the largest first.
ORDERS: dict[str, Callable[[LiveRun, Request, int], float]] = {
    "slowest": lambda run, request, now_ns: request.seconds(now_ns),
    "late first token": lambda run, request, now_ns: run.first_token(request) or 0.0,
    "most tokens": lambda run, request, now_ns: request.prompt_tokens + request.output_tokens,
    "newest": lambda run, request, now_ns: request.start_ns,
}


_KEYS = (
    "0 to 4: level of tracing · s: trace all requests, a tenth, a hundredth · o: order of the requests · "
    "↑ ↓: phases and causes of one, esc: of none · k: kernels of a forward pass · p: pause · q: quit"
)


@dataclass(frozen=True)
class View:
    """What the keys have chosen: a key of ``ORDERS``, the id of a request whose phases and causes (see
    ``causes_of``) are shown, and whether the keys are.
    """

    order: str = "slowest"
    selected: str | None = None
    causes: Sequence[tuple[str, float, list[str]]] = ()
    note: str = ""
    has_keys: bool = False


def ranked(run: LiveRun, order: str) -> list[Request]:
    """Return the open requests and those that finished in the window, in this order."""
    now = run.now_ns()
    finished = [request for second in _window(run, now) for request in second.finished]
    return sorted([*run.open.values(), *finished], key=lambda request: -ORDERS[order](run, request, now))


def _window(run: LiveRun, now_ns: int) -> list[Second]:
    return [run.seconds.get(int(now_ns / 1e9) - age, Second()) for age in range(run.window, -1, -1)]


def screen(
    run: LiveRun, controls: dict[int, Control], width: int, height: int, view: View | None = None
) -> Group:
    """Return the whole screen. ``controls``: the control block of each process, by its id."""
    view = view or View()
    now = run.now_ns()
    seconds = _window(run, now)
    finished = [each for second in seconds for each in second.finished if not each.is_answer]
    parts: list[RenderableType] = [
        _head(run, controls, width, view.note),
        *([Text(_KEYS, style="bold")] if view.has_keys else []),
        Rule(Text(f"Requests, last {run.window} s", style="bold"), align="left", style="dim"),
        _requests(run, seconds, finished),
    ]
    latencies, scheduler = _latencies(run, finished), _scheduler(run, seconds, now, width)
    parts_of_steps = _parts(seconds, min(width, 60))
    heading = Rule(Text("Scheduler", style="bold"), align="left", style="dim")
    if width >= _WIDE:
        both = Table.grid(padding=(0, 4, 0, 0))
        both.add_row(latencies, _steps(seconds))
        parts += [both, heading, scheduler, parts_of_steps]
    else:
        parts += [latencies, heading, scheduler, _steps(seconds), parts_of_steps]
    used = 16 if width >= _WIDE else 22
    title = "Slowest requests" if view.order == "slowest" else f"Requests, {view.order} first"
    parts += [Rule(Text(title, style="bold"), align="left", style="dim")]
    found = ranked(run, view.order)
    chosen = next((request for request in found if request.id == view.selected), None)
    if chosen is not None:
        parts += [_chosen(run, chosen, now, view.causes[:_MOST_CAUSES])]
        used += 2 + min(len(view.causes), _MOST_CAUSES)
    parts += [_listed(run, found[: max(3, height - used)], now, width, chosen)]
    return Group(*parts)


def _chosen(
    run: LiveRun, request: Request, now_ns: int, causes: Sequence[tuple[str, float, list[str]]]
) -> Text:
    """Return one request's phases and causes, and how to learn more of them."""
    phases = run.phases_of(request)
    times = phases.until(request.end_ns or now_ns) if phases else {}
    elsewhere = request.seconds(now_ns) - sum(times.values())
    text = Text.assemble((one_line(request.id, 60), "bold"), (f" {one_line(request.model, 40)}", "dim"))
    for phase, seconds in {**times, "elsewhere": max(0.0, elsewhere)}.items():
        text.append(f"  {phase} ", style=STYLES.get(phase, "dim"))
        text.append(duration(seconds))
    for cause, spent, culprits in causes:
        text.append(f"\n{duration(spent):>9}  {cause}")
        if culprits:
            text.append(f": {one_line(culprits[0], 40)}", style="bold")
            text.append(f" and {len(culprits) - 1} more" if len(culprits) > 1 else "", style="dim")
    why = shlex.join(["sgl-aspects", "why", one_line(request.id, 60), str(run.folder)])
    text.append(f"\nWhy: {why}", style="dim")
    return text


def _head(run: LiveRun, controls: dict[int, Control], width: int, note: str) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(one_line(run.model, 40) or "sgl-aspects top", style="bold")
    text.append(f"  {run.folder.name}  {time.strftime('%H:%M:%S')}", style="dim")
    if note:
        text.append(f"  {note}", style="bold yellow")
    collector = collector_state(run.folder)
    if collector is not None and (collector.was_restarted or not collector.is_alive):
        text.append(f"  collector {collector}", style="bold yellow" if collector.is_alive else "bold red")
    if run.dropped:
        text.append(f"  {run.dropped} spans dropped", style="bold red")
    text.append("\n")
    for index, (process_id, control) in enumerate(sorted(controls.items())):
        if index == 4:
            text.append(f" and {len(controls) - 4} more", style="dim")
            break
        sampled = f", {control.sample:.0%} of requests" if control.sample < 1 else ""
        text.append(f"{'   ' if index else ''}process {process_id} ", style="dim")
        text.append(f"level {control.level} ({_LEVELS.get(control.level, '?')}{sampled})")
    return text


def _requests(run: LiveRun, seconds: Sequence[Second], finished: Sequence[Request]) -> Table:
    span = max(1, min(run.window, sum(1 for _ in _busy(seconds))))
    prompt = sum(request.prompt_tokens for request in finished)
    cached = sum(request.cached_tokens for request in finished)
    fed = sum(second.fed_tokens for second in seconds)
    prefilled = sum(second.prefilled_tokens for second in seconds)
    if fed:  # every token fed outside a prompt yields the next one; so does a prompt's last
        output = max(0, fed - prefilled) + sum(second.decodes_begun for second in seconds)
    else:  # level 1: only the numbers of finished requests
        output = sum(request.output_tokens for request in finished)
    failed = sum(request.is_error for request in finished)
    return _numbers(
        ("in flight", str(sum(not request.is_answer for request in run.open.values())), ""),
        ("finished/s", f"{len(finished) / span:.1f}", ""),
        ("failed", str(failed), "bold red" if failed else ""),
        ("output tok/s", f"{output / span:,.0f}", "bold"),
        # without those from the prefix cache, as long as steps are recorded
        ("prefill tok/s" if fed else "prompt tok/s", f"{(prefilled if fed else prompt) / span:,.0f}", ""),
        ("cache hits", f"{cached / prompt:.0%}" if prompt else "–", ""),
    )


def _latencies(run: LiveRun, finished: Sequence[Request]) -> Table:
    table = _table("", "p50", "p90", "p99", "max")
    rows: list[tuple[str, Callable[[Request], float | None]]] = [
        ("time to first token", run.first_token),
        ("time per output token", run.time_per_output_token),
        ("duration", lambda request: request.seconds(request.end_ns)),
    ]
    for name, value in rows:
        times = [found for found in map(value, finished) if found is not None]
        table.add_row(name, *_percentiles(times))
    return table


def _scheduler(run: LiveRun, seconds: Sequence[Second], now_ns: int, width: int) -> Table:
    gauges = run.gauges_at(now_ns)
    sparks = min(_MOST_SPARKS, max(8, (width - 50) // 3))

    def history(value: Callable[[Second], float]) -> list[float]:
        return [value(second) for second in seconds[-sparks:]]

    def line(name: str, value: str, values: list[float], style: str, top: float | None = None) -> Text:
        return Text.assemble((f"{name} ", "dim"), (f"{value} ", "bold"), (spark(values, top), style))

    kv = max((gauge.kv_usage for gauge in gauges), default=0.0)
    running = history(lambda second: sum(gauge.running for gauge in second.gauges.values()))
    waiting = history(lambda second: sum(gauge.waiting for gauge in second.gauges.values()))
    usage = history(lambda second: max((gauge.kv_usage for gauge in second.gauges.values()), default=0.0))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(
        line("running", str(sum(gauge.running for gauge in gauges)), running, "green"),
        line("waiting", str(sum(gauge.waiting for gauge in gauges)), waiting, "yellow"),
        line("KV", f"{kv:.0%}", usage, "red" if kv > 0.95 else "cyan", 1.0),
        line("batch", str(max((gauge.batch_size for gauge in gauges), default=0)), [], ""),
    )
    return table


def _steps(seconds: Sequence[Second]) -> RenderableType:
    table = _table("steps", "steps/s", "tok/step", "p50", "p99", "max")
    span = max(1, sum(1 for _ in _busy(seconds)))
    for phase in (*PHASES.values(), "other"):
        times = [step for second in seconds for step in second.steps.get(phase, ())]
        if times:
            tokens = sum(second.step_tokens.get(phase, 0) for second in seconds)
            p50, _, p99, most = _percentiles(times)
            cells = [f"{len(times) / span:.1f}", f"{tokens / len(times):,.0f}", p50, p99, most]
            table.add_row(Text(phase, style=STYLES[phase]), *cells)
    return table if table.row_count else Text("no steps: level 2 or more shows them", style="dim")


def _parts(seconds: Sequence[Second], width: int) -> Text:
    """Show each part's share of the steps in the seconds that recorded it: levels change meanwhile."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for part in STEP_PARTS:
        recorded = [second for second in seconds if part in second.parts]
        whole = sum(sum(times) for second in recorded for times in second.steps.values())
        if not whole:
            continue
        share = min(1.0, sum(second.parts[part] for second in recorded) / whole)
        text.append(f"{part.replace('_', ' ')} ", style="dim")
        text.append(f"{share:.0%} ", style="bold")
        text.append("█" * max(1, round(share * width / 3)) + "  ", style=STYLES[part])
    return text


def _listed(
    run: LiveRun, found: Sequence[Request], now_ns: int, width: int, chosen: Request | None
) -> RenderableType:
    if not found:
        return Text("no requests yet", style="dim")
    table = Table.grid(padding=(0, 2, 0, 0))
    id_width = 34 if width >= _WIDE else 16
    bar_width = max(8, width - id_width - 44)
    for cells in (8, -7, -bar_width, 9, 6, -id_width):  # numbers to the right
        table.add_column(justify="right" if cells > 0 else "left", width=abs(cells), no_wrap=True)
    seen = {phase for each in run.phases.values() for phase in (*each.seconds, each.current)}
    named = [phase for phase in REQUEST_PHASES if phase in seen or phase not in IMAGE_PHASES]
    legend = Text(" ").join(Text(phase, style=STYLES[phase]) for phase in named)
    if width >= _WIDE:
        for phase in named:
            legend.append(f" {_GLYPHS[phase]}", style=STYLES[phase])
        legend.append("  ░ elsewhere", style="dim")
    headings = ("time", "", legend, "1st token", "tokens", "request")
    table.add_row(*(Text(text, style="dim") if isinstance(text, str) else text for text in headings))
    longest = max(1e-9, *(request.seconds(now_ns) for request in found))
    for request in found:
        phases = run.phases_of(request)
        times = phases.until(request.end_ns or now_ns) if phases else {}
        state = request.outcome if request.end_ns else (phases.current if phases else "") or "open"
        first = run.first_token(request)
        table.add_row(
            Text(duration(request.seconds(now_ns)), style="bold"),
            Text(state, style="red" if request.is_error else STYLES.get(state, "cyan")),
            _bar(times, request.seconds(now_ns), longest, bar_width),
            "" if first is None else duration(first),
            str(request.output_tokens) if request.end_ns else "",
            Text(one_line(request.id, id_width), style="reverse" if request is chosen else ""),
        )
    return table


def _bar(times: dict[str, float], seconds: float, longest: float, width: int) -> Text:
    text, reached, drawn = Text(), 0.0, 0
    for phase in REQUEST_PHASES:
        reached += times.get(phase, 0.0)
        cells = round(min(1.0, reached / longest) * width) - drawn
        text.append(_GLYPHS[phase] * cells, style=STYLES[phase])
        drawn += cells
    return text.append("░" * (round(seconds / longest * width) - drawn), style="dim")


def spark(values: Sequence[float], top: float | None = None) -> str:
    """Return one character per value, as high as it is large; blank if all are 0."""
    highest = max([*values, 0.0]) if top is None else top
    if highest <= 0:
        return ""
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, round(value / highest * 7)))] for value in values)


def _busy(seconds: Sequence[Second]) -> Iterable[Second]:
    """Yield seconds from the first activity on, so that averages leave out the time before."""
    started = False
    for second in seconds:
        started = started or bool(second.steps or second.finished or second.parts)
        if started:
            yield second


def _percentiles(times: Sequence[float]) -> tuple[str, str, str, str]:
    if len(times) < 2:
        return (duration(times[0]),) * 4 if times else ("–",) * 4
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return duration(cuts[49]), duration(cuts[89]), duration(cuts[98]), duration(max(times))


def _table(*headings: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for index in range(len(headings)):
        table.add_column(justify="right" if index else "left", no_wrap=True, min_width=0 if index == 0 else 7)
    table.add_row(*(Text(heading, style="dim") for heading in headings))
    return table


def _numbers(*cells: tuple[str, str, str]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(*(Text(name, style="dim", justify="right") for name, _, _ in cells))
    table.add_row(*(Text(value, style=style, justify="right") for _, value, style in cells))
    return table
