"""The playground's drafts as trees, its replay, and its view of all streams."""

import json
from typing import Any

import pytest

from tests.support.browser import Browser
from tests.support.playground import (
    answer,
    click,
    errors,
    needs_browser,
    pretend,
    select,
    spans,
    stream,
    text,
    write,
)

pytestmark = needs_browser
NODES = "[...document.querySelectorAll('#tree .node')]"
EDGES = "[...document.querySelectorAll('#tree .edge')]"
AHEAD = "[...document.querySelectorAll('#replay-text .ahead')].map(s => s.textContent).join('')"


def node(content: str, parent: int, fate: str) -> dict[str, Any]:
    return {"text": content, "parent": parent, "fate": fate}


def told(step: int, tokens: str, *nodes: dict[str, Any], left_out: int = 0) -> dict[str, Any]:
    """One step; its tokens as ``text:origin``, apart by commas."""
    made = [dict(zip(("text", "origin"), one.split(":"), strict=True)) for one in tokens.split(",")]
    tier = {"steps": 3, "top_k": 2, "nodes": 7}
    draft = {"step": step, "nodes": nodes, "left_out": left_out}
    return {"tokens": made, "tier": tier, "accepted": len(made) - 1, "draft": draft}


STEPS = [
    told(11, "na:bonus"),
    told(12, "me:drafted,an :bonus", node("me", -1, "accepted"), node("b", 0, "rejected")),
    told(13, "na:drafted, or:grafted,x:forced,:bonus", node("na", -1, "accepted"),
        node("no", -1, "rejected"), node("<b>", -1, "masked"), node(" or", 0, "accepted"),
        node("y", 1, "rejected"), node("z", 3, "late"), node("&", 2, "masked"), left_out=5),
]  # fmt: skip
TIMES = spans(
    (11, "prefill", "prefill", 0, 2),
    (12, "compute", "draft", 2, 4),
    (12, "compute", "verify", 4, 9),
    (12, "lane", "accept", 4, 5),
    (12, "lane", "fill", 5, 10),
    (12, "compute", "exposed", 9, 10),
    (12, "compute", "accept", 10, 11),
    (13, "compute", "draft", 11, 12),
    (13, "compute", "verify", 12, 18),
)


@pytest.fixture
def replay(page: Browser) -> Browser:
    """The page with an answer of three steps."""
    answers = {"/v1/chat/completions": (200, stream(STEPS)), "/timeline": (200, TIMES)}
    select(page, "kind", "text")
    answer(page, answers)
    page.wait("document.getElementById('replay-text').textContent == 'namean na orx'")
    return page


def classes(page: Browser, of: str) -> list[str]:
    found: list[str] = page.evaluate(f"{of}.map(n => n.getAttribute('class'))")
    return found


def hints(page: Browser) -> dict[str, str]:
    """What each node's box says, and what it tells on hover."""
    each = "n => ['text', 'title'].map(name => n.querySelector(name).textContent)"
    return dict(page.evaluate(f"{NODES}.map({each})"))


def at(page: Browser) -> str:
    return text(page, "replay-note")


def test_the_tree_tells_what_became_of_each_draft(replay: Browser) -> None:
    # The first step with a refused branch is shown first.
    assert at(replay) == "step 2 of 3"
    assert classes(replay, NODES) == [
        "node root", "node accepted drafted", "node chosen bonus", "node rejected",
    ]  # fmt: skip
    click(replay, "replay-on")
    assert at(replay) == "step 3 of 3"
    # Depth first; what was kept runs straight on.
    assert classes(replay, NODES) == [
        "node root", "node accepted drafted", "node accepted grafted", "node chosen forced",
        "node chosen bonus", "node late", "node rejected", "node rejected", "node masked",
        "node masked",
    ]  # fmt: skip
    assert len(classes(replay, EDGES)) == 9
    rows = replay.evaluate(f"{NODES}.map(n => n.querySelector('rect').getAttribute('y'))")
    assert len(set(rows[:5])) == 1
    assert len(set(rows)) == 4
    told = hints(replay)
    assert told["an·"] == '"an ": the token before this step'
    assert told["∎"] == "the end: bonus: the target’s own choice"
    assert "refused by the target" in told["no ✕"]
    assert "refused by the grammar’s mask" in told["<b> ⊘"]
    assert "not there in time" in told["z ◷"]
    fates = text(replay, "fates")
    for part in ("12 drafted", "2 accepted", "2 refused by the target", "2 refused by the grammar",
                 "1 mask was late", "5 more not shown", "→ 4 tokens"):  # fmt: skip
        assert part in fates
    assert errors(replay) == []


def test_steps_are_walked_and_chosen(replay: Browser) -> None:
    click(replay, "replay-back")
    assert at(replay) == "step 1 of 3"
    assert "Nothing drafted" in text(replay, "fates")
    assert replay.evaluate(AHEAD) == "mean na orx"
    click(replay, "replay-back")
    assert at(replay) == "step 1 of 3"
    replay.evaluate("document.getElementById('replay-at').focus()")
    replay.press("ArrowRight", 39)
    replay.wait("document.getElementById('replay-note').textContent == 'step 2 of 3'")
    assert replay.evaluate(AHEAD) == "na orx"
    columns = "document.querySelectorAll('#strip .column')"
    assert replay.evaluate(f"{columns}.length") == 3
    replay.evaluate(f"{columns}[2].dispatchEvent(new MouseEvent('click', {{ bubbles: true }}))")
    assert at(replay) == "step 3 of 3"
    assert replay.evaluate(AHEAD) == ""
    assert replay.evaluate(f"{columns}[2].classList.contains('now')")
    assert errors(replay) == []


def test_each_step_has_its_times(replay: Browser) -> None:
    legend = text(replay, "replay-legend")
    for part in ("draft 2.00 ms", "verify 5.00 ms", "grammar 6.00 ms", "wait 1.00 ms"):
        assert part in legend
    bars = "[...document.querySelectorAll('#replay-times rect title')].map(t => t.textContent)"
    assert replay.evaluate(bars)[:2] == ["draft: 2.000 ms", "verify: 5.000 ms"]
    click(replay, "replay-on")
    assert "grammar 0.00 ms" in text(replay, "replay-legend")
    answer(replay, {"/v1/chat/completions": (200, stream(STEPS)), "/timeline": (200, spans())})
    replay.wait("document.getElementById('replay-times').textContent.includes('no longer knows')")
    assert errors(replay) == []


@pytest.mark.ci
def test_a_replay_plays_through_and_rests_at_the_end(replay: Browser) -> None:
    """Its phases come in their order: nothing, the guesses, the grammar's word, everything."""
    select(replay, "replay-pace", "30")
    replay.evaluate(
        "window.seen = [];"
        "new MutationObserver(() => seen.push("
        " [...document.querySelectorAll('#tree .node')].map(n => n.getAttribute('class')).join()))"
        ".observe(document.getElementById('tree'),"
        " { attributes: true, subtree: true, childList: true, attributeFilter: ['class'] })"
    )
    click(replay, "replay-back")
    replay.evaluate("seen.length = 0")
    click(replay, "replay-play")
    assert text(replay, "replay-play").endswith("Pause")
    replay.wait("document.getElementById('replay-play').textContent.endsWith('Play')")
    assert at(replay) == "step 3 of 3"
    assert replay.evaluate(AHEAD) == ""
    seen = replay.evaluate("seen")
    shown = [each for each in seen if each.count("node") == 4]
    order = [
        "node root,node unseen,node unseen,node unseen",
        "node root,node pending,node unseen,node pending",
        "node root,node accepted drafted,node chosen bonus,node rejected",
    ]
    # A slow machine may leave frames out, but the first and the last are always drawn.
    places = [shown.index(each) for each in order if each in shown]
    assert places == sorted(places)
    assert order[0] in shown
    assert order[2] in shown
    assert errors(replay) == []


def test_a_real_answer_is_replayed(page: Browser) -> None:
    """What the engine tells fits together: each step's drafts, tokens and times."""
    page.wait("!document.getElementById('replay-card').hidden")
    assert text(page, "replay-text") == text(page, "output")
    steps = int(page.evaluate("document.getElementById('replay-at').max")) + 1
    accepted = 0
    for number in range(steps):
        page.evaluate(
            f"{{ const box = document.getElementById('replay-at'); box.value = {number};"
            " box.dispatchEvent(new Event('input')) }"
        )
        assert at(page) == f"step {number + 1} of {steps}"
        names = classes(page, NODES)
        accepted += sum("accepted" in name for name in names)
        assert names[0] == "node root"
        assert "no longer knows" not in text(page, "replay-times")
    drafted = page.evaluate("document.querySelectorAll('#output .drafted').length")
    assert accepted >= drafted > 0
    size = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.call("Emulation.setDeviceMetricsOverride", **size)
    # The page draws anew after the browser has told it of its size.
    page.wait("document.documentElement.scrollWidth <= 360")
    assert errors(page) == []


def totals(**more: Any) -> dict[str, Any]:
    return {
        "open": 3, "running": 2, "waiting": 1, "compiling": 0, "max_running_requests": 8,
        "output_tokens": 100, "pages_in_use": 30, "pages": 120, "page_tokens": 16, "steps": 9,
        "step_ms": 4.0, "accept_length": 2.5, "draft_steps": 3, "draft_nodes": 8,
        "hidden_fraction": 0.9, **more,
    }  # fmt: skip


def standing(name: str | None, state: str, own: bool, output: int) -> dict[str, Any]:
    return {
        "id": name, "client": "key 01234567", "own": own, "state": state, "age_ms": 2000.0,
        "prompt_tokens": 40, "cached_tokens": 16, "output_tokens": output, "pages": 12,
        "constrained": own, "accept_length": 2.5 if output else None,
        "draft_length": 6.0 if output else None,
    }  # fmt: skip


@pytest.mark.ci
def test_all_streams_are_watched_while_somebody_looks(page: Browser) -> None:
    sent = [e["request"]["url"] for e in page.told("Network.requestWillBeSent")]
    assert not any(url.endswith("/requests") for url in sent)
    rows = [standing("chatcmpl-0123456789abcdef", "decode", True, 50),
            standing(None, "waiting", False, 0)]  # fmt: skip
    state = {"time_ms": 1.0, "totals": totals(), "requests": rows}
    state |= {"not_shown": 1, "is_admin": False}
    pretend(page, {"/requests": (200, json.dumps(state))})
    page.evaluate("document.getElementById('live').open = true")
    page.wait("document.querySelectorAll('#streams tbody tr').length == 2")
    cells = page.evaluate(
        "[...document.querySelectorAll('#streams tbody tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )
    assert cells[0][:5] == ["chatcmpl-…abcdef yours", "decode", "2.0 s", "40 16 cached", "50"]
    assert cells[0][6:] == ["2.50", "6.0", " 12"]
    assert cells[1][0] == "probe key 01234567"
    assert cells[1][1] == "waiting free text"
    hidden = "1 more of other clients: their rows need the administrator’s key"
    assert hidden in text(page, "live-note")
    tiles = text(page, "live-totals")
    for part in ("Running2 of 8", "Waiting1", "Accept length2.50", "Draft length7 in 3 steps",
                 "KV cache25%"):  # fmt: skip
        assert part in tiles
    # A second answer gives the rate.
    rows[0]["output_tokens"] = 70
    later = {**state, "time_ms": 501.0, "totals": totals(output_tokens=200)}
    pretend(page, {"/requests": (200, json.dumps(later))})
    page.wait("document.getElementById('live-totals').textContent.includes('Tokens a second200')")
    assert page.evaluate("document.querySelector('#streams .rate').textContent") == "40"
    # Nobody looks: nothing is asked for.
    page.evaluate("document.getElementById('live').open = false; asked.length = 0")
    quiet = "new Promise(done => setTimeout(() => done(asked.length), 1300))"
    assert page.evaluate(quiet) == 0
    assert errors(page) == []


def test_the_real_server_tells_its_streams(page: Browser) -> None:
    select(page, "kind", "regex")
    write(page, "source", "[a-z]{3000}")
    write(page, "max-tokens", "3500")
    # In the page, or the text may have ended; as a return to the tab does, it asks at once.
    page.evaluate("""
        document.getElementById('live').open = true;
        window.seen = null;
        const look = setInterval(() => {
            document.dispatchEvent(new Event('visibilitychange'));
            if (!document.querySelector('#streams .pill.decode')) return;
            clearInterval(look);
            document.getElementById('stop').click();
            window.seen = document.querySelector('#streams .stream').textContent;
        }, 20);
    """)
    click(page, "run")
    page.wait("window.seen")
    assert "yours" in page.evaluate("window.seen")
    page.wait("document.getElementById('live-note').textContent.includes('nothing runs now')")
    assert text(page, "verdict") == "stopped"
    assert errors(page) == []
