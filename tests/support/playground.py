"""The playground as its user has it: fields, keys, and answers in the server's place."""

import json
from typing import Any

import pytest

from overlap_spec.server.admin import PAGE
from tests.support.browser import CHROMIUM, Browser

CTRL = 2
IDLE = "!document.getElementById('run').disabled"
SOURCES = {path.name: path.read_text() for path in sorted(PAGE.parent.iterdir())}

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def errors(page: Browser) -> list[str]:
    """What the console shows as an error."""
    entries = [event["entry"] for event in page.told("Log.entryAdded")]
    logged = [e["text"] for e in entries if e["level"] == "error"]
    calls = page.told("Runtime.consoleAPICalled")
    return logged + [str(call["args"]) for call in calls if call["type"] == "error"]


def text(page: Browser, name: str) -> str:
    """The text of an element."""
    found: str = page.evaluate(f"document.getElementById('{name}').textContent")
    return found


def click(page: Browser, name: str) -> None:
    """Press a button."""
    page.evaluate(f"document.getElementById('{name}').click()")


def select(page: Browser, name: str, value: str) -> None:
    """Choose an option, as a user's choice tells it."""
    page.evaluate(
        f"{{ const box = document.getElementById('{name}'); box.value = {json.dumps(value)};"
        " box.dispatchEvent(new Event('change')) }"
    )


def write(page: Browser, name: str, content: str) -> None:
    """Type into a field, in place of what is there."""
    page.evaluate(f"document.getElementById('{name}').select()")
    page.call("Input.insertText", text=content)


def run(page: Browser) -> None:
    """Ctrl+Enter, and wait for the end."""
    page.press("Enter", 13, CTRL)
    wait_for_run(page)


def wait_for_run(page: Browser) -> None:
    """Wait until a run has ended and its timeline is there."""
    page.wait("!document.getElementById('verdict').textContent.includes('nothing')")
    page.wait(IDLE)
    page.wait("!document.getElementById('timeline-note').textContent.includes('after a run')")


# Answers in the server's place, and what was asked. (DevTools' interception of requests starts
# some time after it has been asked for.)
FETCH = """
if (!window.realFetch) window.realFetch = fetch;
window.asked = [];
window.fetch = async (path, options) => {
  const found = Object.entries(ANSWERS).find(([known]) => path.startsWith(known));
  if (!found) return realFetch(path, options);
  asked.push({ path, ...options });
  return new Response(found[1][1], { status: found[1][0] });
};
"""


def pretend(page: Browser, answers: dict[str, tuple[int, str]]) -> None:
    """Give answers, status and body a path, in the server's place from now on."""
    page.evaluate(FETCH.replace("ANSWERS", json.dumps(answers)))


def answer(page: Browser, answers: dict[str, tuple[int, str]]) -> list[dict[str, Any]]:
    """Run with answers in the server's place; what the page asked."""
    pretend(page, answers)
    run(page)
    asked: list[dict[str, Any]] = page.evaluate(
        "asked.map(({ path, headers }) => ({ path, headers }))"
    )
    return asked


def stream(steps: list[dict[str, Any]]) -> str:
    """The events of a chat whose chunks have these ``overlap_spec`` fields."""
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    chunks: list[dict[str, Any]] = []
    for told in steps:
        content = "".join(one["text"] for one in told["tokens"])
        choices = [{"index": 0, "delta": {"content": content}, "finish_reason": None}]
        chunks.append({"choices": choices, "overlap_spec": told})
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    tokens = sum(len(told["tokens"]) for told in steps)
    chunks.append({"choices": [], "usage": {"completion_tokens": tokens}})
    return "".join(f"data: {json.dumps(head | c)}\n\n" for c in chunks) + "data: [DONE]\n\n"


def spans(*told: tuple[int, str, str, float, float]) -> str:
    """The reply of ``/timeline``: step, lane, name, start and end in ms of each span."""
    made = [
        {"step": step, "lane": lane, "name": name, "args": {}}
        | {"start_ns": round(start * 1e6), "end_ns": round(end * 1e6)}
        for step, lane, name, start, end in told
    ]
    return json.dumps({"spans": made})
