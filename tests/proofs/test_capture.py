"""All that ``worker/graphs.py`` records can be captured in CUDA graphs: the host reads no value,
nothing is copied from or to it, no memory is pinned, nothing waits. And each of these is found."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from overlap_spec.engine import Engine
from overlap_spec.engine.grammar_drafts import wide_tier
from overlap_spec.kernels.triton.launch import Launch
from overlap_spec.tiers import Tier
from overlap_spec.worker.cuda_graphs import CudaGraphs
from overlap_spec.worker.model_runner import ModelRunner
from tests.support import checkpoints
from tests.support.capture import DEVICE, Capture, CaptureError, as_on_a_gpu, engine_of
from tests.support.checkpoints import renumber
from tests.support.layouts import LAYOUTS, write
from tests.support.models import HYBRID
from tests.support.mtp import write_module
from tests.support.tiers import few

pytestmark = pytest.mark.ci

SIZES = (1, 3)
CHAIN: dict[str, Any] = {"num_steps": 3}
TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 9}
# Drafter, shape of its drafts, and more settings.
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "eagle3, chain": ("eagle3", CHAIN),
    "eagle3, tree": ("eagle3", TREE),
    "eagle3, several lengths": ("eagle3", {"adaptive": "default"}),
    "eagle3, tries": ("eagle3", {**TREE, "tries": True}),
    "eagle3, thresholds": ("eagle3", {**TREE, "threshold_acc": 0.5}),
    "eagle3 of three layers": ("eagle3 of three layers", TREE),
    "eagle": ("eagle", TREE),
    "draft_model": ("draft_model", TREE),
    "draft_model of another vocabulary": ("draft_model of another vocabulary", TREE),
    "mtp": ("mtp", CHAIN),
    "mtp, tree": ("mtp", TREE),
    "grammar": ("grammar", CHAIN),
    "ngram": ("ngram", CHAIN),
    "suffix, tree": ("suffix", TREE),
}
# Targets: what of their layers differs in operations.
TARGETS: dict[str, dict[str, Any]] = {
    "window": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8
    },
    "norms of queries and keys": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16
    },
    "biases": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "caps": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16,
        "query_pre_attn_scalar": 16, "sliding_window": 8, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True},
    "states": HYBRID,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any]) -> dict[str, str]:
    """What each drafter drafts with."""
    folder = tmp_path_factory.mktemp("capture")
    write(folder / "eagle", LAYOUTS["EAGLE-1/2, fc.bias, pytorch_model.bin"])
    write(folder / "layers", LAYOUTS["EAGLE-3, three layers"])
    checkpoints.write_target(folder / "small", seed=5, hidden_size=16, num_hidden_layers=2)
    kept = [n for n in range(260) if n < 128 or n % 2 == 0]
    renumber(tiny["model"], folder / "other", kept[::-1], "unknown ")
    found = {
        "eagle": folder / "eagle",
        "eagle3 of three layers": folder / "layers",
        "draft_model": folder / "small",
        "draft_model of another vocabulary": folder / "other",
        "mtp": write_module(folder / "mtp"),
    }
    return {name: str(path) for name, path in found.items()}


def tiers_of(engine: Engine) -> tuple[Tier, ...]:
    """All that a plan may have."""
    own = engine.core.budgets.policy.tiers
    wide = [wide_tier(tier) for tier in own if tier.steps]
    return (*own, *wide) if engine.core.budgets.widens else own


def record(graphs: CudaGraphs, tiers: tuple[Tier, ...], sizes: tuple[int, ...] = SIZES) -> int:
    """Everything that steps may ask for; how many passes that is."""
    for tier in tiers:
        for size in sizes:
            for sampled, told in product((False, True), repeat=2):
                graphs.draft(tier, size, sampled, told)
            graphs.behind(tier, size)
            if tier.nodes > 1:
                # A node more than the roots, and all but one.
                for nodes in {size + 1, size * tier.nodes - 1}:
                    graphs.packed(tier, size, nodes)
    return graphs.count


def captured(
    engine: Engine, sizes: tuple[int, ...] = SIZES
) -> tuple[Capture, int, list[Launch], Exception | None]:
    """What was captured, how many passes were asked for, and the drafter's fault."""
    worker = engine.core.worker
    with as_on_a_gpu(worker) as (capture, graphs, launches):
        count = record(graphs, tiers_of(engine), sizes)
        fault, worker.guard.fault = worker.guard.fault, None
    return capture, count, launches, fault


@pytest.mark.parametrize("name", few(DRAFTERS, "eagle3, tree", "eagle3, tries"))
def test_every_recorded_pass_can_be_captured(
    tiny: dict[str, Any], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind, settings = DRAFTERS[name]
    settings = {**settings, "algorithm": kind.split()[0]}
    if kind in folders:
        settings["draft"] = folders[kind]
    with engine_of(tiny, monkeypatch, **settings) as engine:
        tiers, drafter = tiers_of(engine), engine.core.worker.runner.drafter
        assert len(tiers) > len(engine.core.budgets.policy.tiers) or not settings.get("tries")
        capture, count, launches, fault = captured(engine)
        assert fault is None
        assert capture.refused == []
        assert capture.graphs == count
        # Verify, accept, and two packed verifies; draft and extend where a drafter has them.
        whole = 2 + (drafter is None or not drafter.host)
        whole += drafter is not None and engine.core.worker.runner.extends and not drafter.host
        each = whole + 2 * (max(tier.nodes for tier in tiers) > 1)
        assert count >= len(SIZES) * each - len(SIZES)
        assert capture.operations > 10 * count
        names = {one.kernel.__name__ for one in launches}
        assert {"_attend", "_rotate_and_store"} <= names
        # The engine serves as if nothing had been.
        assert engine.generate("abc", None, {"max_tokens": 3}).token_ids


@pytest.mark.parametrize("name", few(TARGETS, "experts"))
def test_every_kind_of_layer_can_be_captured(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    checkpoints.write_target(tmp_path, **TARGETS[name])
    # What keeps states drafts for no other.
    draft = tiny["model"] if name == "states" else str(tmp_path)
    settings = {**tiny, "model": str(tmp_path), "algorithm": "draft_model", "draft": draft}
    with engine_of(settings, monkeypatch, **TREE) as engine:
        capture, count, _, fault = captured(engine)
    assert fault is None
    assert capture.refused == []
    assert capture.graphs == count


Fault = Callable[[Tensor], object]
FAULTS: dict[str, tuple[Fault, str]] = {
    "item": (lambda x: x.flatten()[0].item(), "reads a value"),
    "int": (lambda x: int(x.flatten()[0]), "reads a value"),
    "if": (lambda x: 1 if (x > 0).all() else 0, "reads a value"),
    "tolist": (lambda x: x.flatten()[:2].tolist(), "goes down to the host"),
    "equal": (lambda x: torch.equal(x, x), "reads a value"),
    "nonzero": (lambda x: (x > 0).nonzero(), "reads a value"),
    "masked_select": (lambda x: x.masked_select(x > 0), "reads a value"),
    "unique": (lambda x: x.unique(), "reads a value"),
    "repeats of a tensor": (lambda x: x.flatten().repeat_interleave(x.flatten()), "reads a value"),
    "a mask as an index": (lambda x: x[x > 0], "counts a mask's entries"),
    "a mask that is written to": (lambda x: x.clone().index_put_((x > 0,), x.new_zeros(())),
        "counts a mask's entries"),
    "an expanded tensor that is written to": (
        lambda x: x.new_zeros(1).expand(2).copy_(x.flatten()[:2]),
        "share their memory",
    ),
    "tensor": (lambda x: torch.tensor([1, 2], device=x.device), "comes up from the host"),
    "new_tensor": (lambda x: x.new_tensor([1, 2]), "comes up from the host"),
    "single tensor": (lambda x: torch.tensor(3, device=x.device), "comes up from the host"),
    "to": (lambda x: torch.arange(3, device="cpu").to(x.device), "comes up from the host"),
    "copy": (lambda x: x.new_zeros(3).copy_(torch.arange(3, device="cpu")),
        "comes up from the host"),
    "an index on the host": (lambda x: x.flatten()[torch.zeros(2, dtype=torch.int64, device="cpu")],
        "comes up from the host"),
    "a number written to an index": (lambda x: x.flatten().clone().index_put_((x.flatten() * 0,),
        torch.tensor(1, dtype=x.dtype, device="cpu")), "comes up from the host"),
    "cpu": (lambda x: x.cpu(), "goes down to the host"),
    "copy to the host": (lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x),
        "goes down to the host"),
    "pinned": (lambda _: torch.empty(3, device="cpu", pin_memory=True), "pins memory"),
    "synchronize": (lambda _: torch.cuda.synchronize(), "waits for the device"),
    "an event's wait": (
        lambda _: torch.cuda.Event.synchronize(None),  # type: ignore[arg-type]
        "waits for the device",
    ),
    "an event's query": (
        lambda _: torch.cuda.Event.query(None),  # type: ignore[arg-type]
        "waits for the device",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tree_engine(tiny: dict[str, Any]) -> Iterator[Engine]:
    with (
        pytest.MonkeyPatch.context() as patch,
        engine_of(tiny, patch, algorithm="eagle3", **TREE) as engine,
    ):
        yield engine


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_capture_refuses_is_found(
    tree_engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where every token's position is bounded, in verify."""
    fault, why = FAULTS[name]
    within = ModelRunner._within

    def spoilt(runner: ModelRunner, positions: Tensor) -> Tensor:
        # Not in the run before the capture: there is no value to read there either.
        if capture.recording:
            fault(positions)
        return within(runner, positions)

    monkeypatch.setattr(ModelRunner, "_within", spoilt)
    worker = tree_engine.core.worker
    with as_on_a_gpu(worker) as (capture, graphs, _), pytest.raises(CaptureError, match=why):
        record(graphs, tree_engine.core.budgets.policy.tiers, (2,))
    assert why in capture.refused[0]


def test_two_inputs_in_one_place_are_found(tree_engine: Engine) -> None:
    """Of which a call would write one over the other; an expanded one gets memory of its own."""
    with as_on_a_gpu(tree_engine.core.worker) as (capture, graphs, _):
        one = torch.zeros(2, device=DEVICE)
        graphs.make(lambda a, b: (a + b,), (one, one[:1].expand(2)))
        with pytest.raises(CaptureError, match="another one"):
            graphs.make(lambda a, b: (a + b,), (one, one))
    assert len(capture.refused) == 1
