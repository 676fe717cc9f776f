"""Growth: fits of known powers, what is named, and a small run with its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import scaling
from bench.common import rounded, samples_path

SMALL = scaling.Size(
    3,
    1,
    {
        "batch": (1, 3),
        "context": (200, 400),
        "output": (20, 60),
    },
)


def points(power: float, **more: Any) -> list[dict[str, float]]:
    return [{"x": x, "step_ms": 3.0 * x**power, **more} for x in (1, 2, 4, 8)]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_a_power_is_found(power: float) -> None:
    found = scaling.fit(points(power), "step_ms")
    assert found is not None
    assert found["exponent"] == pytest.approx(power, abs=1e-9)
    assert found["tail"] == pytest.approx(power, abs=1e-9)


def test_a_line_has_its_slope_and_zeros_are_left_out() -> None:
    line = [{"x": x, "host_ms": 1 + 0.02 * x, "idle_ms": 0.0} for x in (1, 16, 64)]
    found = scaling.fit(line, "host_ms")
    assert found is not None
    assert found["slope"] == pytest.approx(0.02)
    assert scaling.fit(line, "idle_ms") is None


def test_what_grows_faster_than_its_work_is_named() -> None:
    def sweeps(power: float) -> dict[str, Any]:
        made = points(power)
        return {"batch": {"points": made, "fits": {"step_ms": scaling.fit(made, "step_ms")}}}

    assert list(scaling.faster(sweeps(1.0))) == []
    (told,) = scaling.faster(sweeps(1.5))
    assert told.startswith("batch: step_ms as x^1.50")
    # A bend at the end, which a fit over all points would hide.
    bent = [{"x": x, "step_ms": y} for x, y in ((1, 8.0), (2, 8.0), (4, 8.0), (8, 32.0))]
    fits = {"step_ms": scaling.fit(bent, "step_ms")}
    assert len(list(scaling.faster({"batch": {"points": bent, "fits": fits}}))) == 1
    small = [{"x": p["x"], "step_ms": p["step_ms"] / 1e5} for p in points(2.0)]
    fits = {"step_ms": scaling.fit(small, "step_ms")}
    assert list(scaling.faster({"batch": {"points": small, "fits": fits}})) == []


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "QUICK", SMALL)
        path = tmp_path_factory.mktemp("scaling") / "scaling.json"
        scaling.main(["--quick", "--json", str(path)])
    return json.loads(path.read_text()), path


@pytest.mark.ci
def test_every_sweep_has_its_points_and_fits(record: tuple[dict[str, Any], Path]) -> None:
    found, path = record
    assert {n: [p["x"] for p in s["points"]] for n, s in found["sweeps"].items()} == {
        name: list(sizes) for name, sizes in SMALL.sizes.items()
    }
    for name, sweep in found["sweeps"].items():
        for point in sweep["points"]:
            assert point["step_ms"] > point["host_ms"] > 0, name
            assert point["lane_ms"] > 0, name
            assert point["rss_mib"] > 50, name
        assert sweep["fits"]["host_ms"]["tail"] is not None
    assert found["host_us_per_row"] is not None
    assert found["lane_growth"] > 0
    lines = samples_path(path).read_text().splitlines()
    again = rounded(scaling.summary([json.loads(line) for line in lines]))
    assert {key: found[key] for key in again} == again
