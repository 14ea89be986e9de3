"""``sgl-aspects why``: the causes of one request's latency, and the requests that delayed it."""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING

from sgl_aspects.cli.arguments import add_runs, read_runs
from sgl_aspects.errors import ConfigError

if TYPE_CHECKING:
    from sgl_aspects.analysis.causes import Causes, Explanation
    from sgl_aspects.analysis.spans import Span

_SLOWEST = "slowest"
# Of the requests that share a cause, the number that is named.
_NAMED = 3
# A gap between two tokens that is so many times as long as usual, and the number of those shown.
_STALL, _STALLS = 5, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request",
        metavar="REQUEST",
        help=f"the id of a request or of its trace, or how one begins; {_SLOWEST}: the one that took longest",
    )
    add_runs(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table of one request's causes."""
    from sgl_aspects.analysis.causes import Causes

    found = read_runs(arguments.sources)
    causes = Causes(found.spans)
    if not causes.requests:
        raise ConfigError(f"{found.source} holds no requests: has the engine served one since tracing began?")
    request = _chosen(causes, arguments.request, found.source)
    if not causes.has_steps(request):
        raise ConfigError(
            f"no steps were recorded (level 1) of request {_id(request)}, so its causes are not known: trace "
            "at level 2 (`run --level 2`; `control --level 2` for a live run), and ask about a later request"
        )
    _print(causes, causes.explain(request))
    return 0


def _is_part(request: Span) -> bool:
    """Return whether an attach or a detach came while it was under way, so that its latency is not known."""
    from sgl_aspects.tracing import schema

    return not {schema.ATTACHED_FLAG, schema.DETACHED_FLAG}.isdisjoint(request.attributes)


def _chosen(causes: Causes, text: str, source: str) -> Span:
    slowest = sorted(causes.requests, key=lambda request: (_is_part(request), -request.seconds))
    if text == _SLOWEST:
        return slowest[0]
    matches = causes.find(text)
    if len(set(map(_id, matches))) == 1:  # the prompts of a beam search, or an id used again
        return max(matches, key=lambda request: request.seconds)
    some = ", ".join(map(_id, (matches or slowest)[:_NAMED]))
    if matches:
        raise ConfigError(
            f"{len(matches)} requests begin with {text!r}, such as {some}: write more of the id"
        )
    raise ConfigError(
        f"{source} has no request {text!r}; it has {len(causes.requests)}, the slowest are {some}"
    )


def _print(causes: Causes, explanation: Explanation) -> None:
    from rich.markup import escape

    from sgl_aspects.terminal import console, counted, table
    from sgl_aspects.tracing import schema
    from sgl_aspects.view.text import duration, one_line

    request = explanation.request
    rows = table("cause", "time", "share")
    rows.add_column("because of", overflow="fold")
    for cause, seconds in explanation.ranked():
        shares = explanation.worst(cause)
        names = [f"{_id(causes.by_id[span_id])} ({duration(own)})" for span_id, own in shares[:_NAMED]]
        if len(shares) > _NAMED:
            names.append(f"{len(shares) - _NAMED} more")
        share = seconds / request.seconds if request.seconds else 0.0
        shown = "\n".join(escape(one_line(name, 100)) for name in names)
        rows.add_row(cause.value, duration(seconds), f"{share:.1%}", shown)
    output = console()
    heading = f"{request.name} {_id(request)}: {duration(request.seconds)}"
    heading += ", a part: it was under way at the attach or detach" if _is_part(request) else ""
    output.print(escape(one_line(heading, 200)), soft_wrap=True)
    output.print(rows)
    if answers := causes.answers.get(request.span_id):
        ids = ", ".join(_id(answer) for answer in sorted(answers, key=lambda answer: -answer.end_ns))
        output.print(escape(one_line(f"Its answers, the last to end first: {ids}", 200)), soft_wrap=True)
    gaps = causes.gaps(request)
    usual = statistics.median(gap.seconds for gap in gaps) if gaps else 0.0
    stalls = sorted((gap for gap in gaps if gap.seconds > _STALL * usual), key=lambda gap: -gap.seconds)
    if not stalls:
        return
    output.print(
        f"\n{counted(len(stalls), 'stall')}: more than {_STALL} × {duration(usual)} between two tokens"
    )
    for gap in stalls[:_STALLS]:
        found = causes.explain_gap(request, gap)
        cause = found.ranked()[0][0]
        guilty = found.worst(cause)[:1]
        at = duration((gap.start_ns - request.start_ns) / 1e9)
        step = gap.step.attributes.get(schema.STEP_ID, gap.step.trace_id)
        text = f"{duration(gap.seconds)} after {at}, step {step}: {cause.value}"
        text += "".join(f" ({_id(causes.by_id[span_id])})" for span_id, _ in guilty)
        output.print(escape(one_line(text, 200)), soft_wrap=True)


def _id(request: Span) -> str:
    from sgl_aspects.tracing import schema

    return str(request.attributes.get(schema.REQUEST_ID) or request.trace_id)
