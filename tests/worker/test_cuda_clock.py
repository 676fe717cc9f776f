"""The device's times on the host's clock, whatever hours pass: on a device that is made up."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from overlap_spec.worker.cuda import CudaClock, CudaStream

STEPS, STEP_NS = 20_000, 180_000_000
LAUNCH_NS, WORK_NS, SEEN_NS = 8_000, 3_000_000, 40_000


class Device:
    """Two clocks, of which the device's gains ``drift`` on the host's."""

    def __init__(self, drift: float) -> None:
        self.now_ns, self.drift = 10**9, drift

    def event(self, enable_timing: bool) -> DeviceEvent:
        assert enable_timing
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device, self.host_ns = device, 0

    def record(self, *_: Any) -> None:
        # Between what is queued and what runs lies the launch.
        self.device.now_ns += LAUNCH_NS
        self.host_ns = self.device.now_ns

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: DeviceEvent) -> float:
        apart_ns = (later.host_ns - self.host_ns) * (1 + self.device.drift)
        return float(np.float32(apart_ns / 1e6))


@pytest.mark.parametrize("drift", [5e-5, -5e-5, 0.0])
def test_the_devices_clock_stays_with_the_hosts(
    drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(drift)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: device.now_ns)
    for name, value in {
        "Event": device.event,
        "Stream": lambda *_: None,
        "stream": nullcontext,
        "current_stream": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nullcontext)
    spans: list[tuple[int, int]] = []

    def record(_: str, __: str, start_ns: int, end_ns: int, ___: int) -> None:
        spans.append((start_ns, end_ns))

    cpu = torch.device("cpu")
    stream = CudaStream("copy", cpu, CudaClock(cpu), record, 0)

    def work() -> None:
        device.now_ns += WORK_NS

    worst_ns = 0
    for _ in range(STEPS):
        device.now_ns += STEP_NS
        queued_ns = device.now_ns
        stream.run("results", work)
        end_ns = device.now_ns
        device.now_ns += SEEN_NS
        stream.note()
        (start, end), *_ = spans
        spans.clear()
        worst_ns = max(worst_ns, abs(start - queued_ns - LAUNCH_NS), abs(end - end_ns))
    # An hour at 50 parts in a million would be 180 ms.
    assert worst_ns <= SEEN_NS + LAUNCH_NS
