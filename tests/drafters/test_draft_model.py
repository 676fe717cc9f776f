"""A draft model: drafts what it would say itself, on any context, in its own vocabulary."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.models.vocabulary import map_vocabulary, token_texts
from overlap_spec.types import Output
from tests.support import checkpoints
from tests.support.checkpoints import renumber
from tests.support.tiers import few

CHAIN: dict[str, Any] = {"num_steps": 4}
TREE: dict[str, Any] = {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 10}
PROMPTS = ["abcabcabc", "the train to platform 4", "x", "p" * 90]
GRAMMARS = [None, Grammar.regex(r"[a-f]{3}-\d{1,30}"), None, None]
ASKED = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of the same tokenizer and other shapes."""
    folder = tmp_path_factory.mktemp("drafts")
    shapes: dict[str, dict[str, Any]] = {
        "small": {"hidden_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 1},
        "short": {"max_position_embeddings": 64},
        "padded": {"vocab_size": 300},
        "narrow": {"vocab_size": 258},
        "tied": {"tie_word_embeddings": True},
    }
    for name, shape in shapes.items():
        checkpoints.write_target(folder / name, seed=7, **shape)
    # Of one mind: the likeliest path is always among a tree's branches.
    checkpoints.write_target(folder / "sure", seed=7, scale=16.0)
    return {name: str(folder / name) for name in (*shapes, "sure")}


@pytest.fixture(scope="module")
def plain(tiny: dict[str, Any]) -> list[Output]:
    return ask(tiny, algorithm="none", overlap="none")[0]


def ask(tiny: dict[str, Any], **settings: Any) -> tuple[list[Output], dict[str, Any]]:
    with Engine(**{**tiny, "context_length": 256, **settings}) as engine:
        outputs = engine.generate(PROMPTS, GRAMMARS, ASKED)
        return outputs, engine.snapshot()["drafter"]


def ids(outputs: list[Output]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("graphs", few((True, False), True))
@pytest.mark.parametrize("shape", few((CHAIN, TREE), TREE))
@pytest.mark.parametrize("renumbered", few([False, True], True))
def test_the_targets_own_copy_is_always_right(
    models: dict[str, str], tmp_path: Path, renumbered: bool, shape: dict[str, Any], graphs: bool
) -> None:
    """Each verify brings every drafted token and the bonus, also where all tokens have other
    numbers: its cache holds what it should."""
    draft = models["sure"]
    own = {"model": draft, "grammar_isolated": False, "adaptive": "static"}
    if renumbered:
        order = torch.randperm(260, generator=torch.Generator().manual_seed(2)).tolist()
        draft = str(tmp_path / "other")
        renumber(models["sure"], tmp_path / "other", order)
    plain, _ = ask(own, algorithm="none", overlap="none")
    settings = {**shape, "chunked_prefill_size": 32, "graphs": graphs}
    outputs, state = ask(own, algorithm="draft_model", draft=draft, **settings)
    assert ids(outputs) == ids(plain)
    assert state["faults"] == 0
    for output, grammar in zip(outputs, GRAMMARS, strict=True):
        if grammar is None:
            # The first token comes with the prefill.
            assert output.stats.verifies == -(-39 // (shape["num_steps"] + 1))


def test_reused_pages_draft_as_well_as_computed_ones(tiny: dict[str, Any]) -> None:
    settings = {"algorithm": "draft_model", "draft": tiny["model"], **CHAIN}
    with Engine(**{**tiny, **settings}) as engine:
        first = engine.generate("p" * 90, None, ASKED)
        second = engine.generate("p" * 90, None, ASKED)
        third = engine.generate("p" * 70 + "q", None, ASKED)
    assert second.stats.cached_tokens >= 80
    assert third.stats.cached_tokens >= 64
    assert second.token_ids == first.token_ids
    for output in (first, second, third):
        assert output.stats.verifies == 8


@pytest.mark.parametrize(
    ("shape", "overlap"), few([(CHAIN, "none"), (TREE, "once-sync")], (TREE, "once-sync"))
)
@pytest.mark.parametrize("name", few(("small", "short", "padded", "narrow", "tied"), "narrow"))
def test_another_model_changes_no_text(
    tiny: dict[str, Any],
    models: dict[str, str],
    plain: list[Output],
    name: str,
    shape: dict[str, Any],
    overlap: str,
) -> None:
    """Also past its own context, and where its head is padded to another size."""
    settings = {**shape, "overlap": overlap}
    outputs, state = ask(tiny, algorithm="draft_model", draft=models[name], **settings)
    assert ids(outputs) == ids(plain)
    assert state["faults"] == 0
    assert all(output.stats.drafted_tokens for output in outputs)


def test_its_memory_is_counted(tiny: dict[str, Any], models: dict[str, str]) -> None:
    """All its layers share the target's pages."""
    with Engine(**{**tiny, "draft": models["small"]}, algorithm="draft_model") as engine:
        runner = engine.core.worker.runner
        (cache,) = runner.draft_pools
        assert cache.first == 0
        assert cache.k.shape[:2] == (2, runner.pool.k.shape[1])


def test_an_unknown_token_is_read_by_its_end(tmp_path: Path) -> None:
    wanted = {"a": 0, "b": 1, "ab": 2, "xab": 3, "xy": 4}
    own = {"b": 0, "ab": 1, "a": 2, "q": 3}
    for name, vocabulary in (("draft", own), ("target", wanted)):
        (tmp_path / name).mkdir()
        data = {"model": {"vocab": vocabulary}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(data))
    # Both are padded; a token without a known end keeps its number.
    found = map_vocabulary(tmp_path / "draft", tmp_path / "target", 4, 7)
    assert found.read.tolist() == [2, 0, 1, 1, 3, 3, 3]
    assert found.drafted is not None
    assert found.offsets is not None
    assert found.drafted.tolist() == [0, 1, 2]
    assert (found.offsets + torch.arange(3)).tolist() == [1, 2, 0]
    assert found.share == pytest.approx(3 / 5)


def test_too_little_in_common_is_an_error(tiny: dict[str, Any], tmp_path: Path) -> None:
    """It names the share, and the first difference."""
    renumber(tiny["model"], tmp_path / "little", [*range(10), *range(12, 122)], "unknown ")
    said = r"50% of it, and has 46\.2%; the first difference is token 10, '-' here and '\+' in the"
    with pytest.raises(CheckpointError, match=said):
        Engine(**{**tiny, "draft": str(tmp_path / "little")}, algorithm="draft_model")


def test_a_missing_tokenizer_is_named(
    tiny: dict[str, Any], models: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(models["small"], folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Engine(**{**tiny, "draft": str(folder)}, algorithm="draft_model")


def test_vocabularies_that_are_lists(tmp_path: Path) -> None:
    """A Unigram tokenizer spells its tokens as [text, score], by id."""
    for name, text in (("a", "one"), ("b", "other")):
        (tmp_path / name).mkdir()
        data = {"model": {"vocab": [["<unk>", 0.0], [text, -1.5]]}, "added_tokens": []}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(data))
    assert token_texts(tmp_path / "a" / "tokenizer.json") == {0: "<unk>", 1: "one"}
    assert map_vocabulary(tmp_path / "a", tmp_path / "a", 2, 2).drafted is None
    found = map_vocabulary(tmp_path / "a", tmp_path / "b", 2, 2)
    assert found.drafted is not None
    assert found.drafted.tolist() == [0]
