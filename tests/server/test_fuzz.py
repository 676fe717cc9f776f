"""The server against what its own OpenAPI document allows and forbids: never a 5xx."""

import contextlib
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.serving import Server, shared_server
from tests.support.tiers import few

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def fuzz(server: Server, examples: int) -> int:
    """Call routes with so many cases of each mode; how many calls that made."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]
    cases: list[Any] = []
    for operation in operations:
        for mode in MODES:
            strategy = operation.as_strategy(generation_mode=mode)
            _run(strategy, examples, cases)
    return len(cases)


def _run(strategy: st.SearchStrategy[Any], examples: int, cases: list[Any]) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            most = "max_output_tokens" if "responses" in case.operation.path else "max_tokens"
            case.body.setdefault(most, 3)
        response = case.call(timeout=60)
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            theirs = case.operation.path.startswith("/v1/messages")
            fields = {"message", "type"} if theirs else {"message", "type", "param", "code"}
            assert set(response.json()["error"]) == fields
        cases.append(response.status_code)

    # A route without parameters has no wrong cases.
    with contextlib.suppress(Unsatisfiable):
        check()


@pytest.mark.ci
@pytest.mark.parametrize("examples", few((2, 8), 2))
def test_a_few_cases_of_every_route(examples: int) -> None:
    server = shared_server()
    calls = fuzz(server, examples)
    assert calls >= 12 * examples
    server.settle()
