"""Thinking, content and calls out of one text, wherever its pieces are cut; and the metrics."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from overlap_spec.async_engine import AsyncEngine, AsyncRequestHandle
from overlap_spec.engine.input_processor import Limits, check_text
from overlap_spec.errors import ConfigError, InvalidRequest
from overlap_spec.grammar.reasoning.reply import ReasoningStream
from overlap_spec.grammar.spec import Grammar
from overlap_spec.grammar.tools.stream import CallStream
from overlap_spec.ipc.messages import EngineReady
from overlap_spec.server.chat import ChatBody
from overlap_spec.server.constraints import Constraints
from overlap_spec.server.conversation import ChatAssembler, Conversation
from overlap_spec.server.errors import as_api_error, place
from overlap_spec.server.metrics import FrontState, Metrics
from overlap_spec.server.service import ClientGone, Events, Service, fan_out
from overlap_spec.server.settings import ServerSettings
from overlap_spec.stats import RequestStats
from overlap_spec.types import Output, Request, SamplingParams

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<x>"}}\n</tool_call>'
TEXT = f"<think>\nhm, é\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


def read(text: str, size: int) -> tuple[ChatAssembler, list[dict[str, Any]]]:
    """An answer that came in pieces of ``size``, and its deltas."""
    assembler = ChatAssembler(ReasoningStream("qwen3"), CallStream("hermes"))
    deltas = []
    for start in range(0, len(text), size):
        deltas += assembler.push(text[start : start + size])
    return assembler, deltas + assembler.finish()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 1000])
def test_deltas_make_the_message(size: int) -> None:
    assembler, deltas = read(TEXT, size)
    message = assembler.message()
    assert message["reasoning_content"].strip() == "hm, é"
    assert message["content"].strip() == "Let me see."
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["f", "f"]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    for name in ("reasoning_content", "content"):
        assert "".join(d.get(name, "") for d in deltas) == message[name]
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        for piece in delta.get("tool_calls", []):
            call = calls.setdefault(piece["index"], {"id": piece.get("id", ""), "arguments": ""})
            call["arguments"] += piece["function"]["arguments"]
    assert [c["id"] for c in calls.values()] == [c["id"] for c in message["tool_calls"]]
    for index, call in calls.items():
        assert json.loads(call["arguments"]) == {"a": "<x>"}
        assert call["arguments"] == message["tool_calls"][index]["function"]["arguments"]
    assert assembler.finish_reason("stop") == "tool_calls"
    assert assembler.finish_reason("length") == "length"


def test_text_without_marks_is_content() -> None:
    assembler, deltas = read("5 < 7 and {}", 1)
    assert assembler.message() == {
        "role": "assistant", "content": "5 < 7 and {}", "refusal": None, "reasoning_content": None,
    }  # fmt: skip
    assert "".join(d["content"] for d in deltas) == "5 < 7 and {}"
    assert assembler.finish_reason("stop") == "stop"


def test_seeds_follow_one_another_and_stay_in_64_bits() -> None:
    one = Request(-1, (1,), SamplingParams(), None, 1, frozenset(), 2**63 - 1, 0)
    assert [p.seed for p in fan_out([one], 3)] == [2**63 - 1, -(2**63), -(2**63) + 1]


def test_places_leave_out_the_names_of_union_members() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
    loc = ("messages", 0, "user", "content", "list[TextPart]", 0, "text")
    assert place(loc, body, True) == "messages[0].content[0].text"
    assert place(("stop", "str"), {"stop": 7}, False) == "stop"


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(
    ("ending", "opened"),
    [("", None), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)],
    ids=["neither", "opened", "closed"],
)
def test_a_template_may_open_or_close_the_thinking(
    tiny: dict[str, str], parser: str, ending: str, opened: bool | None
) -> None:
    template = "{{ messages[-1].content }}</think>: " + ending
    settings = ServerSettings(reasoning_parser=parser)
    engine = AsyncEngine(**tiny, chat_template=template)
    engine.set_ready(EngineReady(Limits(200, 200), 300, dataclasses.asdict(engine.config)))
    service = Service(engine, settings, Metrics(), Constraints(settings))
    body = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "<think>"}], "regex": "[ab]"}
    )
    chat = asyncio.run(Conversation.prepare(service, body.task))
    request = chat.request
    assert chat.opened is opened
    inside = parser == "deepseek_r1" if opened is None else opened
    assembler = chat.assembler()
    assembler.push("hm</think>a" if inside else "a")
    assembler.finish()
    assert (assembler.thinking, assembler.content) == ("hm" if inside else "", "a")
    begin = None if inside else "<think>"
    wrapped = Grammar.regex("[ab]").after_thinking("</think>", begin)
    assert request.grammar == (Grammar.regex("[ab]") if opened is False else wrapped)


@pytest.mark.parametrize("value", ["\ud800", ["a", "\udfff"], {"a": [{"\ud800": 1}]}])
def test_lone_surrogates_are_found_anywhere(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        check_text(value, "x")
    check_text(["a", {"b": "é𝟛"}, 7, None], "x")


def test_a_timeout_is_a_504_and_a_fault_a_500() -> None:
    assert as_api_error(TimeoutError()).status == 504
    assert as_api_error(RuntimeError("broken")).body()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": -1}, "port"),
        ({"api_key": ""}, "api_key"),
        ({"max_choices": 0}, "max_choices"),
        ({"tool_call_parser": "nonesuch"}, "nonesuch"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**settings)


class Connection:
    """A request whose client leaves after so long, or stays."""

    def __init__(self, leaves_s: float) -> None:
        self.leaves_s = leaves_s

    async def receive(self) -> dict[str, str]:
        await asyncio.sleep(self.leaves_s)
        return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("leaves_s", "works_s", "ends"), [(60, 0, None), (0.01, 60, ClientGone), (60, 60, TimeoutError)]
)
def test_work_ends_with_its_client_and_with_its_time(
    leaves_s: float, works_s: float, ends: type[Exception] | None
) -> None:
    settings = ServerSettings(request_timeout_s=0.1)
    service = Service(AsyncEngine(), settings, Metrics(), Constraints(settings))
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(works_s)
            return "done"
        finally:
            ended.append("ended")

    async def run_until_disconnect() -> Any:
        return await service.run_until_disconnect(Connection(leaves_s), work())  # type: ignore[arg-type]

    with pytest.raises(ends) if ends else contextlib.nullcontext():
        assert asyncio.run(run_until_disconnect()) == "done"
    assert ended == ["ended"]


@pytest.mark.parametrize(("leaves_s", "whole"), [(0.0, False), (60.0, True)])
def test_a_stream_is_ended_once_also_before_its_first_event(leaves_s: float, whole: bool) -> None:
    ends: list[bool] = []
    sent: list[dict[str, Any]] = []

    async def lines() -> AsyncIterator[bytes]:
        yield b"data: 1"

    async def send(message: Any) -> None:
        await asyncio.sleep(0.05)
        sent.append(message)

    async def call() -> None:
        connection: Any = Connection(leaves_s)
        await Events(lines(), ends.append)({"type": "http"}, connection.receive, send)

    asyncio.run(call())
    assert ends == [whole]
    assert len(sent) == (3 if whole else 0)


def test_metrics_count_what_has_ended() -> None:
    metrics = Metrics()
    request = Request(1, (1, 2), SamplingParams(), None, 9, frozenset(), 0, 0)
    handle = AsyncRequestHandle(request, lambda _: None)
    metrics.observe(handle)
    stats = RequestStats(
        prompt_tokens=2, output_tokens=7, verifies=2, verified_tokens=6, drafted_tokens=10,
        accepted_drafts=4, accept_histogram=[0, 1, 0, 1], ttft_ms=20.0, end_to_end_ms=80.0,
        itl_ms=[30.0, 30.0], grafted_tokens=5, accepted_grafts=3, illegal_drafts=2,
    )  # fmt: skip
    handle.output = Output("text", (1,) * 7, "stop", stats)
    metrics.observe(handle)
    text = metrics.render(None, FrontState(engine_restarts=3)).decode()
    for line in (
        "overlap_spec:engine_up 0.0",
        "overlap_spec:engine_restarts_total 3.0",
        'overlap_spec:requests_total{finish_reason="abort"} 1.0',
        'overlap_spec:requests_total{finish_reason="stop"} 1.0',
        "overlap_spec:generation_tokens_total 7.0",
        "overlap_spec:spec_accepted_tokens_total 4.0",
        "overlap_spec:spec_grafted_tokens_total 5.0",
        "overlap_spec:spec_accepted_grafted_tokens_total 3.0",
        "overlap_spec:spec_illegal_draft_tokens_total 2.0",
        "overlap_spec:inter_token_latency_seconds_count 2.0",
        'overlap_spec:spec_accept_length_bucket{le="2.0"} 1.0',
        'overlap_spec:spec_accept_length_bucket{le="4.0"} 2.0',
        "overlap_spec:time_to_first_token_seconds_sum 0.02",
    ):
        assert line in text.splitlines()
    assert metrics.accept_length == 3.0
