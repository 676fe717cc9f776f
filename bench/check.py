"""Holds a run against what is expected of it: ``bench/expected.json``.

``python -m bench.check --ci`` runs benchmarks at sizes of its own, whose counts matter, in about a
minute; ``--records FOLDER`` compares records that are there already, as of ``bench.all``.
``--update`` writes the counts that were found into ``expected.json`` instead.

An expectation names a benchmark and the path of a figure in its record. With ``equals`` it is a
count or a verdict: another figure is a change of what is computed, or of what a step costs whatever
the machine (``bench.counts``). With ``between`` it is a ratio of what ran in turns, whose band is
wide, as machines are noisy. The exit status is 1 where one does not hold, where a benchmark failed,
or where a figure is not in its record; one that has no record is skipped. ``ci`` expectations hold
for the sizes of ``--ci`` alone, ``quick`` ones for ``--quick``; those without ``sizes`` for all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import report
from bench.common import ROOT, fail
from overlap_spec.errors import ConfigError

EXPECTED = ROOT / "bench" / "expected.json"
# Small enough for every change; what they count does not depend on the machine's speed.
CI: dict[str, list[str]] = {
    "counts": [],
    "gsm8k": ["--num-questions", "6", "--num-shots", "2", "--parallel", "3",
              "--max-new-tokens", "32"],
    "json_schema": ["--rows", "6", "--max-tokens", "64", "--parallel", "3"],
    "peers": ["--repetitions", "1", "--cases", "4", "--max-tokens", "64"],
    "maskbench": [],
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One expectation held against its record: ``error`` is empty where it holds; ``skipped`` where
    it could not be held."""

    what: str
    error: str = ""
    skipped: bool = False


def look_up(record: Any, path: Sequence[str]) -> Any:
    """The figure at a path of keys; LookupError where there is none."""
    for key in path:
        if not isinstance(record, dict) or key not in record:
            raise LookupError(f"no {key!r}")
        record = record[key]
    return record


def compare(expected: dict[str, Any], records: dict[str, Any], sizes: str) -> Finding:
    """Hold one expectation against the records.

    Args:
        expected: ``bench``, ``path``, ``equals`` or ``between``, and perhaps ``sizes``.
        records: Benchmark → record.
        sizes: ``ci``, ``quick`` or ``full``: of the records.
    """
    what = f"{expected['bench']}: {' › '.join(expected['path'])}"
    record = records.get(expected["bench"])
    if record is None or expected.get("sizes", sizes) != sizes:
        return Finding(what, skipped=True)
    try:
        found = look_up(record, expected["path"])
    except LookupError as error:
        return Finding(what, error=f"not in the record: {error}")
    if "equals" in expected:
        wanted = expected["equals"]
        return Finding(what, error="" if found == wanted else f"is {found!r}, not {wanted!r}")
    low, high = expected["between"]
    inside = isinstance(found, int | float) and low <= found <= high
    return Finding(what, error="" if inside else f"is {found!r}, not from {low} to {high}")


def run_ci(folder: Path) -> list[str]:
    """Run the subset in this process; names of the benchmarks that failed."""
    failed = []
    for name, words in CI.items():
        arguments = ["--quick", "--json", str(folder / f"{name}.json"), *words]
        try:
            import_module(f"bench.{name}").main(arguments)
        except SystemExit as error:
            if error.code:
                failed.append(name)
        except Exception:
            # One that crashes must not hide what the others find.
            traceback.print_exc()
            failed.append(name)
    return failed


def update(expectations: list[dict[str, Any]], records: dict[str, Any], sizes: str) -> None:
    """Enter the figures that were found where ``equals`` is expected."""
    for expected in expectations:
        record = records.get(expected["bench"])
        if record is None or "equals" not in expected or expected.get("sizes", sizes) != sizes:
            continue
        expected["equals"] = look_up(record, expected["path"])
    lines = ",\n".join("  " + json.dumps(expected) for expected in expectations)
    EXPECTED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def tell(findings: Sequence[Finding]) -> None:
    """Print every finding that is not as expected, and how many were."""
    for finding in findings:
        if finding.error:
            print(f"error: {finding.what} {finding.error}", file=sys.stderr)
    held = sum(not (f.error or f.skipped) for f in findings)
    skipped = sum(f.skipped for f in findings)
    print(f"{held} expectations hold, {skipped} were not measured", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.check", description="Are figures kept?")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ci", action="store_true", help="run what takes about a minute")
    what.add_argument("--records", type=Path, metavar="FOLDER", help="compare these instead")
    parser.add_argument("--update", action="store_true", help="write what was found")
    options = parser.parse_args(arguments)
    expectations = json.loads(EXPECTED.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="overlap-spec-check-") as temporary:
        folder: Path = options.records or Path(temporary)
        failed = run_ci(folder) if options.ci else []
        try:
            records = {record["bench"]: record for record in report.read_records(folder)}
        except ConfigError as error:
            fail(f"{error}; failed: {', '.join(failed)}")
    quick = all(record["quick"] for record in records.values())
    sizes = "ci" if options.ci else "quick" if quick else "full"
    if options.update:
        update(expectations, records, sizes)
        return
    findings = [compare(expected, records, sizes) for expected in expectations]
    tell(findings)
    if failed:
        fail(f"failed: {', '.join(failed)}")
    if any(finding.error for finding in findings):
        fail("results are not what is expected; see above")


if __name__ == "__main__":
    main()
