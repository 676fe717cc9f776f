"""The picture of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import timeline_plot
from bench.timeline_plot import draw_timeline, read_trace
from overlap_spec.errors import ConfigError
from overlap_spec.timeline import Timeline
from tests.engine.test_timeline import example

RED = (0xD6 / 255, 0x27 / 255, 0x28 / 255)


def test_a_trace_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.record("lane", "fill", 5_000, 9_500, 3, nodes=16)
    timeline.record("host", "plan", 1_000, 2_000, 2)
    timeline.write_trace(tmp_path / "trace.json")
    spans = sorted(read_trace(tmp_path / "trace.json"), key=lambda s: s.start_ns)
    assert spans == [
        ("host", "plan", 0, 1_000, 2, {}),
        ("lane", "fill", 4_000, 8_500, 3, {"nodes": 16}),
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"traceEvents": [{"ph": "X", "name": "a"}]})]
)
def test_other_files_are_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="no trace"):
        read_trace(tmp_path / "a.json")


def test_drawing(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    spans = example().spans()
    draw_timeline(spans, tmp_path / "steps.png")
    pixels = image.imread(tmp_path / "steps.png")[..., :3]
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 900
    assert (abs(pixels - RED) < 0.01).all(-1).sum() > 500
    draw_timeline(spans, tmp_path / "calm.png", (2, 3))
    pixels = image.imread(tmp_path / "calm.png")[..., :3]
    assert not (abs(pixels - RED) < 0.01).all(-1).any()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    example().write_trace(tmp_path / "trace.json")
    timeline_plot.main([str(tmp_path / "trace.json"), "--steps", "1", "2"])
    assert "<svg" in (tmp_path / "trace.svg").read_text()
    assert capsys.readouterr().out.strip() == str(tmp_path / "trace.svg")
    with pytest.raises(SystemExit):
        timeline_plot.main([str(tmp_path / "trace.json"), "--steps", "99", "99"])
    assert "no spans in steps 99 to 99" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        timeline_plot.main([str(tmp_path / "trace.json"), "--out", str(tmp_path / "steps.pdf")])
    assert ".png or .svg" in capsys.readouterr().err
