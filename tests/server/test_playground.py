"""The playground in a real browser, against a real server."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.browser import Browser
from tests.support.playground import (
    CTRL,
    IDLE,
    SOURCES,
    answer,
    errors,
    needs_browser,
    run,
    select,
    spans,
    stream,
    text,
    write,
)
from tests.support.serving import Server
from tests.support.tiers import few

ROOT = Path(__file__).parents[2]


def test_page_asks_for_nothing_from_elsewhere() -> None:
    html = SOURCES["index.html"]
    whole = "".join(SOURCES.values())
    assert set(re.findall(r"https?://[^\"' ]+", whole)) == {"http://www.w3.org/2000/svg"}
    loaded = set(re.findall(r"(?:src|href)=\"([^\"]*)\"", html))
    assert loaded == {"data:,", "playground/style.css", "playground/main.js"}
    assert set(re.findall(r'from "([^"]*)"', whole)) <= {f"./{name}" for name in SOURCES}
    assert not re.search(r"@import|\burl\((?!#)|innerHTML|import\s*\(|eval\(", whole)
    # What the page's own policy forbids would be silently left out.
    assert "unsafe" not in html
    assert not re.search(r"\sstyle=|<style|\son\w+=", html)
    scripts = "".join(source for name, source in SOURCES.items() if name.endswith(".js"))
    assert not re.search(r"\bstyle:|\"style\"", scripts)
    names = re.findall(r"<label for=\"([^\"]+)\"", html)
    assert names
    assert all(f'id="{name}"' in html for name in names)


def test_every_element_that_the_scripts_name_is_there() -> None:
    ids = re.findall(r'id="([^"]+)"', SOURCES["index.html"])
    assert len(ids) == len(set(ids))
    named = re.findall(r'\$\("([^"]+)"\)', "".join(SOURCES.values()))
    assert named
    assert set(named) <= set(ids)


def test_only_the_pages_own_files_are_handed_out(server: Server) -> None:
    for name, content in SOURCES.items():
        if name == "index.html":
            continue
        reply = server.get(f"/playground/{name}")
        assert reply.text == content
        kind = "text/css" if name.endswith("css") else "text/javascript"
        assert reply.headers["content-type"].startswith(kind)
    for name in ("nonesuch.js", "index.html", "..%2fadmin.py", "%2e%2e/admin.py"):
        assert httpx.get(f"{server.url}/playground/{name}").status_code == 404


@needs_browser
def test_a_schema_in_gives_valid_json_out(page: Browser, server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    select(page, "kind", "json_schema")
    write(page, "prompt", "Anna Weber, a 29-year-old nurse from Graz, works for Alpine Care.")
    write(page, "source", json.dumps(schema))
    write(page, "seed", "7")
    run(page)
    jsonschema.validate(json.loads(text(page, "output")), schema)
    assert text(page, "verdict") == "✓ whole JSON (finish_reason stop)"
    assert json.loads(text(page, "parsed")) == json.loads(text(page, "output"))
    assert int(page.evaluate("document.querySelector('dd').textContent")) > 5
    assert re.search(
        r"wait for the grammar [\d.]+ ms · grammar [\d.]+ ms", text(page, "timeline-note")
    )
    lanes = page.evaluate("[...document.querySelectorAll('#lanes div')].map(d => d.textContent)")
    # Where torch has all threads, prompts are computed in the lane of the rest.
    assert [lane for lane in lanes if lane != "prefill"] == [
        "host", "plan", "compute", "copy", "grammar",
    ]  # fmt: skip
    assert page.evaluate("document.querySelectorAll('#scroll rect.span').length") > 20
    sent = [e["request"] for e in page.told("Network.requestWillBeSent")]
    body = next(json.loads(r["postData"]) for r in sent if r["url"].endswith("completions"))
    assert body["seed"] == 7
    assert body["response_format"]["json_schema"]["schema"] == schema
    classes = page.evaluate("[...document.querySelectorAll('#output span')].map(s => s.className)")
    assert set(classes) <= {f"token {o}" for o in ("drafted", "bonus", "forced", "grafted")}
    assert "token drafted" in classes
    assert errors(page) == []
    server.settle()


# Of each of the page's examples a part of its prompt, the constraint that it brings, and what the
# output must hold.
TEXTS = {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "maximum": 130}}
PERSON = {
    "type": "object",
    "properties": {**TEXTS, "city": TEXTS["name"]},
    "required": ["name", "age", "city"],
}
TOOLS = json.loads((ROOT / "examples" / "tools.json").read_text())
EXAMPLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "A person: JSON schema": (
        "Maria Lopez is 34 years old and lives in Lisbon.",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": PERSON},
            }
        },
        '{"name":"Maria Lopez","age":34,"city":"Lisbon"}',
    ),
    "A status: choice": (
        "What is the status? The order AB-1234 placed by David Clark is now shipped.",
        {"structured_outputs": {"choice": ["pending", "shipped", "delivered", "cancelled"]}},
        "shipped",
    ),
    "Any object: JSON": ("Extract name, age and city: Anna is 30 and lives in Rome.",
        {"response_format": {"type": "json_object"}}, '"name":"Anna"'),
    "A date: regex": (
        "The Robotics Fair takes place on 2025-03-14 at 18:30 in Oslo. Give only the date.",
        {"regex": r"20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"},
        "2025-03-14",
    ),
    "Yes or no: grammar": ("The flight is delayed. Is the flight delayed?",
        {"ebnf": 'root ::= "yes" | "no"'}, "yes"),
    "The weather: tools": ("What is the weather in Vienna in celsius?", {"tools": TOOLS[:1]},
        '"city":"Vienna","unit":"celsius"'),
    "A greeting: free text": ("Good morning", {}, "Good morning! What should I extract?"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_answered_right(name: str, server: Server) -> None:
    """What the page sends for them, without a browser."""
    prompt, constraint, wanted = EXAMPLES[name]
    assert f'"{name}": ["' in SOURCES["examples.js"]
    assert f'"{prompt}"' in SOURCES["examples.js"]
    message = {"role": "user", "content": prompt}
    answer = server.post("/v1/chat/completions", {"messages": [message], **constraint})
    reply = answer.json()["choices"][0]["message"]
    calls = [call["function"]["arguments"] for call in reply.get("tool_calls") or []]
    assert wanted in "".join([reply["content"] or "", *calls])
    server.settle()


@needs_browser
def test_stop_aborts_the_request(page: Browser, server: Server) -> None:
    select(page, "kind", "regex")
    write(page, "source", "[a-z]{3000}")
    write(page, "max-tokens", "3500")
    page.press("Enter", 13, CTRL)
    page.wait("document.getElementById('output').textContent.length > 10")
    assert page.evaluate("document.getElementById('run').disabled")
    page.press("Escape", 27)
    page.wait(IDLE)
    assert text(page, "verdict") == "stopped"
    server.settle()
    assert len(text(page, "output")) < 3000
    assert errors(page) == []


@needs_browser
def test_faults_are_told_beside_their_field(page: Browser, server: Server) -> None:
    select(page, "kind", "json_schema")
    write(page, "source", '{"type": ')
    page.press("Enter", 13, CTRL)
    assert text(page, "error").startswith("JSON schema: ")
    assert text(page, "verdict") == f"not sent: {text(page, 'error')}"
    assert text(page, "output") == ""
    assert page.evaluate("document.activeElement.id") == "source"
    assert not [
        e
        for e in page.told("Network.requestWillBeSent")
        if e["request"]["url"].endswith("completions")
    ]
    write(page, "source", '{"type": "integr"}')
    run(page)
    assert "integr" in text(page, "error")
    assert text(page, "verdict").startswith("failed: ")
    assert "integr" in text(page, "verdict")
    assert page.evaluate("document.getElementById('source-field').nextElementSibling.id") == "error"
    assert page.evaluate("document.getElementById('source').ariaInvalid") == "true"
    write(page, "source", '{"type": "integer", "maximum": 9, "minimum": 1}')
    write(page, "temperature", "-1")
    page.press("Enter", 13, CTRL)
    assert page.evaluate("document.activeElement.id") == "temperature"
    write(page, "temperature", "0.5")
    run(page)
    assert text(page, "error") == ""
    assert 1 <= int(text(page, "output")) <= 9
    server.settle()


@needs_browser
def test_keyboard_reaches_every_control(page: Browser) -> None:
    seen = []
    for _ in range(32):
        page.press("Tab", 9)
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    wanted = "example prompt kind source temperature max-tokens seed run race"
    wanted += " as-curl as-python as-link output replay-play replay-back replay-on replay-at"
    wanted += " replay-pace tree span-steps refresh"
    assert [name for name in dict.fromkeys(seen) if name in wanted.split()] == wanted.split()


@needs_browser
def test_the_page_shows_an_answer_before_anybody_asks(page: Browser) -> None:
    assert text(page, "verdict").startswith("✓ whole JSON")
    assert text(page, "output") == EXAMPLES["A person: JSON schema"][2]
    assert page.evaluate("document.querySelector('.about').textContent").count(".") == 1
    assert page.evaluate("window.scrollY") == 0


def copied(page: Browser, button: str) -> str:
    """What a button has made, which the page shows as well."""
    page.evaluate("document.getElementById('copied').textContent = ''")
    page.evaluate(f"document.getElementById('{button}').click()")
    page.wait("document.getElementById('copied').textContent")
    return text(page, "code")


@needs_browser
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_a_request_is_copied_as_curl(page: Browser) -> None:
    select(page, "example", "A status: choice")
    write(page, "prompt", "The order's status: it is now shipped. What is the status?")
    done = subprocess.run(["bash", "-c", copied(page, "as-curl")], capture_output=True, check=True)
    reply = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert reply in ("pending", "shipped", "delivered", "cancelled")
    page.evaluate("document.getElementById('key').value = 'sesame'")
    assert "sesame" not in copied(page, "as-curl")
    assert "$OVERLAP_SPEC_API_KEY" in text(page, "code")
    page.evaluate("document.getElementById('key').value = ''")


@needs_browser
@pytest.mark.parametrize("name", few(EXAMPLES, "A date: regex", "The weather: tools"))
def test_a_request_is_copied_as_python(
    page: Browser, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    select(page, "example", name)
    write(page, "seed", "3")
    code = copied(page, "as-python")
    exec(compile(code, name, "exec"), {"__name__": "copied"})
    printed = capsys.readouterr().out
    assert (name == "The weather: tools") == ("get_weather" in printed)
    if name != "The weather: tools":
        assert EXAMPLES[name][2] in printed
    page.evaluate("document.getElementById('key').value = 'sesame'")
    assert "sesame" not in copied(page, "as-python")
    page.evaluate("document.getElementById('key').value = ''")


@needs_browser
def test_a_link_holds_the_request_and_runs_nothing(page: Browser, server: Server) -> None:
    select(page, "kind", "regex")
    write(page, "prompt", "Ünïcode & spaces? #1")
    write(page, "source", "[a-c]{3}")
    write(page, "seed", "5")
    link = copied(page, "as-link")
    assert link.startswith(server.url + "/#")
    page.call("Page.navigate", url="about:blank")
    page.open(link)
    page.wait("document.getElementById('server').textContent.includes('context')")
    assert text(page, "verdict").startswith("the link’s request")
    fields = {"kind": "regex", "prompt": "Ünïcode & spaces? #1", "source": "[a-c]{3}", "seed": "5"}
    for name, value in fields.items():
        assert page.evaluate(f"document.getElementById('{name}').value") == value
    run(page)
    assert re.fullmatch("[a-c]{3}", text(page, "output"))
    for broken in ("#nonesuch", "#%7B%22kind%22%3A%22toString%22%7D"):
        page.call("Page.navigate", url="about:blank")
        page.open(f"{server.url}/{broken}")
        assert text(page, "error").startswith("this link holds no request")


@needs_browser
def test_a_race_shows_the_same_text_in_fewer_steps(page: Browser, server: Server) -> None:
    select(page, "example", "Any object: JSON")
    write(page, "temperature", "0")
    page.evaluate("document.getElementById('race').click()")
    page.wait("document.getElementById('race-note').textContent.includes('against')")
    assert text(page, "race-with") == text(page, "race-without") == text(page, "output")
    with_drafts, without = map(int, re.findall(r"(\d+)", text(page, "race-note"))[:2])
    assert with_drafts * 2 < without
    assert text(page, "race-note").endswith("the same text")
    page.wait(IDLE)
    assert EXAMPLES["Any object: JSON"][2] in text(page, "output")
    assert text(page, "verdict").startswith("✓ whole JSON")
    classes = "[...document.querySelectorAll('#race-without span')].map(s => s.className)"
    assert "token drafted" not in page.evaluate(classes)
    assert errors(page) == []
    server.settle()


def token(content: str, origin: str) -> dict[str, str]:
    return {"text": content, "origin": origin}


TIER = {"steps": 3, "top_k": 1, "nodes": 4}
RUNS = [
    [token('{"', "forced")],
    [token("name", "forced"), token('":"', "forced"), token("An", "bonus")],
    [token("na", "drafted"), token('"', "grafted"), token("}", "forced"), token("", "bonus")],
]
SPANS = [
    ("host", "plan", 0, 1), ("compute", "draft", 1, 4), ("compute", "verify", 4, 9),
    ("lane", "fill", 5, 11), ("compute", "exposed", 9, 11), ("compute", "accept", 11, 12),
]  # fmt: skip


def canned_stream() -> str:
    return stream([{"tokens": t, "tier": TIER, "accepted": len(t) - 1} for t in RUNS])


@needs_browser
def test_tokens_are_coloured_by_how_they_came(page: Browser) -> None:
    answer(
        page,
        {
            "/v1/chat/completions": (200, canned_stream()),
            "/timeline": (200, spans(*((4, *span) for span in SPANS))),
        },
    )
    page.wait("document.querySelector('#scroll rect.exposed')")
    classes = "[...document.querySelectorAll('#output span')].map(s => s.className)"
    assert page.evaluate(classes) == [f"token {one['origin']}" for run in RUNS for one in run]
    assert text(page, "output") == '{"name":"Anna"}'
    colours = page.evaluate(
        "['drafted', 'grafted', 'bonus', 'forced'].map(n => getComputedStyle("
        "document.querySelector('.token.' + n)).borderBottomColor)"
    )
    assert len(set(colours)) == 4
    assert "drafted and accepted (1)" in text(page, "origins")
    assert "drafted by the grammar and accepted (1)" in text(page, "origins")
    assert "mask allowed (4)" in text(page, "origins")
    # The prefill's token is no verify's.
    assert text(page, "accept-note") == "3.50 on average"
    assert page.evaluate("document.querySelectorAll('#accept rect').length") == 7
    assert text(page, "tier-note") == "now 4 tokens: guesses 3 deep, 1 wide"
    assert "wait for the grammar 2.00 ms · grammar 6.00 ms, 67% of it hidden" in text(
        page, "timeline-note"
    )
    red = "getComputedStyle(document.querySelector('rect.exposed')).fill"
    assert page.evaluate(red) in ("rgb(214, 39, 40)", "rgb(240, 82, 79)")
    assert errors(page) == []


@needs_browser
def test_a_key_is_asked_for_and_sent(page: Browser) -> None:
    refusal = {"error": {"message": "no or a wrong API key", "param": None}}
    answer(page, {"/v1/chat/completions": (401, json.dumps(refusal))})
    assert text(page, "error") == "no or a wrong API key"
    assert page.evaluate("document.getElementById('connection').open")
    page.evaluate("document.getElementById('key').focus()")
    page.call("Input.insertText", text="sesame")
    asked = answer(page, {"/v1/chat/completions": (200, canned_stream())})
    assert asked[0]["headers"]["Authorization"] == "Bearer sesame"
    assert text(page, "error") == ""
