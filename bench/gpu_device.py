"""The parts of ``bench.gpu`` that need no checkpoint: the GPU's tests, and the kernels."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.common import ROOT
from bench.gpu_child import describe
from bench.gpu_setup import Context, Result

MARK = "pytest.mark.gpu"
# Tests that say at once whether a step waits and whether what is recorded is what is computed.
FIRST = "waits or replay"
# Kept back for what pytest writes once it is interrupted.
REPORT_S = 20.0


def first_tests(context: Context) -> Result:
    """Whether a step waits for the device, and whether recordings give what the passes give."""
    folder = ROOT / "tests" / "worker"
    return _tests(context, [folder / "test_gpu.py", folder / "test_replay.py"], ["-k", FIRST])


def tests(context: Context) -> Result:
    """``pytest -m gpu`` over the files that hold such tests, file by file: others may need what is
    not here."""
    files = [f for f in sorted(ROOT.glob("tests/**/test_*.py")) if MARK in f.read_text("utf-8")]
    # Kernels, each of which is compiled in many forms, come last.
    return _tests(context, sorted(files, key=lambda file: "kernel" in file.name), [])


def _tests(context: Context, files: list[Path], words: list[str]) -> Result:
    done: dict[str, Any] = dict(context.before.get("files", {}))
    for file in files:
        name = str(file.relative_to(ROOT))
        if not done.get(name, {}).get("whole"):
            done[name] = _run(file, words, context.left_s)
            context.keep(Result(details={"files": done}))
    counts = {name: sum(row[name] for row in done.values()) for name in COUNTS}
    faults = [f"{name}: {fault}" for name, row in done.items() for fault in row["faults"]]
    if not counts["passed"]:
        faults.append("no test passed")
    return Result(details={**counts, "files": done}, faults=faults)


def _run(file: Path, words: list[str], left_s: float) -> dict[str, Any]:
    """A file's counts and failures, and whether it was run to its end."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short",
                   f"--junitxml={report}", *words, str(file)]  # fmt: skip
        process, limit_s = subprocess.Popen(command, cwd=ROOT, stdout=2), left_s - REPORT_S
        late = []
        try:
            process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            late = [f"not done within {limit_s:.0f} s"]
            # As Ctrl-C, upon which pytest still writes what it has.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(REPORT_S - 5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if report.exists():
            found = counted(report.read_text(encoding="utf-8"))
        else:
            found = dict.fromkeys(COUNTS, 0)
            found["faults"] = [f"pytest ended with exit status {process.returncode}"]
        return {**found, "faults": late + found["faults"], "whole": not late}


COUNTS = ("passed", "tests", "failures", "errors", "skipped")


def counted(report: str) -> dict[str, Any]:
    """Counts of a JUnit report, and in words what failed: ``faults``."""
    suite = ElementTree.fromstring(report).find(".//testsuite")
    assert suite is not None
    counts: dict[str, Any] = {name: int(suite.get(name, 0)) for name in COUNTS[1:]}
    wrong = [
        f"{case.get('classname')}.{case.get('name')}: {outcome.get('message', '')[:300]}"
        for case in suite.iter("testcase")
        for outcome in case
        if outcome.tag in ("failure", "error")
    ]
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    return {"passed": passed, **counts, "faults": wrong}


def attention_kernels(context: Context) -> Result:
    """The kernels of attention alone, at all their sizes."""
    return _kernels(context, True)


def kernels(context: Context) -> Result:
    """Every other kernel of ``bench.kernels``."""
    return _kernels(context, False)


def _kernels(context: Context, attention: bool) -> Result:
    """Each by itself, so that one which fails ends no other."""
    import torch

    from bench import kernels as bench
    from bench.kernel_work import Draw, works

    quick = context.setup.quick
    run = context.run("kernels")
    draw = Draw(torch.device("cuda"), torch.bfloat16, context.setup.seed)
    found: dict[str, Any] = {"kernels": {}} | context.before
    faults = []
    for work in works(draw, (1,) if quick else (1, 32)):
        if work.name in found["kernels"] or work.name.startswith("attention/") != attention:
            continue
        heard = io.StringIO()
        try:
            with contextlib.redirect_stderr(heard):
                record = bench.measure_all(run, [work], 5 if quick else 15)
        except (Exception, SystemExit) as error:
            said = [line for line in heard.getvalue().splitlines() if line.startswith("error: ")]
            faults.append(said[-1].removeprefix("error: ") if said else describe(error))
            faults[-1] = f"{work.name}: {faults[-1]}"
            continue
        rows = record.pop("kernels")
        print(f"{work.name}: {rows[work.name]['share']:.0%} of the roofline", file=sys.stderr)
        found["kernels"] |= rows
        found |= record
        context.keep(Result(details=found, samples=run.samples, faults=faults))
    return Result(details=found, samples=run.samples, faults=faults)
