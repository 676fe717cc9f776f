"""The bombs that a server refuses do no more harm to an engine in Python."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from overlap_spec.engine import Engine
from overlap_spec.errors import InvalidRequest
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Output, SamplingParams
from tests.support.tiers import few

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
GOOD = Grammar.choice(["yes", "no"])
# For a machine that others use as well.
SOON_S = 30.0
Bomb = Callable[[], tuple[Any, Grammar | None]]
BOMBS: dict[str, Bomb] = {
    "a long prompt": lambda: ("hello world, this is " * 250_000, None),
    "a long chat": lambda: ([{"role": "user", "content": "x" * 5_000_000}], None),
    "many messages": lambda: ([{"role": "user", "content": "hello there"}] * 20_000, None),
    "many ids": lambda: ([1] * 10**6, None),
    "a large repetition": lambda: ("hi", Grammar.regex("[a-z]{1,9999}" * 20)),
    "nested counts": lambda: ("hi", Grammar.regex("((a{1,99}){1,99}){1,99}")),
    "sets without end": lambda: ("hi", Grammar.regex("x0" + r"[\s\S\w\W]{0,4000}" * 100)),
    "a deep schema": lambda: ("hi", Grammar.json_schema('{"items":' * 300 + "{}" + "}" * 300)),
    "a huge enum": lambda: ("hi", Grammar.json_schema({"enum": [f"v{i}" for i in range(50_000)]})),
    "a huge length": lambda: ("hi", Grammar.json_schema({"type": "string", "maxLength": 10**9})),
    "many rules": lambda: (
        "hi",
        Grammar.ebnf(
            'root ::= "x" r0\n' + "\n".join(f'r{i} ::= "a" r{i + 1}?' for i in range(5000))
            + '\nr5000 ::= "z"'
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(mask_deadline_ms=5000) as made:
        yield made


def is_told(output: Output) -> bool:
    """Whether a request that ran has an output, or an error of its own."""
    return output.error is None or output.finish_reason == "error"


@pytest.mark.parametrize("name", few(BOMBS, "nested counts", "a deep schema"))
def test_generate_outlives_it(engine: Engine, name: str) -> None:
    start = time.monotonic()
    # Refused as what it is, or served.
    with contextlib.suppress(InvalidRequest):
        prompt, grammar = BOMBS[name]()
        assert is_told(engine.generate(prompt, grammar, SHORT))
    assert time.monotonic() - start < SOON_S
    assert engine.generate("Is fire hot?", GOOD).text in ("yes", "no")
    state = engine.snapshot()
    assert state["running"] == state["pages_in_use"] == state["matchers"] == 0
