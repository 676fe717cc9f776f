"""The engine's face: inputs, outputs, streams, errors; and faults that cost one request only."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, model_validator

from overlap_spec import Engine, Generator, Grammar, SamplingParams
from overlap_spec.config import EngineConfig
from overlap_spec.engine.profile import profile
from overlap_spec.errors import CheckpointError, ConfigError, EngineUnavailable, InvalidRequest
from overlap_spec.speculation.presets import POLICY_NAMES
from overlap_spec.types import Output
from tests.support import checkpoints
from tests.support.serving import wait_for
from tests.support.tiers import few

DATE = Grammar.regex(r"\d{4}-\d\d-\d\d")


@pytest.fixture(scope="module")
def engine(tiny: dict[str, str]) -> Iterator[Engine]:
    with Engine(**tiny, context_length=200, num_steps=3, eagle_topk=2, lane_threads=2) as made:
        yield made


def test_single_and_list_share_results(engine: Engine) -> None:
    one = engine.generate("when", DATE)
    many = engine.generate(["when", "who"], [DATE, Grammar.choice(["me", "you"])])
    assert one.text == one.parsed == many[0].text
    assert many[1].parsed in ("me", "you")
    assert one.finish_reason == "stop"
    assert one.token_ids[-1] in engine.tokenizer.eos_ids
    assert engine.tokenizer.decode(one.token_ids) == one.text
    assert engine.core.scheduler.allocator.in_use == 0


def test_stream_pieces_make_the_output(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=30, logprobs=1)
    whole = engine.generate("go", None, sampling)
    pieces = list(engine.stream("go", None, sampling))
    assert "".join(p.text for p in pieces) == whole.text
    assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
    assert len([x for p in pieces for x in p.logprobs]) == len(whole.token_ids)
    assert [p.finish_reason for p in pieces][-1] == whole.finish_reason == "length"
    assert not any(p.finish_reason for p in pieces[:-1])


def test_leaving_a_stream_aborts_it(engine: Engine) -> None:
    stream = engine.stream("go", None, SamplingParams(max_tokens=100))
    next(stream)
    stream.close()
    assert engine.core.scheduler.idle
    assert engine.core.scheduler.allocator.in_use == 0


def test_streams_may_be_read_in_turn_and_from_threads(engine: Engine) -> None:
    want = engine.generate("a", DATE).text
    first, second = engine.stream("a", DATE), engine.stream("a", DATE)
    texts = ["", ""]
    for left, right in zip(first, second, strict=True):
        texts = [texts[0] + left.text, texts[1] + right.text]
    assert texts == [want, want]
    results: list[str] = []

    def work() -> None:
        results.append("".join(p.text for p in engine.stream("a", DATE)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want] * 4


def test_statistics_add_up(engine: Engine) -> None:
    stats = engine.generate("count", None, SamplingParams(max_tokens=25)).stats
    assert stats.output_tokens == 25
    assert stats.verified_tokens == 24
    assert sum(stats.accept_histogram) == stats.verifies
    assert stats.accept_length == pytest.approx(24 / stats.verifies)
    assert 0 < stats.ttft_ms <= stats.end_to_end_ms
    assert stats.tpot_ms == pytest.approx((stats.end_to_end_ms - stats.ttft_ms) / 24)
    assert stats.drafted_tokens == stats.verifies * (engine.core.budgets.policy.tiers[0].nodes - 1)


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ({"prompt": "x" * 500}, "prompt", "508 tokens|leaves no room"),
        ({"prompt": "x", "sampling": {"max_tokens": 500}}, "max_tokens", "exceed the context"),
        ({"prompt": "x", "sampling": {"tempo": 1}}, "tempo", "unknown sampling field"),
        ({"prompt": "x", "sampling": {"logit_bias": {9999: 1}}}, "logit_bias", "9999"),
        ({"prompt": "x", "sampling": 3}, "sampling", "SamplingParams"),
        ({"prompt": 7}, "prompt", "7"),
        ({"prompt": ["x", 7]}, "prompt", "7"),
        ({"prompt": ["x", "y"], "grammar": [DATE]}, "grammar", "1 values"),
        ({"prompt": "x", "grammar": '{"type": "object"}'}, "grammar", "json_schema"),
    ],
)
def test_bad_requests_name_the_culprit_and_the_engine_goes_on(
    engine: Engine, arguments: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        engine.generate(**arguments)
    assert caught.value.param == param
    assert engine.generate("next", DATE).finish_reason == "stop"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speed": 9}, "unknown setting 'speed'"),
        ({"num_steps": -1}, "num_steps"),
        ({"algorithm": "medusa"}, "must be one of .*mtp"),
        ({"algorithm": "magic"}, "algorithm must be one of"),
        ({"overlap": "twice"}, "overlap"),
        ({"device": "tpu"}, "tpu"),
        ({"context_length": 10**6}, "context_length 1000000"),
        ({"grammar_backend": "nonesuch"}, "nonesuch"),
        ({"max_total_tokens": 8}, "KV cache"),
    ],
)
def test_bad_settings_are_named(tiny: dict[str, str], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(**tiny, **settings)


def test_a_head_of_another_width_is_named(tiny: dict[str, str], tmp_path: Path) -> None:
    checkpoints.write_head(tmp_path / "wide", hidden_size=64, target_hidden_size=64)
    with pytest.raises(CheckpointError, match="hidden_size 64, this target has 32"):
        Engine(tiny["model"], draft=str(tmp_path / "wide"))


def make_faulty(matcher: Any, fault: str, released: threading.Event) -> None:
    """Let a good matcher fail in one way at its fourth tree."""
    fill_tree, fill, trees = matcher.fill_tree, matcher.fill, list[None]()

    def broken_tree(*links: Any) -> None:
        *_, rows = links
        trees.append(None)
        if len(trees) == 4:
            if fault == "raises":
                raise RuntimeError("the matcher broke")
            if fault == "hangs":
                released.wait()
            if fault == "garbage":
                rows[:] = np.random.default_rng(0).integers(-(2**31), 2**31, rows.shape)
                rows[:, 0] = 0
                return
        fill_tree(*links)

    def broken_fill(row: Any) -> None:
        if len(trees) == 3 and fault == "hangs":
            released.wait()
        fill(row)

    matcher.fill_tree, matcher.fill = broken_tree, broken_fill


EIGHT = [f"prompt {i}" for i in range(8)], [DATE, None, Grammar.json_object(), DATE] * 2


@pytest.fixture(scope="module")
def faultless(tiny: dict[str, str]) -> Iterator[tuple[Engine, list[Output]]]:
    """An engine, and what eight requests get where no matcher fails."""
    with Engine(**{**tiny, "mask_deadline_ms": 500.0}, mask_timeout_s=1.0) as made:
        yield made, made.generate(*EIGHT, SamplingParams(max_tokens=40))


@pytest.mark.parametrize(
    ("fault", "told"), [("raises", "broke"), ("hangs", "within 1 s"), ("garbage", "refused")]
)
def test_a_faulty_matcher_ends_its_own_request_only(
    faultless: tuple[Engine, list[Output]], fault: str, told: str
) -> None:
    engine, want = faultless
    released, handles = threading.Event(), []
    for index, (prompt, grammar) in enumerate(zip(*EIGHT, strict=True)):
        handle = engine.submit(prompt, grammar, SamplingParams(max_tokens=40))
        if index == 3:
            make_faulty(engine.core.grammar.matchers[handle.request.id], fault, released)
        handles.append(handle)
    while any(t.output is None for t in handles):
        engine.step()
    # Where it hangs, nobody waited for the call.
    released.set()
    got = [t.output for t in handles]
    engine.release(handles)
    assert got[3] is not None
    assert got[3].finish_reason == "error"
    assert told in (got[3].error or "")
    for index in set(range(8)) - {3}:
        other = got[index]
        assert other is not None
        assert (other.text, other.finish_reason) == (want[index].text, want[index].finish_reason)
    assert engine.core.scheduler.allocator.in_use == 0


class Picky(BaseModel, extra="forbid"):
    """A type whose own check raises no ValueError."""

    word: Literal["yes"]

    @model_validator(mode="after")
    def check(self) -> Picky:
        raise KeyError(self.word)


def test_a_type_that_refuses_its_output_costs_its_own_request_only(engine: Engine) -> None:
    picky, date = engine.generate(["go", "when"], [Grammar.of(Picky), DATE])
    assert (picky.finish_reason, picky.parsed) == ("stop", None)
    assert json.loads(picky.text) == {"word": "yes"}
    assert date.parsed == date.text == engine.generate("when", DATE).text


def output_by(engine: Engine, late: dict[str, Callable[..., None]]) -> Any:
    """The output of a request before whose matcher's calls, by name, others are made."""
    handle = engine.submit("slow", DATE)
    matcher = engine.core.grammar.matchers[handle.request.id]

    def behind(before: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
        def both(*given: Any) -> Any:
            before(*given)
            return call(*given)

        return both

    for name, before in late.items():
        setattr(matcher, name, behind(before, getattr(matcher, name)))
    while handle.output is None:
        engine.step()
    return handle.output


@pytest.mark.clock
def test_late_masks_with_the_root_ready_cost_a_step_its_draft(
    tiny: dict[str, str], engine: Engine
) -> None:
    """The tree's fill hangs until it is given up: the request goes on, one token a step."""
    want = engine.generate("slow", DATE)

    def limited() -> int:
        return sum(s.stats.limited_steps for s in engine.core.scheduler.running)

    def until_given_up(tokens: Any, *_: Any) -> None:
        # Of a root alone nothing can be given up.
        if len(tokens) > 1:
            before = limited()
            wait_for(lambda: limited() > before, 60)

    with Engine(**{**tiny, "mask_deadline_ms": 200.0}, num_steps=3) as engine:
        output = output_by(engine, {"fill_tree": until_given_up})
        assert output.error is None
        assert output.text == want.text
        # A busy machine may give up more of them.
        assert output.stats.limited_steps >= 2


@pytest.mark.clock
def test_masks_that_are_late_cost_no_request(tiny: dict[str, str], engine: Engine) -> None:
    """Every call of the matcher takes many times the deadline: it costs time alone."""
    want = engine.generate("slow", DATE)

    def slow(*_: Any) -> None:
        time.sleep(0.03)

    with Engine(**{**tiny, "mask_deadline_ms": 1.0}, num_steps=3) as engine:
        output = output_by(engine, dict.fromkeys(("fill", "fill_tree", "accept"), slow))
        assert output.error is None
        assert output.text == want.text
        assert output.stats.limited_steps


def test_a_closed_engine_takes_no_requests(tiny: dict[str, str]) -> None:
    engine = Engine(**tiny, num_steps=3)
    generator = Generator(engine, DATE)
    handle = engine.submit("go", None, SamplingParams(max_tokens=90))
    engine.step()
    engine.close()
    assert handle.output is not None
    assert handle.output.finish_reason == "abort"
    for call in (
        lambda: engine.generate("go"),
        lambda: engine.generate(["go", "on"], DATE),
        lambda: engine.stream("go"),
        lambda: engine.submit("go", Grammar.choice(["not compiled before"])),
        lambda: generator("go"),
        lambda: Generator(engine, Grammar.choice(["nor this one"])),
    ):
        with pytest.raises(EngineUnavailable, match="closed"):
            call()
    assert not engine.step()
    engine.close()


def test_closing_ends_a_call_of_another_thread(tiny: dict[str, str]) -> None:
    engine = Engine(**tiny, num_steps=3)
    stream = engine.stream("go", None, SamplingParams(max_tokens=150, ignore_eos=True))
    next(stream)
    thread = threading.Thread(target=engine.close)
    thread.start()
    thread.join(20)
    *_, last = stream
    assert last.finish_reason == "abort"


def test_trace_shows_every_lane(tiny: dict[str, str], tmp_path: Path) -> None:
    with Engine(**tiny, num_steps=3) as engine:
        engine.generate("when", DATE)
        engine.timeline.write_trace(tmp_path / "trace.json")
        lanes = {span.lane for span in engine.timeline.spans()}
        names = {span.name for span in engine.timeline.spans() if span.lane == "compute"}
    # Torch's threads take all cores where they are as many: prefill is compute's then.
    assert {"host", "plan", "compute", "copy", "lane"} == lanes - {"prefill"}
    assert {"draft", "verify", "accept", "extend"} <= names
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("name", few([*POLICY_NAMES, "bench.baselines:ThresholdPolicy"], "auto"))
def test_greedy_text_is_the_same_under_every_policy(tiny: dict[str, str], name: str) -> None:
    sampling = SamplingParams(max_tokens=60)
    with Engine(**tiny, algorithm="none") as plain, Engine(**{**tiny, "adaptive": name}) as engine:
        want = plain.generate(["a", "bc"], [None, Grammar.json_object()], sampling)
        got = engine.generate(["a", "bc"], [None, Grammar.json_object()], sampling)
        switches = engine.snapshot()["speculation"]["switches"]
        assert engine.core.scheduler.allocator.in_use == 0
    assert [g.token_ids for g in got] == [w.token_ids for w in want]
    # A random head is always wrong: every adaptive policy gives its long drafts up.
    assert (switches > 0) == (name not in ("static", "off"))


def test_targets_are_asked_for_and_counted(tiny: dict[str, str]) -> None:
    """One that nothing keeps, one that all do, and the engine's for who names none."""
    samplings = [{"max_tokens": 8, "tpot_slo_ms": ms} for ms in (1e-6, 1e6)] + [{"max_tokens": 8}]
    for default, attained in ((None, (2, 1)), (1e6, (3, 2))):
        with Engine(**{**tiny, "adaptive": "adaspec"}, tpot_slo_ms=default) as engine:
            outputs = engine.generate(["a", "b", "c"], None, samplings)
            state = engine.snapshot()["speculation"]
        assert all(output.finish_reason == "length" for output in outputs)
        assert (state["tpot_requests"], state["tpot_attained"]) == attained
        assert state["observed_accept_length"] >= 1
        assert state["observed_step_ms"] > 0
        assert state["active"]["estimated_step_ms"] > 0
        # Nothing is drafted where a target cannot be kept anyway.
        assert sum(output.stats.drafted_tokens for output in outputs) == 0


@pytest.mark.parametrize("target", [0, -1.0, float("inf"), True, "5"])
def test_a_target_that_is_none(target: Any) -> None:
    with pytest.raises(InvalidRequest, match="tpot_slo_ms must be a number over 0"):
        SamplingParams(tpot_slo_ms=target)


def test_a_profile_is_used_where_there_is_one(
    tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, saved, and found by the next engine of the same settings, and by no other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []
    model, path = profile(EngineConfig.build(**tiny, max_running_requests=2), seen.append)
    assert path.is_file()
    assert len(seen) > 10
    assert model.source == "profile"
    assert model.verify > 0
    assert model.draft > 0
    for settings, source in (({}, "profile"), ({"graphs": False}, "start-up fit")):
        with Engine(**{**tiny, "adaptive": "auto"}, **settings) as engine:
            assert engine.snapshot()["speculation"]["cost"]["source"] == source
            assert engine.generate("a", None, {"max_tokens": 8}).finish_reason == "length"


@pytest.mark.ci
def test_recorded_tiers_are_measured_before_the_first_request(tiny: dict[str, str]) -> None:
    """The fit at the start knows the launch tier alone, this one the trees as well; what requests
    computed is not written over."""
    with Engine(**{**tiny, "adaptive": "auto"}, max_running_requests=4) as engine:
        nodes = 4 * max(tier.nodes for tier in engine.core.budgets.policy.tiers)
        cost = engine.snapshot()["speculation"]["cost"]
        assert cost["most_nodes"] < nodes
        while engine.prepare_next():
            pass
        measured = engine.snapshot()["speculation"]["cost"]
        assert measured["most_nodes"] == nodes
        assert measured["verify_node"] > 0
        text = engine.generate("a", None, {"max_tokens": 8}).token_ids
    with Engine(**{**tiny, "adaptive": "auto"}, max_running_requests=4) as engine:
        assert engine.generate("a", None, {"max_tokens": 8}).token_ids == text
        while engine.prepare_next():
            pass
        assert engine.snapshot()["speculation"]["cost"]["most_nodes"] == cost["most_nodes"]


def test_a_policy_is_told_where_nothing_was_found_to_draft(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is a verify of one token, which costs what others cost; not so where a request wants no
    drafts."""
    settings = {**tiny, "algorithm": "ngram", "num_steps": 3}
    with Engine(**settings) as engine:
        seen = []
        monkeypatch.setattr(engine.core.budgets.policy, "observe", seen.append)
        engine.generate("abcdefgh", None, {"max_tokens": 12, "ignore_eos": True})
        told = [request for outcome in seen for request in outcome.requests]
        assert any(request.drafted == 0 for request in told)
        assert all(request.accepted <= request.drafted for request in told)
        seen.clear()
        engine.generate("abcdefgh", None, {"max_tokens": 4, "speculate": False})
        assert seen
        assert not any(outcome.requests for outcome in seen)


def test_prefix_reuse_is_as_good_with_speculation(tiny: dict[str, str]) -> None:
    """Same pages found, same text, whether the drafter's cache is reused along with them or not."""
    shared = "a long instruction that every request starts with, word by word. " * 2
    prompts = [shared + tail for tail in ("one", "two", "three", "one and a half")]
    cached = {}
    texts = {}
    for name, settings in {
        "plain": {"algorithm": "none"},
        "tree": {"num_steps": 3, "eagle_topk": 2},
        "off": {"num_steps": 3, "prefix_cache": False},
    }.items():
        with Engine(**tiny, **settings, chunked_prefill_size=48) as engine:
            outputs = [engine.generate(p, None, SamplingParams(max_tokens=20)) for p in prompts]
            outputs += engine.generate(prompts, None, SamplingParams(max_tokens=20))
            cached[name] = [o.stats.cached_tokens for o in outputs]
            texts[name] = [o.token_ids for o in outputs]
            assert engine.core.scheduler.allocator.in_use == 0
    assert texts["plain"] == texts["tree"] == texts["off"]
    assert cached["plain"] == cached["tree"]
    assert cached["tree"][0] == 0
    assert min(cached["tree"][1:]) >= 112
    assert set(cached["off"]) == {0}


@pytest.mark.ci
def test_an_engine_that_nobody_closed_lets_the_process_exit(tiny: dict[str, str]) -> None:
    code = (
        "from overlap_spec import Engine, SamplingParams\n"
        f"engine = Engine({tiny['model']!r}, draft={tiny['draft']!r})\n"
        "stream = engine.stream('go', None, SamplingParams(max_tokens=90))\n"
        "next(stream)\n"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
