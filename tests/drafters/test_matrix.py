"""Every drafter against plain decoding: shapes of drafts, grammars, sampling, overlap, company."""

from typing import Any

import pytest

from overlap_spec.config import drafter_names
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar
from overlap_spec.types import Output
from tests.support import chaos, checkpoints, dflash
from tests.support.checkpoints import renumber
from tests.support.layouts import LAYOUTS, write
from tests.support.mtp import write_module
from tests.support.policies import share_nodes
from tests.support.tiers import few, pairs

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 4},
    "tree": {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 12},
    "ragged": {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 12},
}
# How the requests come, and how grammar work overlaps.
WAYS = [("mixed", "once-sync"), ("alone", "none")]
GRAMMARS = [None, Grammar.json_schema(chaos.PERSON), Grammar.regex(r"([a-f]{3}-\d{1,4}){9}")]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11, "top_p": 0.95},
    {"temperature": 0, "presence_penalty": 1.0, "logit_bias": {65: 2.0}, "min_tokens": 3},
]
# Every grammar with every way of sampling, in one batch.
CUT = {"max_tokens": 32, "complete": False, "logprobs": 2}
BATCH = [(g, s | CUT) for g in GRAMMARS for s in SAMPLING]
PROMPTS = [f"abcabc {n % 4} abcabc " * (1 + n % 3) for n in range(len(BATCH))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any]) -> dict[str, str]:
    """What each drafter drafts with, beside the random target."""
    folder = tmp_path_factory.mktemp("matrix")
    write(folder / "eagle", LAYOUTS["EAGLE-1/2, fc.bias, pytorch_model.bin"])
    shape = {"hidden_size": 16, "num_hidden_layers": 2}
    checkpoints.write_target(folder / "small", seed=5, **shape)
    write(folder / "layers", LAYOUTS["EAGLE-3, three layers"])
    write(folder / "parallel", LAYOUTS["P-EAGLE, ptd_token_id"])
    dflash.write(folder / "dflash", dflash.LAYOUTS["z-lab, sliding windows"])
    kept = [n for n in range(260) if n < 128 or n % 2 == 0]
    renumber(tiny["model"], folder / "other", kept[::-1], "unknown ")
    drafts = dict.fromkeys(KINDS, tiny["draft"])
    return drafts | {
        "eagle": str(folder / "eagle"),
        "eagle3 of three layers": str(folder / "layers"),
        "draft_model": str(folder / "small"),
        # Its own copy, all of whose chains are accepted but for the grammars' and the coins'.
        "draft_model of the target": tiny["model"],
        # The same without some of its tokens, the others under other numbers.
        "draft_model of another vocabulary": str(folder / "other"),
        "mtp": str(write_module(folder / "mtp")),
        "parallel": str(folder / "parallel"),
        "dflash": str(folder / "dflash"),
    }


KINDS = (
    "eagle", "eagle3", "eagle3 of three layers", "draft_model", "draft_model of the target",
    "draft_model of another vocabulary", "mtp", "parallel", "dflash", "ngram", "suffix", "slots",
    "slots,suffix", "suffix,eagle3", "grammar",
)  # fmt: skip
ON_HOST = ("ngram", "suffix", "slots", "slots,suffix", "suffix,eagle3")
ACCEPTED = ("draft_model of the target", "draft_model of another vocabulary", *ON_HOST, "grammar")


def settings_of(tiny: dict[str, Any], folders: dict[str, str], kind: str) -> dict[str, Any]:
    return {**tiny, "algorithm": kind.split()[0], "draft": folders[kind]}


def answer(engine: Engine, company: str = "mixed") -> list[Output]:
    """Nine requests, in one batch or one by one."""
    if company == "mixed":
        return engine.generate(PROMPTS, [g for g, _ in BATCH], [s for _, s in BATCH])
    every = zip(PROMPTS, BATCH, strict=True)
    return [engine.generate(prompt, grammar, how) for prompt, (grammar, how) in every]


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any]) -> list[Output]:
    with Engine(**tiny, algorithm="none", overlap="none", context_length=256) as engine:
        return answer(engine)


# Others have an engine's everyday test in a file of their own.
EVERYDAY = [
    (kind, shape, WAYS[0])
    for kind, shape in [
        ("draft_model of the target", "tree"), ("slots,suffix", "ragged"), ("parallel", "chain"),
        ("eagle", "tree"),
    ]
]  # fmt: skip


def test_no_drafter_is_left_out(folders: dict[str, str]) -> None:
    assert {name for kind in KINDS for name in kind.split()[0].split(",")} == set(drafter_names())
    assert set(folders) == {*KINDS}


@pytest.mark.parametrize(
    ("kind", "shape", "way"),
    few(pairs(KINDS, SHAPES, WAYS, given=EVERYDAY), *EVERYDAY),
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_drafts_change_nothing(
    tiny: dict[str, Any],
    folders: dict[str, str],
    plain: list[Output],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    shape: str,
    way: tuple[str, str],
) -> None:
    """Text, end and log-probabilities of nine requests are plain decoding's."""
    company, overlap = way
    settings = {**settings_of(tiny, folders, kind), **SHAPES[shape], "overlap": overlap}
    with Engine(**settings, context_length=256) as engine:
        if shape == "ragged":
            share_nodes(monkeypatch, engine, lambda batch, _: 5 * batch)
        outputs = answer(engine, company)
        assert engine.snapshot()["drafter"]["faults"] == 0
        assert engine.core.scheduler.allocator.in_use == 0
    for mine, its in zip(outputs, plain, strict=True):
        assert (mine.text, mine.token_ids) == (its.text, its.token_ids)
        assert (mine.finish_reason, mine.error) == (its.finish_reason, None)
        for a, b in zip(mine.logprobs, its.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]
    assert sum(output.stats.drafted_tokens for output in outputs) > 0
    if kind in ACCEPTED:
        assert sum(output.stats.accepted_drafts for output in outputs) > 0


@pytest.mark.parametrize("kind", few([kind for kind in KINDS if kind != "eagle3"]))
def test_chaos_with_each_drafter(
    tiny: dict[str, Any], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Random batches, under random delays and in a cache for which requests compete; the chaos
    tests of the worker are ``eagle3``'s."""
    first, settings = chaos.settings_of("tree", "crowded")
    first += 2000 + 100 * KINDS.index(kind)
    oracle = chaos.build(tiny, overlap="none", algorithm="none")
    chaos.start(monkeypatch, first)
    settings = {**settings_of(tiny, folders, kind), **settings}
    with oracle, chaos.build(settings) as engine:
        chaos.outputs_equal(oracle, engine, first, 8)
        assert engine.snapshot()["drafter"]["faults"] == 0
