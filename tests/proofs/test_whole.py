"""The whole engine on Triton's kernels, interpreted, says what it says on torch's."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support import checkpoints
from tests.support.whole import Said, answers, launches

# In bfloat16 a sum in another order moves a logit by this, at most: law 8's bound.
CLOSE_LOGPROBS = 0.15
CHAIN: dict[str, Any] = {"num_steps": 2}
TREE: dict[str, Any] = {"num_steps": 2, "eagle_topk": 3, "num_draft_tokens": 6}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
WINDOW = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 6
}  # fmt: skip
CAPS = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16,
    "query_pre_attn_scalar": 16, "sliding_window": 6, "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def alike(got: list[Said], want: list[Said], bound: float) -> None:
    """The same tokens; where ``bound`` is over 0, up to one whose best two were that close.

    Requests without log-probabilities are sampled: rounding moves their draws, and there they are
    held to their end alone.
    """
    assert len(got) == len(want)
    for (mine, fault, _), (its, other, best) in zip(got, want, strict=True):
        assert (fault, other) == (None, None)
        pairs = zip(mine, its, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            assert len(mine) == len(its)
            continue
        assert bound, (mine, its)
        if best:
            assert best[at][0] - best[at][1] <= bound, (mine, its, best[at])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    # The target's changes, settings, and whether passes are recorded.
    "tree, recorded": ({}, TREE, True),
    "chain in a window, in bfloat16": (WINDOW, {**CHAIN, "dtype": "bfloat16"}, False),
    "tree, norms of queries and keys, in bfloat16": (QWEN3, {**TREE, "dtype": "bfloat16"}, False),
    "chain, caps and sandwich norms": (CAPS, CHAIN, False),
    "several lengths": ({}, {"adaptive": "default"}, True),
    "drafts of the model's own": ({}, {**TREE, "algorithm": "draft_model"}, True),
    "n-grams": ({}, {**CHAIN, "algorithm": "ngram", "overlap": "none"}, True),
    "tries": ({}, {**TREE, "tries": True}, True),
    "no drafts": ({}, {"algorithm": "none"}, True),
}


def prepare(tiny: dict[str, Any], folder: Path, name: str) -> tuple[dict[str, Any], bool]:
    changes, settings, held = CASES[name]
    model, draft = folder / "target", folder / "eagle3"
    checkpoints.write_target(model, num_hidden_layers=2, **changes)
    checkpoints.write_head(draft, layers=(-1, 0, 1))
    settings = {**tiny, "model": str(model), "draft": str(draft), **settings}
    if settings.get("algorithm") == "draft_model":
        checkpoints.write_target(folder / "small", seed=5, num_hidden_layers=1)
        settings["draft"] = str(folder / "small")
    return settings, held


@pytest.mark.ci
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_torchs_kernels(
    tiny: dict[str, Any], tmp_path: Path, interpreter: ProcessPoolExecutor, name: str
) -> None:
    """Greedy and sampled, free and under grammars, filtered, penalised and biased, four at once."""
    settings, held = prepare(tiny, tmp_path, name)
    got, want = (
        interpreter.submit(answers, kernels, settings, 4, 5, held).result()
        for kernels in ("triton", "reference")
    )
    alike(got, want, CLOSE_LOGPROBS if settings.get("dtype") == "bfloat16" else 0.0)


@pytest.mark.ci
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["tree, recorded", "chain in a window, in bfloat16", "tries"])
def test_a_step_touches_its_arguments_alone(
    tiny: dict[str, Any], tmp_path: Path, checked: ProcessPoolExecutor, name: str
) -> None:
    """Nor do two programs of a kernel touch what one of them writes, but for padding's page."""
    settings, held = prepare(tiny, tmp_path, name)
    before = checked.submit(launches).result()
    for tokens, fault, _ in checked.submit(answers, "triton", settings, 4, 5, held).result():
        assert fault is None
        assert tokens
    assert checked.submit(launches).result() > before + 100
