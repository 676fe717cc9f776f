"""instructor, in every mode of an OpenAI or Anthropic client that needs no model by name."""

from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.questions import ASKED, MODEL, MOST_TOKENS, Pair
from tests.support.serving import Server
from tests.support.tiers import few

instructor = pytest.importorskip("instructor", reason="instructor is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")
MODES = ("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS")


def mode_of(name: str) -> Any:
    mode = getattr(instructor.Mode, name, None)
    if mode is None:
        pytest.skip(f"this instructor has no mode {name}")
    return mode


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", few(MODES, "TOOLS"))
def test_objects_in_every_mode(server: Server, name: str) -> None:
    mode = mode_of(name)
    plain = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=mode)
    more: dict[str, Any] = {"max_tokens": MOST_TOKENS}
    if name == "RESPONSES_TOOLS":
        more = {"max_output_tokens": MOST_TOKENS}
    if name == "MD_JSON":
        # It asks for JSON in words alone, which a small model does not follow.
        fence = 'root ::= "```json\\n{\\"zyx\\": " [0-9] ", \\"wvu\\": true}\\n```"'
        more["extra_body"] = {"ebnf": fence}
    got = client.chat.completions.create(
        model=MODEL, messages=ASKED, response_model=Pair, max_retries=0, **more
    )
    assert isinstance(got, Pair)


class Anything(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


def test_json_mode_gives_an_object(server: Server) -> None:
    """Of the schema, which it writes into the prompt, the server knows nothing."""
    plain = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON)
    # Not told by a grammar what to write, the model ends where it is told by the question.
    asked: list[Any] = [{"role": "user", "content": "Extract name and age: Anna is 30."}]
    got = client.chat.completions.create(
        model=MODEL, messages=asked, response_model=Anything, max_retries=0, max_tokens=1000
    )
    assert isinstance(got, Anything)


def test_parallel_tools(server: Server) -> None:
    plain = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
    got = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        response_model=Iterable[Pair],
        max_retries=0,
        tool_choice="required",
        max_tokens=MOST_TOKENS,
    )
    assert isinstance(next(iter(got)), Pair)


def test_partial_objects_are_streamed(server: Server) -> None:
    plain = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(
        model=MODEL, messages=ASKED, response_model=Pair, max_tokens=MOST_TOKENS
    )
    Pair.model_validate(last.model_dump())


@pytest.mark.parametrize("name", ["ANTHROPIC_TOOLS"])
def test_objects_from_anthropics_client(server: Server, name: str) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    plain = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    client = instructor.from_anthropic(plain, mode=mode_of(name))
    got = client.messages.create(
        model=MODEL, messages=ASKED, response_model=Pair, max_retries=0, max_tokens=MOST_TOKENS
    )
    assert isinstance(got, Pair)
