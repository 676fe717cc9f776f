"""The parts of ``bench.gpu`` that need no checkpoint: the GPU tests, and the kernels."""

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


def tests(context: Context) -> Result:
    """``pytest -m gpu`` over the files that hold such tests: others may need what is not here."""
    files = [str(f) for f in sorted(ROOT.glob("tests/**/test_*.py")) if MARK in f.read_text()]
    # Kernels, each of which is compiled in many forms, come last.
    files.sort(key=lambda file: "kernel" in file)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short",
                   "--continue-on-collection-errors", f"--junitxml={report}", *files]  # fmt: skip
        process, late = subprocess.Popen(command, cwd=ROOT, stdout=2), []
        try:
            process.wait(context.setup.tests_s)
        except subprocess.TimeoutExpired:
            late = [f"not done within {context.setup.tests_s:.0f} s"]
            # As Ctrl-C, upon which pytest still writes what it has.
            process.send_signal(signal.SIGINT)
            process.wait(20)
        if not report.exists():
            return Result(faults=[*late, f"pytest ended with exit status {process.returncode}"])
        result = counted(report.read_text(encoding="utf-8"))
        result.faults += late
        return result


def counted(report: str) -> Result:
    """Counts and failures of a JUnit report."""
    suite = ElementTree.fromstring(report).find(".//testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = [
        f"{case.get('classname')}.{case.get('name')}: {outcome.get('message', '')[:300]}"
        for case in suite.iter("testcase")
        for outcome in case
        if outcome.tag in ("failure", "error")
    ]
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    faults = [f"{len(wrong)} tests failed"] if wrong else []
    if not passed:
        faults.append("no test passed")
    return Result(details={"passed": passed, **counts, "failed": wrong}, faults=faults)


def kernels(context: Context) -> Result:
    """Every kernel of ``bench.kernels`` by itself, so that one which fails ends no other."""
    import torch

    from bench import kernels as bench
    from bench.kernel_work import Draw, works

    quick = context.setup.quick
    run = context.run("kernels")
    draw = Draw(torch.device("cuda"), torch.bfloat16, context.setup.seed)
    found: dict[str, Any] = {"kernels": {}}
    faults = []
    for work in works(draw, (1,) if quick else (1, 32)):
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
