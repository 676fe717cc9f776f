"""`overlap-spec doctor` builds whatever drafter a folder is for."""

from pathlib import Path
from typing import Any

import pytest

from overlap_spec.doctor import examine
from tests.support import checkpoints
from tests.support.layouts import LAYOUTS, write
from tests.support.mtp import write_module


def drafter(model: str, draft: str | None = None, algorithm: str | None = None) -> tuple[str, bool]:
    (found,) = [row[1:] for row in examine(model, draft, algorithm) if row[0] == "drafter"]
    return found


def test_the_folder_of_each_drafter_is_known(tiny: dict[str, Any], tmp_path: Path) -> None:
    model = tiny["model"]
    for name in ("EAGLE-1/2, vLLM's name", "speculators", "EAGLE-3, pytorch_model.bin"):
        folder = tmp_path / LAYOUTS[name].config["architectures"][0]
        write(folder, LAYOUTS[name])
        text, fine = drafter(model, str(folder))
        assert fine
        assert text.startswith(f"{LAYOUTS[name].algorithm}, 0.0M parameters of its own")
    checkpoints.write_target(tmp_path / "small", hidden_size=16)
    assert drafter(model, str(tmp_path / "small"))[0].startswith("draft_model, ")
    write_module(tmp_path / "module")
    assert drafter(model, str(tmp_path / "module"))[0].startswith("mtp, ")


def test_what_is_the_targets_is_not_the_drafters(tiny: dict[str, Any]) -> None:
    assert drafter(tiny["model"], algorithm="ngram") == ("ngram, 0.0M parameters of its own", True)
    plain = "none: plain decoding; --draft or --algorithm names one"
    assert drafter(tiny["model"], algorithm="none") == (plain, True)
    assert drafter(tiny["model"]) == ("slots,suffix, 0.0M parameters of its own", True)
    own = drafter(tiny["model"], algorithm="tests.support.drafters:Echo")
    assert own == ("tests.support.drafters:Echo, 0.0M parameters of its own", True)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (None, "neither model.safetensors"),
        ("mtp", "neither model.safetensors"),
        ("tests.support.drafters:Absent", "no Drafter"),
    ],
)
def test_what_does_not_fit_is_told(
    tiny: dict[str, Any], tmp_path: Path, algorithm: str | None, said: str
) -> None:
    text, fine = drafter(tiny["model"], str(tmp_path), algorithm)
    assert not fine
    assert said in text


def test_a_targets_own_module_is_found(tiny: dict[str, Any]) -> None:
    text, fine = drafter(tiny["model"], algorithm="mtp")
    assert not fine
    assert "has no next-token module" in text
