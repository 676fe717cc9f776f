"""What the commands do, run as a user runs them."""

import builtins
import contextlib
import io
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.types import Receive, Scope, Send

from overlap_spec import Engine, Grammar, SamplingParams, __version__
from overlap_spec.cli.batch import settled
from overlap_spec.cli.chat import Chat
from overlap_spec.cli.profile import costs, in_units, verdict
from overlap_spec.cli.request import ConstraintFlags
from overlap_spec.cli.terminal import loading
from overlap_spec.doctor import cpu_features, memory
from overlap_spec.errors import InvalidRequest
from overlap_spec.speculation.cost import CostModel

Run = Callable[[str], tuple[int, str, str]]
SCHEMA = '{"type":"array","items":{"type":"integer","minimum":0,"maximum":9},"maxItems":4}'


@pytest.fixture
def model(tiny: dict[str, Any]) -> str:
    """Flags of a small random model."""
    return f"--model {tiny['model']} --draft {tiny['draft']} --adaptive static"


@pytest.mark.parametrize("prompt", ["", "-"])
def test_an_empty_standard_input_is_no_prompt(
    monkeypatch: pytest.MonkeyPatch, run: Run, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    code, _, told = run(f"generate {prompt}")
    assert code != 0
    assert "standard input is empty" in " ".join(told.split())


def test_an_unknown_flag_is_named_with_what_was_meant(run: Run) -> None:
    code, _, told = run("serve --prot 1")
    assert code == 2
    assert "No such option: --prot (Possible options: " in told


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"overlap-spec {__version__}\n", "")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("overlap-spec ser", "serve"), ("overlap-spec serve --overlap once", "once-sync")],
)
def test_shells_complete_commands_and_values(typed: str, offered: str) -> None:
    asked = {
        "_OVERLAP_SPEC_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    code = "import sys; sys.argv[0] = 'overlap-spec'; from overlap_spec import cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert done.stdout.split() == [offered], done.stderr


def test_generate_reads_files_and_writes_one(model: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("count")
    (tmp_path / "schema.json").write_text(SCHEMA)
    files = f"--prompt-file {tmp_path}/prompt.txt --schema {tmp_path}/schema.json"
    sampling = "--temperature 1.5 --top-p 0.95 --top-k 50 --min-p 0.01 --seed 5 --max-tokens 40"
    command = f"generate {files} {sampling} --system brief {model} --n 3 --stats"
    code, out, err = run(f"{command} --output {tmp_path}/out.txt")
    assert (code, out, len(err.splitlines())) == (0, "", 3)
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert len(lines) == 3
    assert len(set(lines)) > 1, "seeds count up"
    for line in lines:
        assert all(0 <= value <= 9 for value in json.loads(line))
    code, out, _ = run(command.replace("--n 3", "--n 1"))
    assert (code, out.splitlines()) == (0, lines[:1])


def test_generate_streams_to_a_terminal(
    model: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece is flushed before the next comes."""

    class Terminal(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.flushed: list[str] = []

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            self.flushed.append(self.getvalue())

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert run(f"generate go --regex [a-z]{{40}} {model}")[0] == 0
    texts = list(dict.fromkeys(screen.flushed))
    assert len(texts) > 5
    assert all(screen.getvalue().startswith(text) for text in texts)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate go --prompt-file x", "give one of them"),
        ("generate --prompt-file /nonexistent", "--prompt-file /nonexistent: no such file"),
        ("generate ''", "prompt: PROMPT is empty: give a prompt there"),
        ("generate --prompt-file /dev/null", "--prompt-file /dev/null is empty"),
        ("generate go --system s --raw", "system: --system needs the chat template"),
        ("generate go --schema {tmp}/bad.json", "--schema {tmp}/bad.json: $.items.type: 'integr'"),
        ("generate go --schema {tmp}/none.json", "none.json: no such file or directory, and"),
        ("generate go --ebnf {tmp}/bad.json {model}", "--ebnf {tmp}/bad.json: EBNF line 1"),
        ("generate go --schema {tmp}/behind.json {model}", "{tmp}/behind.json: regex '(?<=a)b'"),
        ("generate go --tools {tmp}/bad.json", "--tools {tmp}/bad.json: a JSON list"),
        ("generate go --tools {tmp}/half.json", "--tools {tmp}/half.json: the file is not JSON: "),
        ("generate go --tools {tmp}/tools.json {model}", "name it with --tool-call-parser"),
        ("generate go --output {tmp}/no/out.txt", "--output {tmp}/no/out.txt: no such file"),
        ("generate go --top-p 2", "error: top_p must be a finite number in"),
        ("generate go --schema '{broken'", "schema"),
        ("generate go --schema ''", "the schema is not JSON"),
        ("generate go --regex '' --choice b", "only one constraint"),
        ("profile --max-running-requests 0", "max_running_requests must be"),
        ("generate go --regex a --choice b", "only one constraint"),
        ("generate go --model /nonexistent", "no such folder"),
        ("generate go --overlap sometimes {model}", "overlap"),
        ("generate go --speculative-algorithm medusa {model}", "must be one of"),
        ("batch {tmp}/none.jsonl out.jsonl", "none.jsonl: no such file"),
        ("serve a --model b", "name the model once"),
        ("serve --port 99999", "port must be between 0 and 65535: 99999"),
        ("serve --config /nonexistent.yaml", "--config /nonexistent.yaml: "),
        ("serve --tool-call-parser nonesuch", "unknown tool format 'nonesuch'; known are: "),
        ("serve --reasoning-parser nonesuch", "unknown reasoning parser 'nonesuch'"),
        ("serve --whitespace lots", "whitespace must be compact, bounded or an indent"),
        ("serve --log-level loud", "log_level must be one of debug, info, warning, error"),
        ("train --target {tmp} --data x.jsonl --out {tmp}/out", "not a Hugging Face checkpoint"),
    ],
)  # fmt: skip
def test_faults_of_the_command_line_are_one_line(
    command: str, words: str, model: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text('{"type":"array","items":{"type":"integr"}}')
    (tmp_path / "behind.json").write_text('{"type":"string","pattern":"(?<=a)b"}')
    (tmp_path / "tools.json").write_text("[]")
    (tmp_path / "half.json").write_text('[{"type":')
    fill = {"{tmp}": str(tmp_path), "{model}": model}
    for name, value in fill.items():
        command, words = command.replace(name, value), words.replace(name, value)
    code, out, err = run(command)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.parametrize(("text", "schema"), [("true", True), (" false\n", False)])
def test_a_schema_of_one_word_is_no_file(text: str, schema: bool) -> None:
    assert ConstraintFlags(schema=text).grammar(None) == Grammar.json_schema(schema)


def test_a_trace_that_cannot_be_written_is_one_line(model: str, run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "no" / "trace.json"
    code, _, told = run(f"generate go {model} --max-tokens 2 --trace {trace}")
    assert (code, told) == (2, f"error: --trace {trace}: no such file or directory\n")


def test_a_taken_port_is_one_line(run: Run, tiny: dict[str, Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, told = run(f"serve {tiny['model']} --port {port}")
    assert code == 2
    assert told == f"error: port: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def line(name: Any, body: Any = None, **more: Any) -> str:
    body = {"prompt": "go", "max_tokens": 4} if body is None else body
    fields = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(fields | more)


def results(path: Path) -> dict[str | None, list[dict[str, Any]]]:
    found: dict[str | None, list[dict[str, Any]]] = {}
    for text in path.read_text().splitlines():
        data = json.loads(text)
        found.setdefault(data["custom_id"], []).append(data)
    return found


def test_batch(model: str, run: Run, tmp_path: Path) -> None:
    asked, told = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 4, "seed": 1}
    lines = [
        line("whole", chat, url="/v1/chat/completions"),
        *(line(f"text{number}") for number in range(12)),
        line("field", {"prompt": "go", "max_tokns": 4}),
        line("method", method="GET"),
        line("url", url="/v1/embeddings"),
        line("stream", {"prompt": "go", "stream": True}),
        line("more", priority=1),
        line("body", []),
        line("text0"),
        line(7),
        "{",
        "",
    ]
    asked.write_text("\n".join(lines))
    command = f"batch {asked} {told} {model} --max-running-requests 2"
    code, out, _ = run(command)
    assert code == 1
    assert "13 answered, 9 failed" in out
    found = results(told)
    assert found["whole"][0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    good = [name for name in found if name == "whole" or str(name).startswith("text")]
    assert len(good) == 13
    for name in good:
        (result,) = found[name]
        assert result.keys() == {"id", "custom_id", "response", "error"}
        assert result["response"]["status_code"] == 200
        assert result["error"] is None
    refused = found["field"][0]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["param"] == "max_tokns"
    messages = {name: found[name][0]["error"]["message"] for name in ("method", "url", "body")}
    assert messages == {
        "method": "line 15: method: Input should be 'POST'",
        "url": "line 16: url: Input should be '/v1/chat/completions', '/v1/completions' or "
        "'/v1/responses'",
        "body": "line 19: body: Input should be a valid dictionary",
    }
    nameless = [result["error"]["message"] for result in found[None]]
    assert [text.partition(":")[0] for text in nameless] == ["line 20", "line 21", "line 22"]


def test_a_full_disk_stops_a_batch_in_one_line(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    most = 20_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        body = json.dumps({"id": "x", "text": "y" * 3000}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    @contextlib.asynccontextmanager
    async def application(*_: Any) -> AsyncIterator[Any]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            yield app
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(import_module("overlap_spec.cli.batch"), "application", application)
    asked, told = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(line(f"text{number}") + "\n" for number in range(20)))
    error = f"error: {told}: file too large; make room, and the same command goes on\n"
    assert run(f"batch {asked} {told}") == (2, "", error)
    assert told.stat().st_size == most
    # With room, the same command asks for the rest.
    most = 2**20
    kept = len(told.read_text().splitlines()) - 1
    code, out, _ = run(f"batch {asked} {told}")
    assert code == 0
    assert f"{20 - kept} answered, 0 failed, {kept} were there" in out
    assert sorted(results(told), key=str) == sorted(f"text{number}" for number in range(20))


def test_a_failed_answer_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = [{"custom_id": str(s), "response": {"status_code": s}} for s in (200, 400, 503)]
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    assert settled(path) == {"200"}
    assert len(path.read_text().splitlines()) == 1


def test_an_answer_with_ends_of_lines_of_unicode_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = {"custom_id": "a", "response": {"status_code": 200, "body": "\u2028\x85"}}
    path.write_text(json.dumps(result, ensure_ascii=False) + "\n", "utf-8")
    assert settled(path) == {"a"}
    assert json.loads(path.read_text("utf-8")) == result


@pytest.mark.parametrize("text", ["name,age\nAnna,30\n", f"{line('a')}\n"])
def test_a_file_of_something_else_is_not_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"in\.jsonl: line 1 is no result of a batch"):
        settled(path)
    assert path.read_text() == text


@pytest.fixture(scope="module")
def engine(tiny: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**tiny, num_steps=3) as made:
        yield made


@pytest.fixture
def chat(engine: Engine) -> Chat:
    console = Console(file=io.StringIO(), soft_wrap=True, highlight=False)
    constraint, sampling = ConstraintFlags(), SamplingParams(max_tokens=12, temperature=0.0)
    made = Chat(engine, "tiny", constraint, sampling, None, console)
    made.start()
    return made


def shown(chat: Chat) -> str:
    assert isinstance(chat.console.file, io.StringIO)
    return chat.console.file.getvalue()


def test_a_chat_remembers_and_starts_again(chat: Chat, engine: Engine) -> None:
    chat.take("go")
    chat.take("on")
    said = [message["content"] for message in chat.messages]
    first = engine.generate("go", sampling={"max_tokens": 12, "temperature": 0.0}).text
    again = engine.generate(chat.messages[:3], sampling={"max_tokens": 12, "temperature": 0.0})
    assert said == ["go", first, "on", again.text]
    assert shown(chat) == f"{first}\n{again.text}\n"
    chat.take("/system be brief")
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    chat.take("/new")
    assert len(chat.messages) == 1


def test_a_chats_constraints(chat: Chat) -> None:
    chat.take("/choice left | right")
    chat.take("go")
    chat.take("/regex [ab]{5}")
    chat.take("go")
    chat.take("/schema {")
    chat.take("/nope")
    chat.take("go")
    first, second, wrong, unknown, third, _ = shown(chat).split("\n")
    assert first in ("left", "right")
    assert set(second) <= set("ab")
    assert wrong.startswith("error: the schema is not JSON")
    assert unknown == "error: there is no command /nope; /help lists them"
    assert len(third) == 5, "a wrong constraint leaves the one before"
    chat.take("/free")
    assert chat.constraint.grammar(None) is None


def test_a_chat_colours_tokens(engine: Engine) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    constraint, sampling = ConstraintFlags(regex="abcdefgh[xy]{3}"), SamplingParams(max_tokens=20)
    chat = Chat(engine, "tiny", constraint, sampling, None, screen)
    chat.take("go")
    assert isinstance(screen.file, io.StringIO)
    codes = screen.file.getvalue()
    assert "38;2;31;174;125" in codes, "the colour of forced tokens"
    assert "tokens, accept length" in codes


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    chat: Chat, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = engine.step, []

    def interrupted() -> bool:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    chat.take("/regex [a-z]{200}")
    chat.sampling = SamplingParams()
    chat.take("go")
    assert shown(chat).endswith(" (stopped)\n")
    assert chat.messages == []
    assert engine.core.scheduler.allocator.in_use == 0


def test_a_chat_reads_lines_to_the_end(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = ["/choice one", "", KeyboardInterrupt(), "go", EOFError()]

    def read(_: str) -> str:
        found = lines.pop(0)
        if isinstance(found, BaseException):
            raise found
        return str(found)

    monkeypatch.setattr(builtins, "input", read)
    chat.run()
    assert shown(chat) == "\none\n"
    assert lines == []


def test_nothing_spins_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with loading(None):
        pass
    assert capsys.readouterr().err == ""


def test_a_spinner_ends_before_the_first_line_of_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    log = logging.getLogger("spinner")
    log.setLevel(logging.INFO)
    with loading("a model", until=("spinner",)):
        time.sleep(0.3)
        before = capsys.readouterr().err
        log.info("serving")
        capsys.readouterr()
        time.sleep(0.3)
        assert capsys.readouterr().err == ""
    assert "loading a model …" in before
    assert log.handlers == []


def test_doctor_reads_processor_and_memory(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("flags : fpu avx2 avx512f avx512_vnni amx_bf16\n")
    assert cpu_features(tmp_path / "cpu") == (
        "avx2, avx512f, avx512_vnni, amx_bf16 (bfloat16, --quantization int8 and int4)"
    )
    assert cpu_features(tmp_path / "none").startswith("unknown")
    (tmp_path / "cpu").write_text("flags : fpu")
    assert cpu_features(tmp_path / "cpu") == "none (float32 alone)"
    (tmp_path / "mem").write_text("MemTotal: 8388608 kB\nMemAvailable: 2097152 kB\n")
    assert memory(tmp_path / "mem") == "2.0 of 8.0 GiB available"
    (tmp_path / "mem").write_text("MemTotal")
    assert memory(tmp_path / "mem").startswith("unknown")


def test_doctor_ends_with_1_where_something_is_missing(run: Run) -> None:
    code, told, _ = run("doctor --model /nonexistent")
    assert code == 1
    for name in ("llguidance", "outlines-core", "cpu features", "memory"):
        assert name in told
    assert "to mend:\ntarget weights: " in told


def test_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    from overlap_spec import doctor

    monkeypatch.setattr(doctor, "libraries", lambda: ["torch", "nonesuch"])
    code, told, _ = run("doctor")
    assert code == 1
    assert "to mend:\nnonesuch: not installed: pip install nonesuch" in told
    monkeypatch.setattr(doctor, "libraries", list)
    monkeypatch.setattr(doctor, "_device", list)
    monkeypatch.setattr(doctor, "_weights", lambda *_: [])
    code, told, _ = run("doctor")
    assert code == 0
    assert "all is fine; try: overlap-spec generate" in told


def test_a_profile_is_told_in_units_and_with_a_verdict() -> None:
    model = CostModel(10.0, 0.0123, 2e-5, 0.8, 0.005, 0.0, worst_error=0.625)
    assert [(about, in_units(ms)) for about, ms in costs(model)] == [
        ("a verify pass by itself", "10.0 ms"),
        ("each row in it", "12.3 µs"),
        ("each 1,000 tokens of context", "20.0 µs"),
        ("a draft step by itself", "800 µs"),
        ("each token in it", "5.00 µs"),
    ]
    assert [in_units(ms) for ms in (3e-5, 0.99951, 999.9, 61_234.0)] == [
        "30 ns", "1.00 ms", "1.00 s", "61.2 s",
    ]  # fmt: skip
    # By hand: 10 + 0.0123, and 10 + 6 × 0.0123 + 5 × (0.8 + 0.005).
    assert verdict(model, 1) == [
        "1 at once: a step without drafts takes 10.0 ms, with 5 14.1 ms: they pay where a verify "
        "gives over 1.41 tokens",
        "the worst of the measured times is 62% off: measure again without other work",
    ]
    told = verdict(replace(model, draft=0.0, draft_branch=0.0, worst_error=None), 4)
    assert [line.partition(":")[0] for line in told] == ["1 at once", "4 at once"]
    assert told[0].endswith("nothing drafts: name a --draft")
