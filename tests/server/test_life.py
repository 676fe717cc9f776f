"""A server's life: limits, clients that leave, a killed engine, and its end."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main

from overlap_spec.cli import app
from overlap_spec.cli.flags import config_values
from overlap_spec.errors import ConfigError
from overlap_spec.ipc.process import EngineProcess
from tests.support.serving import FIXED, Server, error_of, raw, shared_server, wait_for

CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer secret"}
HI = [{"role": "user", "content": "hi"}]
# Runs until somebody ends it.
ENDLESS: dict[str, Any] = {"messages": HI, "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("config")
    config, template = folder / "serve.yaml", folder / "chat.jinja"
    template.write_text("<|user|>{{ messages[-1].content }}!<|end|><|assistant|>")
    config.write_text(
        "served-model-name: from-the-file\nmax_running_requests: 2\nmax_queued_requests: 2\n"
        "cors_origin: ['http://page.example']\ndrain_timeout_s: 20\nport: 1\n"
        f"reasoning-parser: qwen3\nchat-template: {template}\n"
    )
    made = Server("--config", str(config), "--api-key", "secret")
    made.headers = KEY
    yield made
    made.kill()


def test_the_file_and_the_flags_are_both_heard(server: Server) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert model["id"] == "from-the-file"
    info = server.get("/server_info").json()
    assert info["engine"]["max_running_requests"] == 2
    assert info["server"]["api_key"] == "set"
    assert info["speculative_algorithm"] == "eagle3"
    tokens = server.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["text"] == "hi!"


def test_the_active_length_is_told_and_targets_are_counted(server: Server) -> None:
    body = {"messages": HI, "max_tokens": 24, "ignore_eos": True, "tpot_slo_ms": 1e6}
    assert server.post(CHAT, body).status_code == 200
    for wrong in (0, "fast"):
        reply = server.post(CHAT, body | {"tpot_slo_ms": wrong})
        assert reply.status_code == 400
        assert "tpot_slo_ms" in reply.text
    info, metrics = server.get("/server_info").json(), server.get("/metrics").text
    active = info["state"]["speculation"]["active"]
    assert info["speculative_num_steps"] == active["steps"]
    assert info["speculative_policy"] == "auto"
    assert info["speculative_reason"] == active["reason"]
    assert info["speculative_observed_accept_length"] >= 1
    assert info["speculative_observed_step_ms"] > 0
    assert "overlap_spec:tpot_slo_requests_total 1.0" in metrics
    assert "overlap_spec:tpot_slo_attained_total 1.0" in metrics
    assert 'overlap_spec:spec_step_accept_length{kind="observed"}' in metrics
    assert f"overlap_spec:spec_active_num_steps {float(active['steps'])}" in metrics


def test_an_answer_behind_thinking_keeps_to_its_grammar(server: Server) -> None:
    body = {"messages": HI, "structured_outputs": {"choice": ["left", "right"]}}
    (choice,) = server.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"] in ("left", "right")
    assert choice["message"]["reasoning_content"] is None


@contextlib.contextmanager
def streams(server: Server, count: int) -> Iterator[list[Iterator[str]]]:
    """Endless streams, each of which has begun."""
    with contextlib.ExitStack() as stack:
        lines = []
        for _ in range(count):
            body = ENDLESS | {"stream": True}
            reply = stack.enter_context(
                httpx.stream("POST", server.url + CHAT, json=body, headers=KEY, timeout=60)
            )
            assert reply.status_code == 200
            lines.append(line for line in reply.iter_lines() if line)
            next(lines[-1])
        yield lines


def test_clients_that_leave_free_their_pages(server: Server) -> None:
    with streams(server, 2):
        wait_for(lambda: server.state()["running"] == 2)
        assert server.state()["pages_in_use"] > 0
    server.settle()
    # Also one that waits for a whole answer.
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json=ENDLESS, headers=KEY, timeout=0.5)
    server.settle()
    metrics = server.get("/metrics").text
    assert 'overlap_spec:requests_total{finish_reason="abort"}' in metrics
    assert "overlap_spec:client_disconnects_total" in metrics


def asking(body: dict[str, Any], missing: int = 0) -> bytes:
    """A request as it goes over the wire, of whose body some bytes never come."""
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content) + missing}\r\n\r\n".encode() + content


# What clients have said when they leave, and how long they wait for an answer.
NEW = {f"property_{i}": {"type": "string"} for i in range(60)}
LEAVING = (
    (b"POST /generate HTTP/1.1\r\nHost: local", 0.0),
    (asking({"messages": HI}, missing=2**20), 0.0),
    (asking(ENDLESS), 0.0),
    (asking(ENDLESS | {"n": 2}), 0.3),
    (asking(ENDLESS | {"stream": True, "logprobs": True, "top_logprobs": 20}), 0.3),
    (asking({"messages": HI, "structured_outputs": {"json": {"properties": NEW}}}), 0.03),
)


@pytest.mark.ci
def test_clients_that_leave_at_every_stage_leave_nothing() -> None:
    made = Server()
    try:
        for turn in range(9):
            for said, stays_s in LEAVING:
                with raw(made.url, said):
                    time.sleep(stays_s)
            if turn == 0:
                made.settle()
                before = made.metric("front_resident_bytes")
        made.settle()
        assert made.metric("front_resident_bytes") < before + 40 * 2**20
        assert 'overlap_spec:requests_total{finish_reason="abort"}' in made.get("/metrics").text
        assert made.metric("client_disconnects_total") > 10
        wait_for(lambda: made.post(CHAT, {"messages": HI, "max_tokens": 2}).status_code == 200, 5)
    finally:
        made.kill()


def test_a_full_queue_is_429(server: Server) -> None:
    with streams(server, 4):
        reply = server.post(CHAT, {"messages": HI})
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "queue_full"
        assert int(reply.headers["retry-after"]) >= 1
        assert server.get("/health").status_code == 200
        assert server.state()["waiting"] == 2
    server.settle()
    assert server.post(CHAT, {"messages": HI, "max_tokens": 1}).status_code == 200
    reply = server.post(CHAT, {"messages": HI, "n": 5, "max_tokens": 400, "ignore_eos": True})
    assert reply.status_code == 429
    server.settle()


@pytest.mark.ci
def test_a_killed_engine_is_503_and_comes_back(server: Server) -> None:
    pid = server.state()["pid"]
    asked = server.later(CHAT, ENDLESS)
    with streams(server, 1) as (lines,):
        wait_for(lambda: server.state()["running"] == 2)
        os.kill(pid, signal.SIGKILL)
        rest = list(lines)
    assert "engine_unavailable" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    error = error_of(asked.result(20), 503)
    assert error["code"] == "engine_unavailable"
    assert "send the request again" in error["message"]
    health = server.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    refused = server.post(CHAT, {"messages": HI})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert "overlap_spec:engine_up 0.0" in server.get("/metrics").text
    assert server.get("/server_info").json()["state"] is None
    wait_for(lambda: server.get("/health").status_code == 200, 90)
    assert server.state()["pid"] != pid
    assert server.get("/health").json()["restarts"] == 1
    assert server.post(CHAT, {"messages": HI, "max_tokens": 3}).status_code == 200
    assert server.get("/health_generate").status_code == 200
    server.settle()


def test_sigterm_lets_what_runs_end(server: Server) -> None:
    pid = server.state()["pid"]
    folders = set(Path(tempfile.gettempdir()).glob("overlap-spec-*"))
    body = ENDLESS | {"max_tokens": 300, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, headers=KEY, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
        rest = list(lines)
    assert '"finish_reason":"length"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(set(Path(tempfile.gettempdir()).glob("overlap-spec-*")) & folders) < len(folders)


@pytest.mark.ci
def test_sigterm_ends_long_streams_with_an_error() -> None:
    made = Server(*FIXED, "--drain-timeout-s", "1")
    body = ENDLESS | {"stream": True}
    with contextlib.ExitStack() as stack:
        stack.callback(made.kill)
        streamed = [
            stack.enter_context(httpx.stream("POST", made.url + CHAT, json=body, timeout=60))
            for _ in range(3)
        ]
        lines = [(line for line in reply.iter_lines() if line) for reply in streamed]
        for each in lines:
            next(each)
        asked = made.later(CHAT, ENDLESS)
        wait_for(lambda: made.state()["running"] == 4)
        made.process.send_signal(signal.SIGTERM)
        for each in lines:
            rest = list(each)
            assert "the server ends" in rest[-2]
            assert json.loads(rest[-2][6:])["error"]["code"] == "engine_unavailable"
            assert rest[-1] == "data: [DONE]"
        assert asked.result(20).status_code == 503
        assert made.process.wait(20) == 0


def test_a_grammars_own_fault_is_a_400() -> None:
    pattern = "x0" + r"[\s\S\w\W]{0,4000}" * 100
    server = shared_server()
    for name in ("/v1/completions", CHAT):
        prompt = {"messages": HI} if name == CHAT else {"prompt": "hi"}
        reply = server.post(name, prompt | {"regex": pattern, "max_tokens": 2000})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["code"] == "grammar_failed"
        assert "simplify" in reply.json()["error"]["message"]
    assert server.post(CHAT, {"messages": HI, "max_tokens": 2}).status_code == 200


@pytest.mark.ci
@pytest.mark.clock
@pytest.mark.parametrize("moment", ["its first word", "the engine's folder"])
def test_sigterm_while_the_engine_loads(moment: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "overlap_spec", "serve", "--port", "0"]
    # A folder of its own: other servers come and go beside it.
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=own)
    assert process.stderr is not None
    assert process.stderr.readline()
    if moment == "the engine's folder":
        wait_for(lambda: list(tmp_path.glob("overlap-spec-*")), 60)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors


async def _ends_with_its_client() -> None:
    engine = await EngineProcess.start({})
    assert engine.process.stdin is not None
    assert engine._folder.is_dir()
    engine.process.stdin.close()
    await asyncio.wait_for(engine.process.wait(), 60)
    assert not engine._folder.exists()
    await engine.end()


@pytest.mark.ci
def test_an_engine_whose_client_is_gone_ends() -> None:
    asyncio.run(_ends_with_its_client())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "prot: 1", "unknown key 'prot'"),
        ("a.toml", "host = [1]", "one value or a list"),
        ("a.toml", "host = ", "Invalid value"),
        ("a.yaml", "- host", "a mapping"),
    ],
)
def test_wrong_files_name_the_key(tmp_path: Path, name: str, text: str, words: str) -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        config_values(tmp_path / name, command.params)
    (tmp_path / "good.toml").write_text('host = "0.0.0.0"\nspeculative-num-steps = 3\ndraft = "x"')
    assert config_values(tmp_path / "good.toml", command.params) == {
        "host": "0.0.0.0", "num_steps": 3, "draft": "x",
    }  # fmt: skip
