"""What an engine takes, and what a closed one leaves behind."""

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_spec import Engine, Grammar
from overlap_spec.config import EngineConfig
from overlap_spec.worker.build import count_pages
from overlap_spec.worker.kv_pool import ALIGNMENT, lazy_zeros
from tests.support.tiers import few

# Measured 421 MB with torch 2.13 and xgrammar; 1,230 MB when caches were written ahead.
MOST_MB = 600
ONE_PROMPT = """
import sys
from overlap_spec import Engine, Grammar
with Engine() as engine:
    assert engine.generate("Extract name. Ada Lee", Grammar.json_object()).token_ids
    loaded = "sympy" in sys.modules
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), loaded)
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_prompt_takes_no_memory_for_requests_that_never_come() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ONE_PROMPT]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    peak_kb, loaded = run.stdout.split()
    assert int(peak_kb) / 1000 < MOST_MB
    # Nothing of this engine needs symbolic shapes, which cost half a second.
    assert loaded == "False"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_zeros(dtype: torch.dtype) -> None:
    made = lazy_zeros((3, 5, 7), dtype, torch.device("cpu"))
    assert (made.shape, made.dtype) == ((3, 5, 7), dtype)
    assert made.data_ptr() % ALIGNMENT == 0
    assert not made.any()
    made[2, 4, 6] = 1
    assert made.sum() == 1


@pytest.mark.parametrize("overlap", few(["none", "once-sync"], "once-sync"))
def test_a_closed_engine_holds_nothing(tiny: dict[str, Any], overlap: str) -> None:
    engine = Engine(**tiny, overlap=overlap, device="cpu")
    engine.generate("one", Grammar.json_object(), {"max_tokens": 8})
    runner = engine.core.worker.runner
    assert engine.core.worker.recordings.count
    assert engine.compiler.snapshot()["cache_bytes"]
    held = [weakref.ref(t) for t in (*runner.parameters(), *runner.buffers())]
    assert len(held) > 30
    engine.close()
    assert [ref().shape for ref in held if ref() is not None] == []  # type: ignore[union-attr]
    assert engine.core.worker.recordings.count == 0
    assert engine.compiler.snapshot()["cache_bytes"] == 0
    # What it says of itself is still there.
    assert engine.snapshot()["pages_in_use"] == 0
    assert engine.context_length == engine.context_length
    engine.close()


def test_pages_are_counted_after_what_is_free_is_given_back(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an engine after another one would find the first one's memory taken."""
    held, freed = [40 << 20], []

    def empty_cache() -> None:
        freed.append(held.pop())

    def mem_get_info(_: torch.device) -> tuple[int, int]:
        return (100 << 20) - sum(held), 100 << 20

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    config = EngineConfig(**tiny)
    pages = count_pages(config, 1 << 20, 1000, torch.device("cuda"))
    assert freed
    assert pages == 85 + 1


def test_a_start_reads_zeros_whatever_was_computed_before(tiny: dict[str, Any]) -> None:
    """The feature before a prompt is page 0's; what is kept of no page goes elsewhere."""
    with Engine(**tiny, page_size=4, overlap="none") as engine:
        engine.generate(["one", "two and three", "4"], None, {"max_tokens": 12})
        features = engine.core.worker.runner.page_features
        assert features.shape[0] == engine.core.worker.traits.pages + 1
        assert not features[0].any()
        assert features[1:-1].any()
        assert features[-1].any()
