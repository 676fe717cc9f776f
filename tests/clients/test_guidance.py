"""guidance, by its models for OpenAI's and SGLang's servers."""

import json
import re
from typing import Any

import pytest

from tests.clients.questions import MODEL, MOST_TOKENS, TEXT, Pair
from tests.support.serving import Server

guidance = pytest.importorskip("guidance", reason="guidance is not installed")
pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture(params=["openai", "sglang"])
def model(server: Server, request: pytest.FixtureRequest) -> Any:
    from guidance import models

    kind = models.OpenAI if request.param == "openai" else models.experimental.SglangModel
    return kind(MODEL, base_url=f"{server.url}/v1", api_key="none", echo=False)


def said(model: Any, node: Any) -> str:
    """What the model writes for a node of a grammar, which captures it."""
    with guidance.user():
        model += TEXT
    with guidance.assistant():
        model += node
    text: str = model["said"]
    return text


def test_texts(model: Any) -> None:
    assert said(model, guidance.gen("said", max_tokens=MOST_TOKENS))


def test_objects(model: Any) -> None:
    node = guidance.json("said", schema=Pair, max_tokens=MOST_TOKENS)
    Pair.model_validate(json.loads(said(model, node)))


def test_patterns_and_grammars(model: Any) -> None:
    if type(model).__name__ == "OpenAI":
        pytest.skip("guidance asks OpenAI's API for JSON alone")
    assert re.fullmatch("[x-z]{5}", said(model, guidance.gen("said", regex="[x-z]{5}")))
    assert said(model, guidance.select(["zyx", "wvu"], name="said")) in ("zyx", "wvu")
