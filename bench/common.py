"""What all benchmarks share: flags, the result record, figures of samples, progress.

A benchmark takes ``--quick``, ``--json PATH`` and ``--seed``, shows its progress and tables, and
ends with one JSON line on standard output, the record. ``--json`` writes the record to PATH, and
every raw sample as a line of JSON beside it as it comes (``out.json`` → ``out.samples.jsonl``).
A record's own fields are made of its samples alone, by the benchmark's ``summary``
where it has one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from overlap_spec.errors import ConfigError, OverlapSpecError
from overlap_spec.load.figures import mean as mean
from overlap_spec.load.figures import median as median
from overlap_spec.load.figures import paired as paired
from overlap_spec.load.figures import percentile as percentile
from overlap_spec.load.figures import rounded as rounded
from overlap_spec.load.figures import spread as spread

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "xgrammar", "numpy", "tokenizers", "overlap-spec")
T = TypeVar("T")


def command(main: Callable[[Sequence[str] | None], T]) -> Callable[..., T]:
    """A benchmark's ``main(arguments)``; what the project refuses ends it with exit status 2.

    Arguments None mean the process's own.
    """

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> T:
        try:
            return main(arguments)
        except OverlapSpecError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    return run


def flags(name: str, about: str) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark; a benchmark adds its own."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    parser.add_argument("--quick", action="store_true", help="a small run, for a look")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the record there")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default 0)")
    return parser


def positive(text: str) -> int:
    """The type of a flag that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return number


def sizes(text: str) -> list[int]:
    """The type of a flag that lists sizes."""
    try:
        return [positive(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between: {text}") from None


def read_jsonl(path: Path, make: Callable[[Any], T], flag: str = "--data") -> list[T]:
    """``make`` of each line of a ``.jsonl`` file.

    Raises:
        ConfigError: the file, which ``flag`` named, cannot be read as such rows.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [make(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{flag} {path.name}: a row cannot be read: {error!r}") from None


class Run:
    """One run of a benchmark: its samples, and its record at the end.

    Args:
        name: The benchmark's, as in ``python -m bench.NAME``.
        options: What :func:`flags` parsed.
        arguments: The command line's arguments; None means the process's own.
    """

    def __init__(
        self, name: str, options: argparse.Namespace, arguments: Sequence[str] | None = None
    ) -> None:
        given = sys.argv[1:] if arguments is None else list(arguments)
        self.name, self.options = name, options
        self.samples: list[dict[str, Any]] = []
        self.console = Console(stderr=True)
        self.head: dict[str, Any] = {
            "bench": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", f"bench.{name}", *map(_portable, given)]),
            "quick": bool(options.quick),
            "seed": int(options.seed),
            "machine": machine(),
            "versions": versions(PACKAGES),
            "commit": commit(),
        }
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            samples_path(options.json).write_text("", encoding="utf-8")

    def sample(self, **fields: Any) -> dict[str, Any]:
        """Keep one raw sample, a measurement that nothing was averaged over."""
        self.samples.append(fields)
        if self.options.json is not None:
            with samples_path(self.options.json).open("a", encoding="utf-8") as file:
                file.write(strict_json(fields) + "\n")
        return fields

    def progress(self) -> Progress:
        """A progress display on standard error."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )

    def finish(self, repetitions: int, **results: Any) -> dict[str, Any]:
        """Write and print the record, and show its tables.

        Args:
            repetitions: How often each figure was measured.
            results: The benchmark's own fields, which come first; rounded to five digits.

        Raises:
            ValueError: a figure that is not finite.
        """
        head = {**self.head, "repetitions": repetitions, "samples": len(self.samples)}
        record = {**rounded(results), **head}
        line = strict_json(record)
        if self.options.json is not None:
            self.options.json.write_text(line + "\n", encoding="utf-8")
        sys.stdout.flush()
        print(line, flush=True)
        report.tell(record)
        return record


def _portable(argument: str) -> str:
    """A record that is kept tells no folders of the machine that made it."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def fail(message: str) -> NoReturn:
    """End a benchmark that found its own result wrong: exit status 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def samples_path(path: Path) -> Path:
    """Where the raw samples of the record ``path`` are."""
    return path.with_suffix(".samples.jsonl")


def strict_json(value: Any) -> str:
    """One line of JSON; ValueError where a number is not finite."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def machine() -> dict[str, Any]:
    """What the run stands on: CPU, usable cores, memory, load before the run, device."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(_physical_bytes() / 2**30, 1),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
    }


def cpu_model() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of Python and of packages that a figure may depend on; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit(root: Path = ROOT) -> str | None:
    """The commit of the work tree ``root``, ``-dirty`` where it was changed; None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
