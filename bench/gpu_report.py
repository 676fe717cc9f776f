"""The record of ``bench.gpu``: written after all that a part tells, and taken up again by a later
call."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from bench.common import Run, rounded, samples_path, started_path, strict_json
from bench.gpu_child import PartFailed, describe
from bench.gpu_setup import Result

MOST_TOLD = 10
# What the report itself says of a part, beside what the part tells.
OWN = ("status", "seconds", "error", "calls")
Keep = Callable[[Result], None]


class Report:
    """The record.

    Args:
        run: Its head and samples; ``run.options.json`` is where it is written.
        fields: Its own fields, but for what was found by an earlier call.
    """

    def __init__(self, run: Run, **fields: Any) -> None:
        self.run = run
        self.record: dict[str, Any] = {
            "figures": {}, "parts": {}, "equal": None, "complete": False, "calls": 1, **fields
        }  # fmt: skip

    def take_up(self, before: dict[str, Any]) -> None:
        """Go on with the record of an earlier call."""
        for name in ("figures", "parts", "equal"):
            self.record[name] = before[name]
        self.record["calls"] = before["calls"] + 1

    def status(self, name: str) -> str | None:
        """``ok``, ``failed``, ``running`` (its call was ended), ``skipped: …``; None: not begun."""
        status: str | None = self.record["parts"].get(name, {}).get("status")
        return status

    def before(self, name: str) -> dict[str, Any]:
        """What a part has told so far."""
        row = self.record["parts"].get(name, {})
        return {key: value for key, value in row.items() if key not in OWN}

    def skip(self, name: str, why: str) -> None:
        """Enter a part that was not begun; what it told before stays."""
        row = self.record["parts"].get(name, {})
        if row.get("status") not in ("running", "failed"):
            self._enter(name, {**row, "status": f"skipped: {why}"})

    def attempt(self, name: str, work: Callable[[Keep], Result]) -> bool:
        """Run a part and enter it; whether it went well.

        Args:
            work: Takes what keeps a result so far: at once, in case that the call is ended.
        """
        print(f"{name} …", file=sys.stderr)
        start, told = time.monotonic(), 0
        row = self.record["parts"].get(name, {})
        row = {**row, "status": "running", "calls": row.get("calls", 0) + 1}
        row.pop("error", None)
        base_s = row.get("seconds", 0.0)
        self._enter(name, row)

        def keep(result: Result) -> None:
            nonlocal told
            strict_json([result.figures, result.details, result.samples])
            mark = {"rehearsal": True} if self.record["rehearsal"] else {}
            self.record["figures"] |= {key: value | mark for key, value in result.figures.items()}
            for sample in result.samples[told:]:
                self.run.sample(part=name, call=row["calls"], **sample)
            told = len(result.samples)
            row.update(result.details)
            row["seconds"] = base_s + time.monotonic() - start
            self._enter(name, row)

        try:
            result = work(keep)
            keep(result)
        except PartFailed as error:
            result = error.so_far or Result()
            result.faults = [str(error), *result.faults]
        except Exception as error:
            result = Result(faults=[describe(error)])
        wrong = [*result.faults, *(result.differences or ())]
        if result.differences is not None:
            self.record["equal"] = self.record["equal"] is not False and not result.differences
        row["status"] = "failed" if wrong else "ok"
        row["seconds"] = base_s + time.monotonic() - start
        if wrong:
            row["error"] = "; ".join(wrong[:MOST_TOLD])
        self._enter(name, row)
        return not wrong

    def _enter(self, name: str, row: dict[str, Any]) -> None:
        self.record["parts"][name] = row
        print(f"{name}: {row['status']} {row.get('error', '')}", file=sys.stderr)
        self.write()

    def write(self) -> None:
        """Write the record; whole or not at all, whenever the call is ended."""
        path: Path | None = self.run.options.json
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(".fresh")
            fresh.write_text(strict_json(rounded(self.record | self.run.head)) + "\n", "utf-8")
            fresh.replace(path)


def faults(record: dict[str, Any]) -> Iterator[str]:
    """Parts that failed, in words."""
    for name, row in record["parts"].items():
        if row["status"] == "failed":
            yield f"{name}: {row['error']}"


class State:
    """The folder in which calls leave what later ones go on with: the record, its samples, and the
    checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record, self.checkpoint = folder / "record.json", folder / "checkpoint"

    def open(self, options: argparse.Namespace, settled: list[str]) -> Run:
        """A run whose record and samples are here: a new one, or the one before, gone on with.

        Args:
            settled: The arguments in which calls of one run may not differ.

        Raises:
            SystemExit: there is none to go on with, or it is another one: exit status 2.
        """
        own = Namespace(**{**vars(options), "json": self.record, "resume": options.go_on})
        if options.go_on:
            try:
                before = json.loads(started_path(self.record).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                self._refuse(f"{self.folder} holds no run")
            if before != settled:
                self._refuse(f"{self.folder} holds another run: {shlex.join(before)}")
        else:
            self.record.unlink(missing_ok=True)
        return Run("gpu", own, settled)

    def _refuse(self, why: str) -> NoReturn:
        print(f"error: --continue: {why}", file=sys.stderr)
        sys.exit(2)

    def read(self) -> dict[str, Any]:
        """The record of the call before; one that was ended before its first part has none."""
        try:
            found: dict[str, Any] = json.loads(self.record.read_text(encoding="utf-8"))
        except OSError:
            found = {"figures": {}, "parts": {}, "equal": None, "calls": 0}
        return found

    def publish(self, path: Path) -> None:
        """Copy record and samples to where they are kept."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.record, path)
        shutil.copyfile(samples_path(self.record), samples_path(path))
