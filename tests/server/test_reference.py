"""``docs/http.md`` has the routes and fields that there are."""

import json
import re
import subprocess
from pathlib import Path

from overlap_spec.server.app import document
from overlap_spec.server.protocol import Sampling
from overlap_spec.server.reference import DEFAULTS, URL, markdown
from overlap_spec.types import SamplingParams
from tests.support.serving import Server

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def test_the_reference_is_the_servers_own() -> None:
    own, made, _ = PAGE.partition("## Routes\n")
    assert made
    want = markdown(document())
    command = "python -m overlap_spec.server.app"
    assert made + PAGE[len(own) + len(made) :] == want, f"{command} prints it as it is now"


def test_the_pages_words_are_fields_routes_or_events() -> None:
    own, whole = PAGE.partition("## Routes\n")[0], document()
    paths = {*whole["paths"], "/docs", "/openapi.json", "/v1"}
    for path in re.findall(r"`(?:GET |POST )?(/[\w/{}]+)`", own):
        assert path in paths or path == "/v1/responses/{id}", path
    schemas = whole["components"]["schemas"].values()
    fields = {name for each in schemas for name in each.get("properties", ())}
    fields |= {name for each in schemas for name in each.get("x-refused", ())}
    # Fields of replies, and values.
    others = {"cache_read_input_tokens", "input_tokens", "prompt_token_ids", "token_ids"}
    others |= {"sequence_number", "message_start", "message_delta", "enable_thinking"}
    others |= {"token_logprobs", "top_logprobs", "decoded_token", "cached_tokens"}
    others |= {"model_context_window_exceeded", "tool_result", "tool_use", "count_tokens"}
    others |= {"acceptance_histogram", "num_spec_tokens"}
    others |= {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", own):
        assert name in fields | others, name


def test_every_route_has_a_line_about_it() -> None:
    whole = document()
    routes = [one for operations in whole["paths"].values() for one in operations.values()]
    assert len(routes) > 20
    assert len(whole["components"]["schemas"]) > 20
    assert all(route["description"].endswith(".") for route in routes)
    titles = re.findall(r"(?m)^### (.+)$", markdown(whole))
    assert len(set(titles)) == len(titles)


def test_the_defaults_are_those_of_sampling_params() -> None:
    own = SamplingParams()
    named = {name: getattr(own, name, None) for name in Sampling.model_fields}
    told = {name: value for name, value in named.items() if value not in (None, False, (), {})}
    assert {name: json.loads(DEFAULTS[name]) for name in told} == told
    zeros = {name for name, value in named.items() if value == 0 and value is not False}
    assert {DEFAULTS[name] for name in zeros} == {"0"}
    rows = dict(re.findall(r"(?m)^\| `(\w+)` \| [^|]+ \| ([^|]*) \|", PAGE))
    assert all(rows[name] == DEFAULTS[name] for name in (*told, *zeros))


MADE = PAGE.partition("## Routes\n")[2]
EXAMPLES = re.findall(r"(?ms)^### (?:GET|POST) (\S+)$.*?```bash\n(.+?)```", MADE)
# What a server without an administrator's key and without that model answers otherwise.
STATUSES = {"/v1/responses/{response_id}": 404, "/flush_cache": 403}


def test_every_route_has_an_example() -> None:
    paths = [path for path, operations in document()["paths"].items() for _ in operations]
    assert [path for path, _ in EXAMPLES] == paths


def test_the_examples_are_answered(server: Server) -> None:
    for path, curl in EXAMPLES:
        command = curl.replace(URL, server.url).replace("curl -s", "curl -s -w '\\n%{http_code}'")
        *body, status = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert int(status) == STATUSES.get(path, 200), (path, body)
        assert body or path == "/metrics"
