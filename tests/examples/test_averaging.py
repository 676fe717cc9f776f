"""Means of targets' weights."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import overlap_spec
from examples.embedded_model.averaging import main, mean_of

TARGET = Path(overlap_spec.__file__).parent / "embedded" / "target"


def test_a_mean_is_by_share_and_in_the_type_of_the_weights():
    a, b = ({"w": torch.full((2,), x, dtype=torch.bfloat16)} for x in (1.0, 3.0))
    mean = mean_of([(a, 0.25), (b, 0.75)])["w"]
    assert mean.tolist() == [2.5, 2.5]
    assert mean.dtype is torch.bfloat16


def test_what_has_no_mean_is_refused():
    a, b = {"w": torch.ones(2)}, {"w": torch.ones(3)}
    with pytest.raises(ValueError, match="sum to 1"):
        mean_of([(a, 0.5), (a, 0.6)])
    with pytest.raises(ValueError, match="names or shapes"):
        mean_of([(a, 0.5), (b, 0.5)])


def test_a_target_is_written_whole(tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(TARGET, other)
    weights = load_file(TARGET / "model.safetensors")
    save_file({n: -x for n, x in weights.items()}, other / "model.safetensors")
    main([f"{TARGET}=0.75", f"{other}=0.25", "--out", str(tmp_path / "mean")])
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert all(torch.equal(found[n], x / 2) for n, x in weights.items())
    names = {path.name for path in TARGET.iterdir()}
    assert {path.name for path in (tmp_path / "mean").iterdir()} == names
    for wrong in (f"{TARGET}", f"{TARGET}=x", f"{TARGET}=0.5"):
        with pytest.raises(SystemExit):
            main([wrong, "--out", str(tmp_path / "none")])
    assert "do not sum to 1" in capsys.readouterr().err
