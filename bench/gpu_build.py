"""The checkpoint of ``bench.gpu``: written by a process of its own, once for all calls."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import ROOT
from bench.gpu_child import PartFailed
from bench.gpu_setup import Result, Setup
from bench.targets import VOCABULARY

REHEARSAL_VOCABULARY = 4096
LEFT_OVER = "unfinished-"


def words(setup: Setup) -> list[str]:
    """What ``bench.padded`` is asked for."""
    sizes = ["--vocab", str(REHEARSAL_VOCABULARY)]
    if not setup.rehearse:
        sizes = ["--like", setup.like, "--vocab", str(VOCABULARY)]
    return [*sizes, "--dtype", "bfloat16", "--seed", str(setup.seed)]


class Build:
    """The checkpoint, being written unless it is there.

    It is renamed when it is whole, so that a call which was ended leaves no half of one.
    """

    def __init__(self, setup: Setup) -> None:
        self.folder, self._told_s = setup.folder, time.monotonic()
        self._asked = words(setup)
        self._process: subprocess.Popen[bytes] | None = None
        if self._made() is not None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for left in self.folder.parent.glob(f"{LEFT_OVER}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._fresh = Path(tempfile.mkdtemp(prefix=LEFT_OVER, dir=self.folder.parent))
        command = [sys.executable, "-m", "bench.padded", str(self._fresh), *self._asked]
        with (self._fresh / "build.log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def _made(self) -> dict[str, Any] | None:
        """Figures of the checkpoint, if it is there and the one that is asked for."""
        try:
            made: dict[str, Any] = json.loads((self.folder / "made.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return made["figures"] if made["asked"] == self._asked else None

    def tell(self) -> None:
        """Say now and then how far it is."""
        process = self._process
        if process is None or process.poll() is not None or time.monotonic() - self._told_s < 10:
            return
        self._told_s = time.monotonic()
        size = sum(file.stat().st_size for file in self._fresh.rglob("*") if file.is_file())
        print(f"checkpoint: {size / 1e9:.1f} GB written", file=sys.stderr)

    def wait(self, most_s: float) -> Result:
        """The finished checkpoint's figures.

        Raises:
            PartFailed: it could not be written, or not in this time.
        """
        made, end = self._made(), time.monotonic() + most_s
        if made is not None:
            return Result(details=made)
        assert self._process is not None
        while self._process.poll() is None:
            if time.monotonic() >= end:
                raise PartFailed(f"not written within {most_s:.0f} s")
            time.sleep(0.2)
            self.tell()
        said = (self._fresh / "build.log").read_text(encoding="utf-8")
        if self._process.returncode:
            raise PartFailed(f"bench.padded failed: {said[-1000:]}")
        written = json.loads(said.splitlines()[-1])
        figures = {"write_s": written.pop("seconds"), **written}
        made = {"asked": self._asked, "figures": figures}
        (self._fresh / "made.json").write_text(json.dumps(made), encoding="utf-8")
        self._fresh.rename(self.folder)
        return Result(details=figures)

    def close(self) -> None:
        """End it; what was written in part goes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self._fresh, ignore_errors=True)
