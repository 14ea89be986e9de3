"""The dashboard and the alert rules, queried from a real Prometheus that scrapes a real engine's metrics.

Needs Debian's package prometheus (the binaries ``prometheus`` and ``promtool``).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import free_port

GRAFANA = Path(__file__).resolve().parents[2] / "docs" / "grafana"
ALERTS = GRAFANA / "alerts.yml"
# Variables of the dashboard's queries, which Grafana fills in.
VARIABLES = {"$__rate_interval": "30s", "$model": ".*", "$instance": ".*", "$tenant": ".*"}
# What a run in which all is well has no samples of.
MAY_BE_EMPTY = ("dropped_total",)
LABELS = {"gen_ai_request_model", "gen_ai_token_type", "sgl_aspects_forward_mode", "sgl_aspects_exporter"}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "dashboard.json").read_text())
    return loaded


def expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression


def test_panels_have_places_and_sources() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 8
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert all(target["datasource"]["uid"] == "${source}" for target in panel["targets"])
    assert "$" not in "".join(expression for _, expression in expressions())


def test_what_is_started_beside_an_engine_has_its_files_and_the_ports_of_its_neighbours() -> None:
    yaml = pytest.importorskip("yaml")

    def read(name: str) -> Any:
        return yaml.safe_load((GRAFANA / name).read_text())

    services = read("compose.yaml")["services"]
    for service in services.values():
        for volume in service["volumes"]:
            assert (GRAFANA / volume.split(":")[0]).exists(), volume
    sources = {each["type"]: each for each in read("provisioning/datasources/sources.yaml")["datasources"]}
    tempo = read("tempo.yaml")
    assert sources["prometheus"]["url"].rpartition("//")[2] in services["prometheus"]["command"][-1]
    assert sources["tempo"]["url"].endswith(f":{tempo['server']['http_listen_port']}")
    receiver = tempo["distributor"]["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    (scraped,) = read("prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    head = (GRAFANA / "compose.yaml").read_text()
    assert f"--prometheus {scraped.rpartition(':')[2]} --endpoint http://{receiver} " in head
    (destination,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["datasourceUid"] == sources["tempo"]["uid"]


def test_prometheus_accepts_its_configuration() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no Prometheus: apt-get install prometheus")
    subprocess.run(["promtool", "check", "config", GRAFANA / "prometheus.yml"], check=True)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus with the alert rules, which scrapes an engine that serves."""
    if shutil.which("prometheus") is None:
        pytest.skip("no Prometheus: apt-get install prometheus")
    from sgl_aspects.runtime import Engine, SamplingParams
    from sgl_aspects.tracing import attach
    from tests.support.tiny_models import make_llama

    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "model").mkdir()
    make_llama(folder / "model")
    port, own_port = free_port(), free_port()
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{ALERTS}']\n"
        f"scrape_configs: [{{job_name: engine, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{own_port}",
    ]
    url = f"http://127.0.0.1:{own_port}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGL_ASPECTS_TRACE_TARGET_TTFT", "100")
        traced = attach(
            level=2, exporters=["otlp-json-file"], file=str(folder / "spans.jsonl"), prometheus=port
        )
    with (
        traced,
        Engine(model_path=folder / "model") as engine,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server,
    ):
        try:
            deadline = time.monotonic() + 60
            sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
            request = "rate(gen_ai_server_request_duration_seconds_count[30s]) > 0"
            while not ask(url, request):
                assert time.monotonic() < deadline
                assert list(engine.submit("the quick brown fox jumps", sampling))
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()
            server.wait(30)


def ask(url: str, expression: str) -> list[Any]:
    """Prometheus's result; nothing while it is not up. Raises if it cannot parse the expression."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=60) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
            return found
    except ConnectionError:
        return []
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is reading its files
            return []
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []


@pytest.mark.slow
def test_every_panel_finds_its_metrics(prometheus: str) -> None:
    empty = [
        f"{title}: {expression}"
        for title, expression in expressions()
        if not ask(prometheus, expression) and not any(name in expression for name in MAY_BE_EMPTY)
    ]
    assert not empty, "\n".join(empty)


@pytest.mark.slow
def test_every_alert_reads_metrics_that_there_are(prometheus: str) -> None:
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=60) as answer:
        (group,) = json.load(answer)["data"]["groups"]
    assert len(group["rules"]) == ALERTS.read_text().count("alert:") > 4
    for rule in group["rules"]:
        assert rule["health"] in ("ok", "unknown"), rule
        assert rule["state"] != "firing", rule["name"]
        names = set(re.findall(r"\b((?:gen_ai|sgl_aspects)_[a-z_]+)(?=[\[{ )])", rule["query"])) - LABELS
        for name in names:
            if not any(part in name for part in MAY_BE_EMPTY):
                assert ask(prometheus, name), f"{rule['name']}: there is no {name}"
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True, capture_output=True)


@pytest.mark.slow
def test_alerts_fire_for_what_they_name_and_for_nothing_else() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: apt-get install prometheus")
    file = Path(__file__).with_name("alerts.test.yml")
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
