"""A request whose logits are no numbers ends alone: what it shares with others stays as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overlap_spec import Engine
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.types import Output
from tests.support import checkpoints
from tests.support.tiers import few

# A token that the target's embedding turns into NaN, and that nobody draws unasked.
POISON, POISON_TEXT = 1, '"'
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SHARED = "the same long start of every prompt, "


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("poisoned")
    checkpoints.write_target(folder / "target")
    checkpoints.write_head(folder / "eagle3")
    for part, name in (("target", "lm_head.weight"), ("eagle3", "lm_head.weight")):
        change(folder / part, name, 0.0)
    change(folder / "target", "model.embed_tokens.weight", torch.nan)
    return {
        "model": str(folder / "target"),
        "draft": str(folder / "eagle3"),
        "grammar_isolated": False,
    }


def change(checkpoint: Path, name: str, value: float) -> None:
    file = checkpoint / "model.safetensors"
    state = load_file(file)
    state[name][POISON] = value
    save_file(state, file)


def build(poisoned: dict[str, Any], drafter: str, overlap: str, **settings: Any) -> Engine:
    """Two rows and few pages: what a request leaves is soon another's."""
    settings = {
        "algorithm": drafter,
        "num_steps": 3,
        "eagle_topk": 2,
        "adaptive": "static",
        "page_size": 8,
        "context_length": 128,
        "max_running_requests": 2,
        "max_total_tokens": 256,
        **settings,
    }
    return Engine(**poisoned, overlap=overlap, **settings)


def finish(engine: Engine, handles: list[RequestHandle]) -> list[Output]:
    while any(handle.output is None for handle in handles):
        engine.step()
    engine.release(handles)
    return [handle.output for handle in handles if handle.output is not None]


FAULTS = {
    # Found behind the prompt, whose pages are in the prefix tree already.
    "prompt": (SHARED + POISON_TEXT, {}),
    # Found while it decodes, behind a token that it is made to choose.
    "output": (SHARED + "but then", {"logit_bias": {POISON: 100.0}}),
    # Never told, since it has ended when that result comes: its pages hold it all the same.
    "ended": (SHARED + "but then", {"logit_bias": {POISON: 100.0}, "stop": POISON_TEXT}),
}


@pytest.mark.parametrize("overlap", few(("none", "double-sync", "once-sync"), "once-sync"))
@pytest.mark.parametrize("drafter", few(("none", "eagle3"), "eagle3"))
@pytest.mark.parametrize("fault", few(FAULTS, "output"))
def test_who_shares_its_prefix_goes_on(
    poisoned: dict[str, Any], fault: str, drafter: str, overlap: str
) -> None:
    if (fault, overlap) == ("ended", "none"):
        pytest.skip("no step is under way behind the end")
    prompt, bias = FAULTS[fault]
    beside, behind = SHARED + "and this beside it", SHARED + "and this behind it"
    # Given the pages of the failed one, and short: they end before what those hold.
    others = ["another", "quite another", "quite another prompt", "and quite another prompt"]
    with build(poisoned, "none", "none") as engine:
        prompts = [beside, *others, behind]
        options: dict[str, Any] = {**GREEDY, "raw": True, "max_tokens": 48}
        want = [engine.generate(prompt, None, **options).token_ids for prompt in prompts]
    with build(poisoned, drafter, overlap) as engine:
        first = engine.submit(beside, None, **options)
        while first.pushed_tokens < 2:
            engine.step()
        failing = engine.submit(prompt, None, {**GREEDY, **bias}, raw=True, max_tokens=48)
        while failing.output is None:
            engine.step()
        assert first.output is None, "the failing request was to run beside it"
        later = [engine.submit(prompt, None, **options) for prompt in (*others, behind)]
        got = finish(engine, [first, *later])
        engine.release([failing])
        assert failing.output is not None
        error, reason = failing.output.error, failing.output.finish_reason
        if fault == "ended":
            assert (reason, error) == ("stop", None)
        else:
            assert reason == "error"
            assert "not numbers" in (error or "")
        assert [output.error for output in got] == [None] * 6
        assert [output.token_ids for output in got] == want
        assert engine.snapshot()["pages_in_use"] == 0
