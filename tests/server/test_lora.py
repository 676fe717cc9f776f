"""Adapters by their names over HTTP."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.lora import write_adapter
from tests.support.models import greedy, of_bytes
from tests.support.serving import FIXED, Server
from tests.support.tiers import few

PROMPT = list(range(40, 70))
TOKENS = 10


@pytest.fixture(scope="module", params=few(["own"]))
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, Any]]]:
    """A server with two adapters, and what each makes of its model."""
    folder = tmp_path_factory.mktemp("served")
    model = of_bytes("llama", folder / "base")
    models = {"base": model}
    for name in ("first", "second"):
        models[name] = write_adapter(folder / name, model, "q_proj|v_proj|down_proj", alpha=24.0)
    flags = [f for n in ("first", "second") for f in ("--lora-modules", f"{n}={folder / n}")]
    model_flags = "--model", str(folder / "base"), "--dtype", "float32", "--algorithm", "ngram"
    server = Server(*model_flags, *flags, *FIXED)
    yield server, models
    server.kill()


def test_the_models_list_has_the_adapters(served: tuple[Server, dict[str, Any]]) -> None:
    server, models = served
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [*models]
    assert [card["parent"] for card in cards] == [None, "base", "base"]
    card = httpx.get(f"{server.url}/v1/models/second").json()
    assert card == cards[2]
    assert Path(card["root"]).name == "second"
    assert httpx.get(f"{server.url}/v1/models/third").status_code == 404


@torch.no_grad()
def test_a_request_has_the_adapter_that_is_its_model(served: tuple[Server, dict[str, Any]]) -> None:
    """On each route; the reply names it."""
    server, models = served
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    found = {}
    for name in models:
        body = asked | {"model": name, "return_token_ids": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=body).json()
        assert reply["model"] == name
        found[name] = reply["choices"][0]["token_ids"]
    assert found == {name: greedy(model, PROMPT, TOKENS) for name, model in models.items()}
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    chat = [{"role": "user", "content": "Which of them are you?"}]
    routes: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
        "chat/completions": (
            {"messages": chat, "max_tokens": TOKENS},
            lambda reply: reply["choices"][0]["message"]["content"],
        ),
        "messages": (
            {"messages": chat, "max_tokens": TOKENS},
            lambda reply: reply["content"][0]["text"],
        ),
        "responses": (
            {"input": chat, "max_output_tokens": TOKENS},
            lambda reply: reply["output"][-1]["content"][0]["text"],
        ),
    }
    texts = []
    for route, (body, text) in routes.items():
        replies = [
            httpx.post(
                f"{server.url}/v1/{route}", json=body | {"model": name, "temperature": 0}
            ).json()
            for name in models
        ]
        assert [reply["model"] for reply in replies] == [*models]
        texts.append([text(reply) for reply in replies])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) == 3
    refused = httpx.post(f"{server.url}/v1/completions", json=asked | {"model": "third"})
    assert refused.status_code == 404
    assert "'base', 'first', 'second'" in refused.json()["error"]["message"]
