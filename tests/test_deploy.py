"""The files for deployment: metrics that exist, flags that exist, a page that names each file."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from prometheus_client.parser import text_string_to_metric_families

from overlap_spec.cli import app
from overlap_spec.cli.flags import config_values
from tests.support.serving import shared_server

ROOT = Path(__file__).parent.parent
FILES = ROOT / "examples" / "deploy"
PAGE = (ROOT / "docs" / "deployment.md").read_text()
DASHBOARD = json.loads((FILES / "grafana.json").read_text())
ALERTS = yaml.safe_load((FILES / "alerts.yml").read_text())
SERVE: Any = typer.main.get_command(app)
SERVE = SERVE.commands["serve"]
METRIC = re.compile(r"overlap_spec:\w+")


def names(text: str) -> set[str]:
    """The series that a page of /metrics has, or may have once its labels are known."""
    found = set()
    for family in text_string_to_metric_families(text):
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        found |= {family.name + end for end in ends.get(family.type, [""])}
    return found


def test_dashboard_and_alerts_ask_for_metrics_that_there_are() -> None:
    server = shared_server()
    schema = {"response_format": {"type": "json_object"}, "max_tokens": 32}
    message = {"role": "user", "content": "Good morning"}
    assert server.post("/v1/chat/completions", {"messages": [message], **schema}).status_code == 200
    there = names(server.get("/metrics").text)
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked += [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    wanted = {name for expression in asked for name in METRIC.findall(expression)}
    assert len(wanted) > 30
    assert wanted - there == set()
    labels = {"finish_reason", "status", "kind", "le"}
    assert set(re.findall(r"by \((\w+)\)", " ".join(asked))) <= labels
    told = set(METRIC.findall(PAGE))
    assert told
    assert told - there - {name.removesuffix("_bucket") for name in there} == set()


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids) > 0


def test_the_config_file_is_read() -> None:
    values = config_values(FILES / "serve.yaml", SERVE.params)
    assert values["max_running_requests"] == 32
    scraped = yaml.safe_load((FILES / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"127.0.0.1:{values['port']}"]


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_start_the_command_with_flags_that_there_are(name: str) -> None:
    text = (FILES / name).read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    assert entry[:2] == ["overlap-spec", "serve"]
    flags = {flag for param in SERVE.params for flag in param.opts}
    assert {word for word in entry if word.startswith("--")} <= flags
    port = entry[entry.index("--port") + 1]
    assert f"EXPOSE {port}\n" in text
    assert f":{port}/health" in text
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE):
        assert (ROOT / source).exists()


def test_the_unit_starts_the_command_with_flags_that_there_are() -> None:
    text = (FILES / "overlap-spec.service").read_text()
    words = shlex.split(re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0])
    assert words[1] == "serve"
    flags = {flag for param in SERVE.params for flag in param.opts}
    assert {word for word in words if word.startswith("--")} <= flags


def test_the_page_names_every_file() -> None:
    for path in FILES.iterdir():
        assert f"`examples/deploy/{path.name}`" in PAGE, path.name
