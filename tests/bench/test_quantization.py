"""What int8 costs, on random checkpoints: the figures are made of the samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import quantization
from overlap_spec.models.quantization import has_int8
from tests.support.checkpoints import write_target


@pytest.mark.ci
@pytest.mark.skipif(not has_int8(), reason="no AVX512-VNNI")
def test_the_record_is_made_of_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_target(tmp_path / "target", max_position_embeddings=1024)
    sizes = ["--model", str(tmp_path / "target"), "--texts", "2"]
    path = tmp_path / "out.json"
    quantization.main([*sizes, "--types", "bfloat16", "--quick", "--json", str(path)])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    samples = [json.loads(line) for line in (tmp_path / "out.samples.jsonl").open()]
    assert len(samples) == 2 * len(record["perplexity"])
    mine = [s for s in samples if s["type"] == "int8"]
    assert record["tokens"] == sum(s["tokens"] for s in mine)
    loss = sum(s["loss"] for s in mine) / (record["tokens"] - 2)
    assert record["perplexity"]["int8"] == pytest.approx(math.exp(loss), rel=1e-4)
    shares = record["equal_greedy"]["bfloat16"]
    assert shares["bfloat16"] == 1.0
    equal = sum(s["equal"]["bfloat16"] for s in mine) / record["tokens"]
    assert shares["int8"] == pytest.approx(equal, rel=1e-4)
    assert 0.5 < equal < 1.0


def test_rows_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_target(tmp_path / "target")
    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(SystemExit):
        quantization.main(
            ["--model", str(tmp_path / "target"), "--data", str(tmp_path / "rows.jsonl")]
        )
    assert "no rows of question and answer" in capsys.readouterr().err
