"""outlines, by its adapters of servers: vLLM's, SGLang's and OpenAI's."""

import json
import re
from typing import Any, Literal

import pytest

from tests.clients.questions import MODEL, MOST_TOKENS, TEXT, Pair
from tests.support.serving import Server

outlines = pytest.importorskip("outlines", reason="outlines is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture(params=["vllm", "sglang", "openai"])
def model(server: Server, request: pytest.FixtureRequest) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return getattr(outlines, f"from_{request.param}")(client, MODEL)


def test_texts_and_objects(model: Any) -> None:
    assert model(TEXT, max_tokens=MOST_TOKENS)
    Pair.model_validate(json.loads(model(TEXT, Pair, max_tokens=MOST_TOKENS)))


def test_choices_and_patterns(model: Any) -> None:
    if type(model).__name__ == "OpenAI":
        pytest.skip("outlines asks OpenAI's API for JSON alone")
    assert model(TEXT, Literal["zyx", "wvu"], max_tokens=MOST_TOKENS) in ("zyx", "wvu")
    pattern = outlines.types.Regex("[x-z]{5}")
    assert re.fullmatch("[x-z]{5}", model(TEXT, pattern, max_tokens=MOST_TOKENS))


@pytest.mark.filterwarnings("ignore:SGLang grammar")
def test_grammars(model: Any) -> None:
    if type(model).__name__ == "OpenAI":
        pytest.skip("outlines asks OpenAI's API for JSON alone")
    grammar = outlines.types.CFG('root ::= "q" [xyz] "q"')
    assert re.fullmatch("q[xyz]q", model(TEXT, grammar, max_tokens=MOST_TOKENS))


def test_a_stream_is_the_text(model: Any) -> None:
    pieces = list(model.stream(TEXT, max_tokens=MOST_TOKENS))
    assert "".join(pieces) == model(TEXT, max_tokens=MOST_TOKENS)
