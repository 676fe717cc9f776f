"""P-EAGLE's drafts: all depths in one pass, chains and trees of their marginals."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_spec.drafters.parallel import ParallelDrafter
from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from tests.support.checkpoints import rewrite
from tests.support.layouts import LAYOUTS, PROMPT, oracle, write
from tests.support.plain_layers import rms
from tests.support.seen import Seen

NAMES = [name for name in LAYOUTS if name.startswith("P-EAGLE")]
STEPS = 4


def settings_of(tiny: dict[str, Any], folder: Path, **others: Any) -> dict[str, Any]:
    ours = {"algorithm": "parallel", "draft": str(folder)}
    return {**tiny, **ours, "num_steps": STEPS, **others}


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_all_depths_are_one_causal_pass_over_masks(
    tiny: dict[str, Any], reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At the first root and at later ones, behind a prompt in chunks: plain torch over the whole
    text with masks behind it."""
    layout = LAYOUTS[name]
    weights = write(tmp_path / "head", layout)
    seen = Seen(monkeypatch, ParallelDrafter)
    settings = settings_of(tiny, tmp_path / "head", graphs=False, overlap="none")
    with Engine(**settings, chunked_prefill_size=32) as engine:
        prompt = engine.tokenizer.encode(PROMPT)
        output = engine.generate(PROMPT, None, {"max_tokens": 8, "temperature": 0}, raw=True)
        assert engine.snapshot()["drafter"]["faults"] == 0
        drafter = engine.core.worker.runner.drafter
        ids = drafter.head.d2t + torch.arange(len(drafter.head.d2t))
    tokens = torch.tensor([*prompt, *output.token_ids])
    inputs = list(reference(tokens[None], output_hidden_states=True).hidden_states[:-1])
    held: list[Tensor] = []
    hook = reference.model.norm.register_forward_pre_hook(lambda _, x: held.append(x[0]))
    reference(tokens[None])
    hook.remove()
    features = torch.cat([[*inputs, held[0]][i][0] for i in layout.features], -1)
    table = weights.get("embed_tokens.weight", reference.model.embed_tokens.weight)
    mask = next(layout.config[n] for n in ("ptd_token_id", "pard_token", "mask_token_id")
                if n in layout.config)  # fmt: skip

    checked = 0
    for (roots, draft), states in zip(seen.drafts, seen.states, strict=True):
        root = int(roots.positions[0])
        if not len(prompt) <= root < len(tokens):
            continue
        known = torch.cat([tokens[1 : root + 1], torch.full((STEPS - 1,), mask)])
        before = torch.cat(
            [features[:root], weights["mask_hidden"].view(1, -1).expand(STEPS - 1, -1)]
        )
        positions = torch.arange(1, root + STEPS)
        want = oracle(layout, weights, table[known], before, positions)[-STEPS:]
        assert torch.allclose(states[0], want, atol=5e-4, rtol=1e-3)
        normed = rms(want, weights["norm.weight"])
        logits = normed @ weights.get("lm_head.weight", reference.lm_head.weight).T
        best = logits.log_softmax(-1).max(-1)
        assert draft.tokens[0].tolist() == ids[best.indices].tolist()
        assert torch.allclose(draft.scores[0], best.values.cumsum(0), atol=1e-3)
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("seed", [None, 7])
@torch.no_grad()
def test_a_tree_has_the_best_nodes_by_the_product_of_marginals(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    """Of all paths over the best tokens of each depth; a sampled request's have its noise."""
    write(tmp_path / "head", LAYOUTS[NAMES[0]])
    seen = Seen(monkeypatch, ParallelDrafter)
    shape = {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 8}
    sampling = {"max_tokens": 6, "temperature": 0.0 if seed is None else 0.8, "seed": seed}
    settings = settings_of(tiny, tmp_path / "head", graphs=False, overlap="none") | shape
    with Engine(**settings) as engine:
        engine.generate(PROMPT, None, sampling)
        drafter = engine.core.worker.runner.drafter
        for (roots, draft), states in zip(seen.drafts, seen.states, strict=True):
            levels = [
                drafter.candidates(states[:, depth], 3, roots.noise(depth + 1, 1), None)[:2]
                for depth in range(3)
            ]
            paths = {}
            for depth in (1, 2, 3):
                for ranks in product(range(3), repeat=depth):
                    score = sum(float(levels[d][0][0, r]) for d, r in enumerate(ranks))
                    paths[tuple(int(levels[d][1][0, r]) for d, r in enumerate(ranks))] = score
            best = sorted(paths, key=lambda path: -paths[path])[:7]
            own: list[tuple[int, ...]] = [()]
            for token, parent in zip(
                draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True
            ):
                own.append((*own[parent], token))
            assert sorted(own[1:]) == sorted(best)
            for path, score in zip(own[1:], draft.scores[0].tolist(), strict=True):
                assert score == pytest.approx(paths[path], abs=1e-4)


def test_one_pass_a_step_whatever_the_depth(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: a draft is one pass of the head, and none where it is one token deep."""
    write(tmp_path / "head", LAYOUTS[NAMES[0]])
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        own = getattr(ParallelDrafter, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return own(*arguments)

        return call

    for name in ("advance", "draft", "extend"):
        monkeypatch.setattr(ParallelDrafter, name, counted(name))
    tree = {"eagle_topk": 3, "num_draft_tokens": 10}
    for steps, shape in ((1, {}), (4, {}), (4, tree)):
        calls.clear()
        settings = settings_of(tiny, tmp_path / "head", graphs=False, **shape)
        with Engine(**settings | {"num_steps": steps}) as engine:
            engine.generate(PROMPT, None, {"max_tokens": 8, "temperature": 0})
        assert calls["draft"] > 0
        assert calls["advance"] == calls["extend"] + (calls["draft"] if steps > 1 else 0)


def changed(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "config.json", **fields)


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        (NAMES[0], changed(ptd_token_id=None), "names no mask token"),
        (NAMES[0], changed(ptd_token_id=1000), "mask token 1000 is not in the vocabulary"),
        ("EAGLE-3, three layers", changed(ptd_token_id=5), "missing weights: mask_hidden"),
    ],
)
def test_what_does_not_load_is_named(
    tiny: dict[str, Any], tmp_path: Path, layout: str, change: Callable[[Path], None], said: str
) -> None:
    write(tmp_path / "head", LAYOUTS[layout])
    change(tmp_path / "head")
    with pytest.raises(CheckpointError, match=said):
        Engine(**settings_of(tiny, tmp_path / "head"))


def test_eagle_3_does_not_take_half_of_a_head_for_the_whole(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "head", LAYOUTS[NAMES[0]])
    with pytest.raises(CheckpointError, match="no layer takes: mask_hidden"):
        Engine(**settings_of(tiny, tmp_path / "head", algorithm="eagle3"))
