"""The front before replicas that are functions: no Ray, no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from overlap_spec.cluster.calls import Answer, HttpCall, Messages, run_call
from overlap_spec.cluster.front import TRIES, Front, ReplicaLost
from overlap_spec.cluster.merged import COUNTS
from overlap_spec.errors import EngineUnavailable, QueueFull
from overlap_spec.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello " * 40}]}
EVENT = b'data: {"choices": []}\n\n'
Script = Callable[[HttpCall], AsyncIterator[Messages]]


def start(status: int = 200, kind: bytes = b"application/json", replica: bytes = b"r1") -> Message:
    headers = [(b"content-type", kind), (b"x-replica", replica)]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Fake:
    """Replicas that follow scripts, one a call; the last one again and again."""

    def __init__(self, *scripts: Script, answers: Sequence[Answer] = ()) -> None:
        self.scripts, self.answers = list(scripts), list(answers)
        self.calls: list[HttpCall] = []
        self.closed = 0

    async def respond(self, call: HttpCall) -> AsyncGenerator[Messages]:
        self.calls.append(call)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        try:
            async for messages in script(call):
                yield messages
        finally:
            self.closed += 1

    async def ask_all(self, call: HttpCall, timeout_s: float) -> list[Answer]:
        assert timeout_s > 0
        self.calls.append(call)
        if not self.answers:
            raise EngineUnavailable("no replica answers")
        return self.answers


class Client:
    """One request to an ASGI application."""

    def __init__(self, path: str, data: Any = None, method: str = "POST", **headers: str) -> None:
        sent = b"" if data is None else json.dumps(data).encode()
        head = [(b"host", b"localhost"), (b"content-length", str(len(sent)).encode())]
        head += [(name.encode(), value.encode()) for name, value in headers.items()]
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": head, "client": ("127.0.0.1", 9), "server": ("x", 1),
        }  # fmt: skip
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": sent, "more_body": False})
        self.messages: list[Message] = []
        self.begun = asyncio.Event()

    async def _send(self, message: Message) -> None:
        self.messages.append(message)
        self.begun.set()

    async def run(self, app: Any) -> Client:
        await app(self.scope, self.inbox.get, self._send)
        return self

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def data(self) -> Any:
        return json.loads(self.text)


def ask(replicas: Fake, client: Client, **settings: Any) -> Client:
    front = Front(replicas, ServerSettings(**settings)).guarded()
    return asyncio.run(client.run(front))


async def whole(_: HttpCall) -> AsyncIterator[Messages]:
    yield [start(), body(b'{"ok": true}')]


async def lost(_: HttpCall) -> AsyncIterator[Messages]:
    raise ReplicaLost("ActorDiedError: the replica went away")
    yield []


async def not_ready(_: HttpCall) -> AsyncIterator[Messages]:
    yield [start(503, replica=b"r7"), body(b'{"error": {"message": "restarting"}}')]


async def broken(_: HttpCall) -> AsyncIterator[Messages]:
    yield [start(kind=b"text/event-stream; charset=utf-8"), body(EVENT, True), body(EVENT, True)]
    raise ReplicaLost("ActorDiedError: the replica went away")


def test_an_answer_is_passed_on_and_its_prompt_is_known() -> None:
    replicas = Fake(whole)
    client = ask(replicas, Client(CHAT, BODY))
    assert (client.status, client.data) == (200, {"ok": True})
    (call,) = replicas.calls
    assert json.loads(call.body) == BODY
    assert len(call.blocks) == len(json.dumps(BODY["messages"])) // 64
    assert call.scope["path"] == CHAT
    replicas = Fake(whole)
    ask(replicas, Client("/v1/models", method="GET"))
    assert replicas.calls[0].blocks == ()


def test_a_lost_request_is_sent_again() -> None:
    replicas = Fake(lost, lost, whole)
    assert ask(replicas, Client(CHAT, BODY)).data == {"ok": True}
    assert len(replicas.calls) == 3
    replicas = Fake(lost)
    client = ask(replicas, Client(CHAT, BODY))
    assert len(replicas.calls) == TRIES
    assert client.status == 503
    assert client.data["error"]["code"] == "engine_unavailable"
    assert (b"retry-after", b"1") in client.messages[0]["headers"]


def test_a_replica_that_is_not_ready_is_avoided() -> None:
    replicas = Fake(not_ready, whole)
    assert ask(replicas, Client(CHAT, BODY)).status == 200
    assert [call.avoid for call in replicas.calls] == [frozenset(), frozenset({"r7"})]
    # Where none is, the last one's own answer tells why.
    replicas = Fake(not_ready)
    client = ask(replicas, Client(CHAT, BODY))
    assert (client.status, client.data) == (503, {"error": {"message": "restarting"}})
    assert len(replicas.calls) == TRIES


@pytest.mark.parametrize(
    ("path", "ends"),
    [
        (CHAT, b"data: [DONE]\n\n"),
        ("/generate", b"data: [DONE]\n\n"),
        ("/v1/messages", b'"type":"overloaded_error","message":"ActorDiedError'),
        ("/v1/responses", b'"sequence_number":2'),
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_sent_again(
    path: str, ends: bytes
) -> None:
    replicas = Fake(broken, whole)
    client = ask(replicas, Client(path, BODY))
    assert len(replicas.calls) == 1
    assert client.text.startswith(EVENT + EVENT)
    last = client.text.removeprefix(EVENT + EVENT)
    assert ends in last
    named = path in ("/v1/messages", "/v1/responses")
    assert last.startswith(b"event: error\ndata: " if named else b'data: {"error"')
    assert client.messages[-1]["more_body"] is False


def test_an_answer_that_is_cut_off_is_not_ended_as_if_it_were_whole() -> None:
    async def cut(_: HttpCall) -> AsyncIterator[Messages]:
        yield [start(), body(b'{"half', True)]
        raise ReplicaLost("gone")

    client = Client(CHAT, BODY)
    with pytest.raises(Exception, match="gone"):
        ask(Fake(cut, whole), client)
    assert client.messages[-1]["more_body"] is True


@pytest.mark.parametrize(
    ("error", "status"),
    [(QueueFull("full"), 429), (EngineUnavailable("none"), 503), (ValueError("bug"), 500)],
)
def test_errors_have_the_routes_form(error: Exception, status: int) -> None:
    async def raising(_: HttpCall) -> AsyncIterator[Messages]:
        raise error
        yield []

    client = ask(Fake(raising), Client(CHAT, BODY))
    assert (client.status, set(client.data)) == (status, {"error"})
    client = ask(Fake(raising), Client("/v1/messages", BODY))
    assert (client.status, client.data["type"]) == (status, "error")


def test_a_request_that_no_replica_takes_ends() -> None:
    async def never(_: HttpCall) -> AsyncIterator[Messages]:
        await asyncio.Event().wait()
        yield []

    replicas = Fake(never)
    front = Front(replicas, ServerSettings(request_timeout_s=0.1))
    front.grace_s = 0.0
    assert asyncio.run(Client(CHAT, BODY).run(front)).status == 504
    assert replicas.closed == 1


def test_a_client_that_leaves_ends_its_call() -> None:
    async def endless(_: HttpCall) -> AsyncIterator[Messages]:
        yield [start(kind=b"text/event-stream")]
        while True:
            await asyncio.sleep(0.001)
            yield [body(EVENT, True)]

    async def leave() -> None:
        replicas, client = Fake(endless), Client(CHAT, BODY)
        task = asyncio.ensure_future(client.run(Front(replicas, ServerSettings()).guarded()))
        await client.begun.wait()
        client.inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(task, 60)
        assert replicas.closed == 1

    asyncio.run(leave())


def test_bodies_and_keys_are_checked_before_any_replica() -> None:
    replicas = Fake(whole)
    assert ask(replicas, Client(CHAT, BODY), api_key="k").status == 401
    large = Client(CHAT, {"x": "y" * 2000})
    assert ask(replicas, large, max_body_bytes=1024).status == 413
    assert not replicas.calls
    assert ask(replicas, Client(CHAT, BODY, authorization="Bearer k"), api_key="k").status == 200


def told(replica: str, data: Any, status: int = 200) -> Answer:
    return Answer(
        replica, status, [(b"content-type", b"application/json")], json.dumps(data).encode()
    )


def health(*states: str) -> Client:
    answers = [
        told(f"r{i}", {"status": state, "restarts": i}, 200 if state == "ready" else 503)
        for i, state in enumerate(states)
    ]
    return ask(Fake(whole, answers=answers), Client("/health", method="GET"))


def test_requests_are_those_of_all_replicas() -> None:
    counts = dict.fromkeys(COUNTS, 2)
    answers = [
        told(
            name,
            {
                "totals": counts | {"step_ms": step_ms},
                "requests": [{"id": f"{name}-1"}],
                "not_shown": 1,
                "is_admin": False,
            },
        )
        for name, step_ms in (("r1", 5.0), ("r2", 7.0))
    ]
    data = ask(Fake(whole, answers=answers), Client("/requests", method="GET")).data
    assert data["requests"] == [{"id": f"{r}-1", "replica": r} for r in ("r1", "r2")]
    assert data["totals"] == dict.fromkeys(COUNTS, 4) | {"step_ms": 5.0}
    assert (data["not_shown"], data["is_admin"]) == (2, False)


def test_health_is_that_of_the_whole() -> None:
    assert (health("ready", "ready").status, health("ready", "ready").data["status"]) == (
        200,
        "ready",
    )
    some = health("restarting", "ready")
    assert (some.status, some.data["status"], some.data["restarts"]) == (200, "degraded", 1)
    assert some.data["replicas"]["r0"] == {"status": "restarting", "restarts": 0}
    none = health("restarting", "restarting")
    assert (none.status, none.data["status"]) == (503, "restarting")
    assert (health().status, health().data["status"]) == (503, "starting")


def test_metrics_have_the_replicas_label() -> None:
    page = (
        b"# HELP overlap_spec:x_total X.\n# TYPE overlap_spec:x_total counter\n"
        b'overlap_spec:x_total{kind="a"} 3.0\n'
        b"# HELP overlap_spec:h H.\n# TYPE overlap_spec:h histogram\n"
        b'overlap_spec:h_bucket{le="1.0"} 1.0\noverlap_spec:h_bucket{le="+Inf"} 2.0\n'
        b"overlap_spec:h_count 2.0\noverlap_spec:h_sum 3.5\n"
    )
    answers = [Answer(name, 200, [], page) for name in ("r1", "r2")]
    client = ask(Fake(whole, answers=answers), Client("/metrics", method="GET"))
    text = client.text.decode()
    assert text.count("# TYPE overlap_spec:x_total counter\n") == 1
    found = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    for name in ("r1", "r2"):
        assert found["overlap_spec:x_total", name] == 3.0
        assert found["overlap_spec:h_sum", name] == 3.5
    # The front's own are there also while there is no replica.
    alone = ask(Fake(whole), Client("/metrics", method="GET"))
    assert b'overlap_spec:streams_broken_total{replica="front"} 0.0' in alone.text


def test_what_is_about_all_replicas_reaches_all() -> None:
    answers = [told("r1", {"aborted": 1}), told("r2", {"aborted": 2})]
    assert ask(Fake(whole, answers=answers), Client("/abort_request", {"rid": "x"})).data == {
        "aborted": 3
    }
    refused = [told("r1", {"flushed_pages": 1}), told("r2", {"error": {}}, 403)]
    assert ask(Fake(whole, answers=refused), Client("/flush_cache", {})).status == 403
    spans = [told("r1", {"spans": [{"name": "verify"}]}), told("r2", {"spans": []})]
    timeline = ask(Fake(whole, answers=spans), Client("/timeline", method="GET")).data
    assert timeline == {"spans": [{"name": "verify", "replica": "r1"}]}
    info = [told(n, {"open_requests": 2, "state": {"open": 2}, "version": 1}) for n in ("r1", "r2")]
    whole_info = ask(Fake(whole, answers=info), Client("/server_info", method="GET")).data
    assert whole_info["open_requests"] == 4
    assert set(whole_info["replicas"]) == {"r1", "r2"}
    # Another method is the route's own business.
    assert ask(Fake(whole, answers=info), Client("/health")).data == {"ok": True}


def test_lifespan_is_answered() -> None:
    inbox, sent = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], list[Message]()

    async def receive() -> Message:
        return inbox.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    front = Front(Fake(whole), ServerSettings()).guarded()
    asyncio.run(front({"type": "lifespan"}, receive, send))
    assert [m["type"] for m in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_a_cancelled_call_tells_the_application_that_its_client_has_gone() -> None:
    seen: list[str] = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"in"
        await send(start())
        seen.append((await receive())["type"])

    async def leave() -> None:
        call = HttpCall(Client(CHAT).scope, b"in")
        batches = run_call(app, call)
        assert await anext(batches) == [start()]
        await batches.aclose()

    asyncio.run(leave())
    assert seen == ["http.disconnect"]


def test_an_applications_error_reaches_the_caller() -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        await send(start())
        raise ValueError("bug")

    async def run() -> list[Messages]:
        return [messages async for messages in run_call(app, HttpCall({}))]

    with pytest.raises(ValueError, match="bug"):
        asyncio.run(run())
