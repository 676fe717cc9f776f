"""Engines of several ranks beside one, at length: every drafter and setting that ranks must agree
on, chaos seeds, and the embedded model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlap_spec import Engine, Grammar, SamplingParams
from overlap_spec.errors import EngineUnavailable
from overlap_spec.parallel import group
from overlap_spec.types import Output
from tests.support import chaos, checkpoints, dflash
from tests.support.chaos import ROOM, TIERS, build, outputs_equal, settings_of
from tests.support.lossless import GREEDY, work
from tests.support.ranks import ended, equal, mixed, pids
from tests.support.skips import needs_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# Sums are cut between ranks, so that logits differ in their last bits. A token may differ where
# the two best logits of one rank are closer than this.
NEAR = 1e-3
TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "ngram": {"algorithm": "ngram", "draft": None},
    "grammar": {"algorithm": "grammar", "draft": None},
    "row": {"algorithm": "slots,suffix,eagle3"},
    "draft-model": {"algorithm": "draft_model", "draft": "target", **TREE},
    "block": {"algorithm": "dflash", "draft": "dflash", **TREE},
    "adaptive": {"adaptive": "default", **TREE},
    "by-cost": {"adaptive": "auto", "num_steps": 3},
    "packed": {"adaptive": "adaspec"},
    "tries": {"tries": True, "num_steps": 3},
    "serial": {"overlap": "none", "num_steps": 3},
}


@pytest.fixture(scope="module")
def plain(tiny: dict[str, str]) -> Iterator[Engine]:
    with build(
        tiny, overlap="none", algorithm="none", mask_deadline_ms=None, graphs=False
    ) as engine:
        yield engine


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_gives_the_text_of_one_rank(
    tiny: dict[str, str], plain: Engine, tmp_path: Path, variant: str
) -> None:
    settings = {**VARIANTS[variant], "mask_deadline_ms": None, "graphs": False}
    if settings.get("draft") == "target":
        settings["draft"] = tiny["model"]
    if settings.get("draft") == "dflash":
        dflash.write(tmp_path / "dflash", dflash.LAYOUTS["z-lab"])
        settings["draft"] = str(tmp_path / "dflash")
    with build(tiny, tensor_parallel_size=2, **settings) as engine:
        equal(plain, engine, mixed())
        again = [replace(ask, prompt=ask.prompt[::-1]) for ask in mixed()]
        equal(plain, engine, again)


def test_what_a_prompt_a_choice_and_a_thought_may_need(tiny: dict[str, str]) -> None:
    """A prompt that no single block holds, choices that are weighed, and drafts that are accepted
    in the relaxed way while the model thinks."""
    settings: dict[str, Any] = {"graphs": False, **TREE}
    settings |= {"relaxed_topk": 8, "relaxed_delta": 1.0, "adaptive": "static"}
    weighed = Grammar.choice(["alpha", "beta", "alphabet"], probabilities=True, faithful=True)
    thinking = Grammar.regex(r"\d{4}").after_thinking(end="a")
    prompts = ["x" * 450, "pick", "pick another", "think", "think more"]
    grammars = [None, weighed, weighed, thinking, thinking]
    heats = (0.0, 0.0, 0.9, 0.0, 0.9)
    sampling = [SamplingParams(max_tokens=30, temperature=t, seed=4) for t in heats]
    with (
        Engine(**tiny, **settings) as oracle,
        Engine(**tiny, **settings, tensor_parallel_size=2) as engine,
    ):
        want, got = (each.generate(prompts, grammars, sampling) for each in (oracle, engine))
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert any(o.stats.relaxed_steps for o in got)
    for a, b in zip(want[1:3], got[1:3], strict=True):
        assert [c.text for c in b.choices] == [c.text for c in a.choices]
        assert [c.probability for c in b.choices] == pytest.approx(
            [c.probability for c in a.choices], abs=1e-5
        )


def test_thresholds_of_acceptance_draw_alike(tiny: dict[str, str]) -> None:
    """Coins are those of seed and position in every rank: ranks that differed would not go on."""
    settings = {**TREE, "threshold_acc": 0.5, "mask_deadline_ms": None, "graphs": False}
    # Such text depends on how long drafts are.
    settings["adaptive"] = "static"
    with (
        build(tiny, **settings) as oracle,
        build(tiny, tensor_parallel_size=2, **settings) as engine,
    ):
        equal(oracle, engine, mixed())


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("tier", TIERS)
def test_chaos_at_two_ranks(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch, tier: str, room: str
) -> None:
    first, settings = settings_of(tier, room)
    chaos.start(monkeypatch, first)
    with (
        build(tiny, overlap="none", algorithm="none") as oracle,
        build(tiny, tensor_parallel_size=2, **settings) as engine,
    ):
        outputs_equal(oracle, engine, first)
        assert (engine.core.scheduler.preemptions > 0) == (room == "crowded")


def test_a_rank_that_stalls_ends_the_engine(
    tiny: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "STALL_S", 5.0)
    engine = build(tiny, tensor_parallel_size=2, graphs=False)
    engine.generate("abc", None, {"max_tokens": 2})
    (pid,) = pids(engine)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineUnavailable, match="rank 0 failed"):
        engine.generate("abc", None, {"max_tokens": 20})
    engine.close()
    assert ended([pid])


SCRIPT = """
import json, sys
from overlap_spec import Engine

with Engine(**json.loads(sys.argv[1])) as engine:
    output = engine.generate("abc", None, {"max_tokens": 12, "temperature": 0.0})
print(json.dumps(output.token_ids))
"""


def test_ranks_that_torchrun_starts(tiny: dict[str, str], plain: Engine, tmp_path: Path) -> None:
    """A script that makes an engine goes on in rank 0 alone."""
    want = plain.generate("abc", None, {"max_tokens": 12, "temperature": 0.0})
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = {**tiny, "graphs": False, "context_length": 160}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = [
        subprocess.run(
            [*command, str(tmp_path / "script.py"), json.dumps({**settings, **more})],
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            timeout=280,
        )
        for more in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 4})
    ]
    assert ran[0].returncode == 0, ran[0].stderr
    assert ran[0].stdout.splitlines() == [json.dumps(want.token_ids)]
    assert ran[1].returncode != 0
    assert "tensor_parallel_size 4: torchrun has started 2 processes" in ran[1].stderr


def differences(want: list[Output], got: list[Output]) -> list[float]:
    """Of each output that differs, how far apart the two best logits of one rank were there."""
    found = []
    for a, b in zip(want, got, strict=True):
        for index, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
            if x != y:
                (_, best), (_, second) = a.logprobs[index].top[:2]
                found.append(best - second)
                break
        else:
            assert a.token_ids == b.token_ids
    return found


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    with Engine(algorithm="none", overlap="none", mask_deadline_ms=None) as engine:
        yield engine


@needs_weights
@pytest.mark.parametrize("size", [2, 4])
def test_the_embedded_models_text_is_that_of_one_rank(alone: Engine, size: int) -> None:
    """52 prompts, half of them with schemas, greedy and seeded."""
    items = work(52)
    prompts, grammars = [p for p, _ in items], [g for _, g in items]
    greedy = replace(GREEDY, logprobs=2)
    seeded = [
        SamplingParams(max_tokens=40, temperature=0.9, seed=i, top_p=0.9 if i % 2 else 1.0)
        for i in range(len(items))
    ]
    settings: dict[str, Any] = {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16}
    with Engine(
        **settings, adaptive="static", tensor_parallel_size=size, mask_deadline_ms=None
    ) as engine:
        near = differences(
            alone.generate(prompts, grammars, greedy), engine.generate(prompts, grammars, greedy)
        )
        want = alone.generate(prompts, grammars, seeded)
        got = engine.generate(prompts, grammars, seeded)
    drawn = sum(a.token_ids != b.token_ids for a, b in zip(want, got, strict=True))
    print(
        f"{size} ranks: {len(near)} of {len(items)} greedy texts differ, at {near}, "
        f"and {drawn} seeded ones"
    )
    assert len(near) <= 1
    assert all(gap < NEAR for gap in near)
    # What a draw had for its second best is not told.
    assert drawn <= 1


def test_a_draft_head_that_is_split(tmp_path: Path) -> None:
    """Its channels make it large enough; its vocabulary is not one that the ranks divide."""
    checkpoints.write_target(tmp_path / "target")
    wide = {"intermediate_size": 176_000, "draft_vocab_size": 77}
    checkpoints.write_head(tmp_path / "eagle3", **wide)
    files = {"model": str(tmp_path / "target"), "draft": str(tmp_path / "eagle3")}
    settings = {**files, "grammar_isolated": False, "mask_deadline_ms": None, **TREE}
    with (
        build(settings) as oracle,
        build(settings, tensor_parallel_size=2) as engine,
    ):
        head = engine.core.worker.runner.drafter.head
        assert head.config.layer.own_heads == 2
        outputs_equal(oracle, engine, 23, 6)
