"""The guide's pages say only what runs, and the site has each page once."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from overlap_spec import cli
from tests.support.checkpoints import write_target
from tests.support.prose import private_words, sentence_words
from tests.support.serving import FIXED, Server, shared_server
from tests.support.tiers import few

ROOT = Path(__file__).parent.parent
PAGES = ("first-steps", "structured-output", "tools", "streaming")
TEXTS = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in (*PAGES, "tutorial")}
PERSON = json.loads((ROOT / "examples" / "person.schema.json").read_text())


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[name], re.DOTALL)


def shell(block: str, server: Server) -> str:
    """What a block of calls prints, with the server's own address."""
    block = block.replace("http://127.0.0.1:30000", server.url)
    done = subprocess.run(["bash", "-ec", block], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_guide_reads_in_short_sentences_of_the_fields_words() -> None:
    """Of `python -m tests.support.prose`: the notebook and the two pages on how it is made, which
    explain their words, are for those who doubt."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    guide = re.findall(r"- ([\w-]+\.md)", nav.partition("- Notebook:")[0])
    assert {"streaming.md", "http.md", "tuning.md"} <= set(guide)
    for name in guide:
        text = (ROOT / "docs" / name).read_text()
        counts = sentence_words(text) or [0]
        assert sum(counts) / len(counts) <= 20, name
        assert private_words(text) == [], name


def test_what_counts_as_a_sentence() -> None:
    page = "# A lane of tiers\n\nOne two `lane x`. Three!\n\n- four\n- [five](room.md) grafts\n"
    assert sentence_words(f"{page}```\nsix. law.\n```\n| seven |\n") == [3, 1, 1, 2]
    assert private_words(page) == ["grafts"]


def test_the_site_has_each_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert sorted(re.findall(r"[\w-]+\.md", nav)) == pages


@pytest.mark.parametrize("name", few(PAGES, "first-steps"))
def test_blocks_of_python(name: str) -> None:
    (block,) = blocks(name, "python")
    exec(compile(block, f"{name}.md", "exec", dont_inherit=True), {"__name__": name})
    assert "assert" in block


def test_requests() -> None:
    found = {}
    for name in PAGES:
        (block,) = (one for one in blocks(name, "bash") if one.startswith("curl"))
        found[name] = shell(block, shared_server())
    assert '"content":"shipped"' in found["first-steps"].replace(": ", ":")
    message = json.loads(found["structured-output"])["choices"][0]["message"]
    assert json.loads(message["content"]) == {"name": "Maria Lopez", "age": 34}
    (call,) = json.loads(found["tools"])["choices"][0]["message"]["tool_calls"]
    assert "Vienna" in call["function"]["arguments"]
    assert found["streaming"].rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("line", few([0, 1], 0))
@pytest.mark.ci
def test_first_commands(
    line: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = blocks("first-steps", "bash")[0].splitlines()
    monkeypatch.setattr(sys, "argv", shlex.split(commands[line]))
    cli.main()
    assert capsys.readouterr().out.strip() == ["shipped", '{"name":"Anna","age":30}'][line]


@pytest.fixture
def qwen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tutorial's folder: a small random model of its architecture, and 24 chats."""
    monkeypatch.chdir(tmp_path)
    shape: dict[str, Any] = {"num_hidden_layers": 4, "head_dim": 8}
    shape["max_position_embeddings"] = 2048
    folder = tmp_path / "qwen3-0.6b"
    write_target(folder, architectures=["Qwen3ForCausalLM"], model_type="qwen3", **shape)
    Path("person.json").write_text(json.dumps(PERSON))
    chats = [{"messages": [{"role": "user", "content": f"Who is {n}?"}]} for n in range(24)]
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


@pytest.mark.ci
@pytest.mark.usefixtures("qwen")
def test_the_tutorial_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [line for block in blocks("tutorial", "bash") for line in block.splitlines()]
    assert commands.pop(0).startswith("hf download Qwen/Qwen3-0.6B --local-dir qwen3-0.6b")
    printed = []
    for command in commands[: next(i for i, c in enumerate(commands) if " serve " in c)]:
        # A random model ends its strings nowhere, and an hour is long.
        command = command.replace("--minutes 60", "--minutes 0.2 --threads 1 --batch-tokens 512")
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        if " generate " in command:
            sys.argv += ["--max-tokens", "200"]
        cli.main()
        printed.append(capsys.readouterr())
    doctor, first, train, profile, second = printed
    assert "Qwen3ForCausalLM" in doctor.out
    assert "slots,suffix" in doctor.out
    for each in (first, second):
        jsonschema.validate(json.loads(each.out), PERSON)
        assert {"accept_length", "tpot_ms"} <= json.loads(each.err.splitlines()[-1]).keys()
    assert "position" in train.out
    assert "saved as" in profile.out
    serve = next(c for c in commands if " serve " in c).replace("--port 30000", "").split()[2:]
    server = Server(*serve, *FIXED)
    try:
        calls = blocks("tutorial", "bash")[-1]
        curl, bench = calls.split("\noverlap-spec ")
        answer = json.loads(shell(curl, server))["choices"][0]
        assert json.loads(answer["message"]["content"]).keys() == {"age"}
        words = bench.replace("http://127.0.0.1:30000", server.url)
        monkeypatch.setattr(sys, "argv", ["overlap-spec", *shlex.split(words), "--requests", "4"])
        cli.main()
        assert f"server 1: {server.url}\n" in capsys.readouterr().out
    finally:
        server.terminate()
