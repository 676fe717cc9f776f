"""Bodies that are almost what a server takes: what its own document forbids, and valid ones with
something changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Is fire hot?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [USER], "max_tokens": 4, "temperature": 0, "seed": 1, "n": 2}),
    (CHAT, {"messages": [USER], "max_tokens": 4, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": [USER], "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"}),
    (CHAT, {"messages": [USER], "max_tokens": 4, "stream": True, "stop": ["a", "b"]}),
    (
        CHAT,
        {
            "messages": [{"role": "system", "content": "Be brief."}, USER],
            "max_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
    ),
    (CHAT, {"messages": [USER], "max_tokens": 4, "structured_outputs": {"choice": ["a", "b"]}}),
    (TEXT, {"prompt": ["a", "b"], "max_tokens": 4, "logit_bias": {"5": 1.5}, "echo": True}),
    (TEXT, {"prompt": [1, 2, 3], "max_tokens": 4, "regex": "[a-c]{2,5}"}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, "ebnf": 'root ::= "a"'}}),
    ("/generate", {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 4}, "rid": "x"}),
    (
        "/v1/responses",
        {
            "input": [USER, {"type": "function_call_output", "call_id": "1", "output": "a"}],
            "instructions": "Be brief.",
            "max_output_tokens": 4,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "a",
            "max_output_tokens": 4,
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "f"},
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 4,
            "system": "Be brief.",
            "stop_sequences": ["b"],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/tokenize", {"prompt": "some text", "add_special_tokens": True}),
    ("/tokenize", {"messages": [USER]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/abort_request", {"rid": "nobody"}),
)
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 2**63, 2**80, 0.5, "", "\ud800", "\x00", "ü" * 300, [], {}, [[]],
    [None], {"": None}, {"$ref": "#"}, "(" * 50, "[a-z]{1,9999}" * 9, "root ::= root", "{}",
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"enum": list(range(300))},
    {"pattern": "(a*)*b"}, {"maxLength": 10**9}, {"minItems": 10**9},
)  # fmt: skip
# Field of each route that bounds an answer, the most that a changed body may ask for, and what it
# asks for in place of more.
LIMITS = {
    CHAT: "max_tokens",
    TEXT: "max_tokens",
    "/generate": "max_new_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
MOST_TOKENS, FEW_TOKENS = 64, 4
# One in so many is padded to sizes up to the limit of a body.
LARGE_EVERY, LARGEST = 50, 8 * 2**20


def mutations(rng: Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Valid bodies with some changes each: a path and a body."""
    for number in range(count):
        path, valid = rng.choice(VALID)
        body = copy.deepcopy(valid)
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change(rng, body)
        _keep_short(path, body)
        content = json.dumps(body).encode()
        if rng.random() < 0.15:
            at = rng.randrange(len(content))
            content = content[:at] + rng.randbytes(rng.randrange(4)) + content[at + 1 :]
        if number % LARGE_EVERY == LARGE_EVERY - 1:
            content = _padded(rng, path, body)
        yield path, content


def _keep_short(path: str, body: dict[str, Any]) -> None:
    """Where a change left a valid body that asks for thousands of tokens, ask for few: long answers
    are a load like other users', which ``bench.attack`` measures by itself."""
    place: Any = body
    if path == "/generate":
        if body.get("sampling_params") is None:
            body["sampling_params"] = {}
        place = body["sampling_params"]
    key = LIMITS.get(path)
    if key is None or not isinstance(place, dict):
        return
    asked = place.get(key)
    if asked is None or (isinstance(asked, int) and asked > MOST_TOKENS):
        place[key] = FEW_TOKENS


def _change(rng: Random, body: Any) -> None:
    """Change one thing at a random place of a tree."""
    place = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.3:
            break
        place = place[key]
    kind = rng.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[f"x{rng.randrange(100)}"] = rng.choice(JUNK)
    elif kind == 2 and isinstance(place[key], str):
        place[key] = place[key] * rng.choice((0, 10, 1000))
    elif kind == 3:
        place[key] = [place[key]] * rng.choice((0, 2, 200))
    elif kind == 4:
        place[key] = {"a": place[key]}
    else:
        place[key] = rng.choice(JUNK)


def _padded(rng: Random, path: str, body: dict[str, Any]) -> bytes:
    size = rng.randrange(2**18, LARGEST - 2**16)
    if path == "/detokenize":
        return json.dumps({"tokens": [1] * (size // 3)}).encode()
    return json.dumps(body | {"user" if path == CHAT else "prompt": "pad " * (size // 4)}).encode()


def forbidden(url: str, count: int, number: int) -> list[tuple[str, bytes]]:
    """About ``count`` bodies that the server's own document forbids (schemathesis' negative mode).

    Args:
        url: Of the server.
        number: Seeds the choice.
    """
    import schemathesis
    from schemathesis import GenerationMode

    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations: list[Any] = [each.ok() for each in document.get_all_operations()]  # type: ignore[union-attr]
    posts = [each for each in operations if each.method.upper() == "POST"]
    found: list[tuple[str, bytes]] = []
    for operation in posts:
        strategy = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

        @seed(number)
        @settings(
            max_examples=max(count // len(posts), 1),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def collect(case: Any) -> None:
            body, path = case.body, case.path
            if isinstance(body, dict) and path in (CHAT, TEXT):
                # What is allowed of it is to be short.
                body = {"max_tokens": 4} | body
            if isinstance(body, str | int | float | list | dict | None):
                found.append((path, json.dumps(body).encode()))

        try:
            collect()
        except Unsatisfiable:
            continue
    return found


def almost_valid(url: str, count: int, seed: int) -> list[tuple[str, bytes]]:
    """Paths and bodies: half are forbidden, half are valid ones with something changed."""
    wrong = forbidden(url, count // 2, seed)
    made = [*wrong, *mutations(Random(seed), count - len(wrong))]
    Random(seed).shuffle(made)
    return made
