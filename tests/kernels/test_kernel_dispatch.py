"""Which of an operation's two forms runs; and the definitions of what has no other test."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overlap_spec import kernels
from overlap_spec.errors import ConfigError
from overlap_spec.kernels.dispatch import operation, reference_of, use

ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.ci
def test_kernels_of_the_cpu_never_import_triton() -> None:
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "from overlap_spec import kernels\n"
        "x = kernels.rms_norm(torch.ones(2, 4), torch.ones(4), 0.0)\n"
        "assert x.tolist() == [[1.0] * 4] * 2"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_kernel_choice_of_the_environment_is_checked() -> None:
    done = python("import overlap_spec.kernels", OVERLAP_SPEC_KERNELS="fastest")
    assert "OVERLAP_SPEC_KERNELS: 'fastest' is none of auto, reference, triton" in done.stderr
    with pytest.raises(ConfigError, match="none of auto"), use("fast"):
        pass


def test_kernel_choice_goes_by_device_choice_and_gradient(monkeypatch: Any) -> None:
    """A stand-in for the Triton module shows which form is called."""
    stand_in = type(sys)("overlap_spec.kernels.triton.invented")
    stand_in.twice = lambda x: ("triton", x)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)

    def twice(x: Any) -> Any:
        return "reference", x

    twice.__module__ = "overlap_spec.kernels.invented"
    run = operation(twice)

    class OnCuda(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    cpu, cuda = torch.ones(1), torch.ones(1).as_subclass(OnCuda)
    assert run(cpu)[0] == "reference"
    assert run(cuda)[0] == "triton"
    with use("reference"):
        assert run(cuda)[0] == "reference"
    with use("triton"):
        assert run(cpu)[0] == "triton"
        with use("auto"):
            assert run(cpu)[0] == "reference"
    wanted = torch.ones(1, requires_grad=True).as_subclass(OnCuda)
    assert run(wanted)[0] == "reference"
    with torch.no_grad():
        assert run(wanted)[0] == "triton"
    assert reference_of(run) is twice
    assert run(cpu)[0] == "reference"


def test_every_kernel_has_its_references_signature() -> None:
    import inspect

    triton = pytest.importorskip("triton")
    assert triton
    import importlib

    found = 0
    for name in kernels.__all__:
        function = getattr(kernels, name)
        if not hasattr(function, "__wrapped__"):
            continue
        module = function.__module__.replace(".kernels.", ".kernels.triton.")
        fast = getattr(importlib.import_module(module), name, None)
        if fast is None:
            # Its reference is made of operations that have one.
            assert name == "legal_candidates"
            continue
        # A reference that TorchScript reads spells its types another way.
        theirs, ours = (inspect.signature(each, eval_str=True) for each in (fast, function))
        assert theirs == ours, name
        found += 1
    assert found == 23


def test_kernel_add_rms_norm_is_the_norm_of_the_sum() -> None:
    x, residual = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).unbind()
    weight = torch.arange(8.0)
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    wide = (x + residual).double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(normed.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(total, x + residual)


def test_kernel_pack_mask_is_numpys() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (1, 63, 64, 65, 130):
        mask = torch.rand(3, 5, width, generator=generator) < 0.5
        packed = kernels.pack_mask(mask)
        padded = np.pad(mask.numpy(), ((0, 0), (0, 0), (0, -width % 64)))
        assert np.array_equal(
            packed.numpy(), np.packbits(padded, axis=-1, bitorder="little").view(np.int64)
        )


def test_kernel_page_slots_and_moves_go_through_pages() -> None:
    pages = torch.tensor([[7, 1], [5, 2]])
    slots = kernels.page_slots(pages, torch.tensor([[0, 3, 5], [4, 7, 2]]), 4)
    assert slots.tolist() == [[28, 31, 5], [8, 11, 22]]
    k = torch.arange(2 * 3 * 4).view(2, 3, 4, 1, 1).float()
    v, before = -k, k.clone()
    # 6 is read by the move to 5 before the move from 7 overwrites it.
    kernels.move_kv(k, v, torch.tensor([[4, 6, 7]]), torch.tensor([[4, 5, 6]]))
    flat, old = k.view(2, 12), before.view(2, 12)
    assert torch.equal(flat[:, 4:7], old[:, [4, 6, 7]])
    assert torch.equal(flat[:, 7:], old[:, 7:])
    assert torch.equal(v, -k)


def test_kernel_rotate_and_store_is_its_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, rotary = torch.randn(3, 8, 6, generator=generator), torch.randn(3, 2, 6)
    weight, slots = torch.rand(6, 6, generator=generator), torch.tensor([9, 0, 4])
    for norm in (None, (weight, 1e-6)):
        caches = [torch.zeros(3, 4, 2, 6) for _ in range(4)]
        q = kernels.rotate_and_store(qkv, rotary, *caches[:2], slots, norm)
        qk = qkv[:, :6] if norm is None else kernels.rms_norm(qkv[:, :6], *norm)
        qk = kernels.apply_rope(qk, rotary)
        for cache, new in zip(caches[2:], (qk[:, 4:], qkv[:, 6:]), strict=True):
            cache.view(12, 2, 6)[slots] = new
        for got, want in ((q, qk[:, :4]), (caches[0], caches[2]), (caches[1], caches[3])):
            torch.testing.assert_close(got, want)
        assert caches[0].view(12, 2, 6)[[9, 0, 4]].abs().min() > 0


def test_kernel_masked_choose_minds_places() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 3)
    rows = torch.tensor([[0b101], [0b101], [0]], dtype=torch.int32)
    assert kernels.masked_choose(logits.clone(), rows).tolist() == [2, 2, -1]
    places = torch.tensor([-1, 1, -1])
    assert kernels.masked_choose(logits.clone(), rows[:2], places).tolist() == [1, 2, 1]
    assert kernels.masked_choose(logits.clone(), rows, torch.tensor([2, 0, 0])).tolist() == [
        -1,
        2,
        2,
    ]
    warm, seeds = torch.full((3,), 1.0), torch.arange(60).view(20, 3)
    drawn = [
        kernels.masked_choose(
            logits.clone(), rows, None, warm, kernels.noise_keys(row, row)
        ).tolist()
        for row in seeds
    ]
    assert {token for row in drawn for token in row[:2]} == {0, 2}
    assert {row[2] for row in drawn} == {-1}


def test_kernel_top_candidates_map_into_the_targets_vocabulary() -> None:
    logits = torch.tensor([[0.0, 4.0, 1.0], [5.0, 0.0, 2.0]])
    scores, tokens = kernels.top_candidates(logits, 2, torch.tensor([10, 20, 30]))
    assert tokens.tolist() == [[21, 32], [10, 32]]
    want = logits.log_softmax(-1).sort(descending=True).values[:, :2]
    torch.testing.assert_close(scores, want)


def test_kernel_top_candidates_with_noise_are_led_by_the_targets_choice() -> None:
    """Of the same logits, under other names and with other masks: the same noise, by target id."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 40, 30
    names = torch.randperm(90, generator=generator)[:vocab]
    logits = torch.full((rows, 90), -torch.inf)
    logits[:, names] = torch.randn(rows, vocab, generator=generator)
    keys = kernels.noise_keys(torch.arange(rows), torch.arange(rows) * 3)
    for heat in (0.0, 0.5, 2.0):
        warm = torch.full((rows,), heat)
        noise = kernels.Noise(warm, keys)
        args = logits[:, names].contiguous(), 3, names - torch.arange(vocab), noise
        scores, tokens = kernels.top_candidates(*args)
        assert torch.equal(tokens[:, 0], kernels.choose(logits, warm, keys))
        # What is left without the first one is led by the second.
        without = logits.scatter(1, tokens[:, :1], -torch.inf)
        assert torch.equal(tokens[:, 1], kernels.choose(without, warm, keys))
        assert (scores[:, :2] >= scores[:, 1:]).all()
        assert (scores.exp().sum(1) <= 1 + 1e-5).all()
