"""The demo's inputs come out right, and an answer that is not is called so."""

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from overlap_spec import Engine

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_input_of_each_kind_is_answered_right(demo: ModuleType) -> None:
    """Where one is not, the message has those that could stand in its place."""
    with Engine() as engine:
        for kind, inputs in demo.INPUTS.items():
            assert len(inputs) >= 3, kind
            right = []
            for case in inputs:
                text = demo.run(engine, kind, case["prompt"]).text
                valid, is_right = demo.check(kind, text, case["answer"])
                assert valid, (kind, text)
                right += [case["prompt"]] if is_right else []
            assert right, f"{kind}: none of the inputs comes out right"
            assert right[0] == inputs[0]["prompt"], f"{kind}: right are {right}"


@pytest.mark.ci
def test_the_demo_tells_valid_and_right_apart(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([]) == 0
    told = capsys.readouterr().out
    assert told.count("valid, right") == len(demo.INPUTS) - 1
    case = {"prompt": demo.INPUTS["status"][0]["prompt"], "answer": "delivered"}
    monkeypatch.setattr(demo, "INPUTS", {"status": [case]})
    assert demo.main([]) == 1
    assert 'valid, WRONG, expected "delivered"' in capsys.readouterr().out
    assert demo.check("status", "lost", "lost") == (False, True)
    assert demo.check("person", '{"name":"A"}', {"name": "A"}) == (False, False)


def test_the_demo_for_machines(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line an input, of both ways to the same text."""
    kinds = ("person", "status")
    monkeypatch.setattr(demo, "INPUTS", {kind: demo.INPUTS[kind] for kind in kinds})
    assert demo.main(["--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == list(kinds)
    for line in lines:
        assert line["text"] == line["answer"] or json.loads(line["text"]) == line["answer"]
        assert line["same_text"]
        assert line["passes"] <= line["passes_plain"] < line["tokens"]


def test_make_demo_says_that_it_installs() -> None:
    """Before anything that takes long or prints nothing."""
    done = subprocess.run(
        ["make", "--dry-run", "--assume-new=pyproject.toml", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    commands = done.stdout.splitlines()
    said = next(i for i, line in enumerate(commands) if line.startswith("echo"))
    assert said < next(i for i, line in enumerate(commands) if "pip install" in line)
    assert said < next((i for i, line in enumerate(commands) if "-m venv" in line), len(commands))
