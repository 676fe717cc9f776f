"""One command in two work trees, in turn: what the younger tree gains or loses.

``python -m bench.side_by_side --before TREE [--after TREE] [--pairs N | --turns N] [--fields
PATTERN,…] [--json PATH] -- bench.overlap --quick`` runs ``python -m bench.overlap --quick`` in each
tree, N times, every other time in the other order. With ``--script FILE``, what follows ``--`` are
the arguments of that Python file, which is run with the tree as its working directory and first on
its path: ``--script bench/step_cost.py -- --arrivals`` also measures a tree that lacks the file.

With ``--turns N``, each tree has one process, and the two take turns: of each thing that the script
measures, N rounds in each tree, so that neighbours in time are milliseconds apart. This is the way
on a machine that is not idle. The script must take ``--turns N``, wait for a line before each round
and print a JSON line after it (an empty object for a round that does not count), as
``bench/step_cost.py`` does.

A run must end in one JSON line. Its numbers are named by their path (``batch_4.tpot_ms``), and
those that fit a pattern are compared. The table shows, for each, the medians of both trees and the
median, least and most of after / before over the pairs.

Fields of the JSON line that it ends in: ``ratios`` (path → median, min, max, n of after / before),
``before`` and ``after`` (path → median), ``unequal`` (paths whose text, or accept length, is not
the same in both trees), ``pairs``, ``command``, ``commits``, ``machine`` and ``versions``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import ROOT, commit, machine, median, paired, rounded, strict_json, versions

Pair = tuple[dict[str, Any], dict[str, Any]]
SIDES = ("before", "after")
FIELDS = "*tpot_ms,*cpu_ms"
# What must not change with the tree.
SAME = ("*sha256", "*accept_length")
RUN_SCRIPT = (
    "import runpy, sys; "
    "sys.path.insert(0, {root!r}); sys.argv = {argv!r}; "
    "runpy.run_path({script!r}, run_name='__main__')"
)


def command(root: Path, script: Path | None, words: Sequence[str]) -> list[str]:
    """The command that is run in the tree ``root``: ``words`` for the script, or for a module."""
    if script is None:
        return [sys.executable, "-m", *words]
    argv = [str(script), *words]
    code = RUN_SCRIPT.format(root=str(root), argv=argv, script=str(script))
    return [sys.executable, "-c", code]


def run_in(root: Path, script: Path | None, words: Sequence[str]) -> dict[str, Any]:
    """Run the command in the tree ``root`` and read the JSON line that it ends in.

    Raises:
        SystemExit: it failed, or ended in no JSON object.
    """
    # Its child processes must import this tree too.
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        command(root, script, words), cwd=root, env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines() or [""]
    try:
        record = json.loads(lines[-1])
    except ValueError:
        record = None
    if done.returncode != 0 or not isinstance(record, dict):
        print(done.stdout[-2000:] + done.stderr[-2000:], file=sys.stderr)
        sys.exit(
            f"error: in {root.name}: exit status {done.returncode}, or no JSON line at the end"
        )
    return record


def run_pairs(
    trees: dict[str, Path], script: Path | None, words: Sequence[str], count: int
) -> list[Pair]:
    """(before, after) records of whole runs, every other pair in the other order."""
    pairs = []
    for number in range(count):
        records = {}
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            print(f"pair {number + 1} of {count}: {side}", file=sys.stderr, flush=True)
            records[side] = run_in(trees[side], script, words)
        pairs.append((records["before"], records["after"]))
    return pairs


def take_turns(
    trees: dict[str, Path], script: Path, words: Sequence[str], count: int
) -> dict[str, list[Pair]]:
    """Let the script measure in both trees in turn.

    Returns:
        What was measured → its (before, after) records.

    Raises:
        SystemExit: a script failed, or the two do not measure the same.
    """
    found: dict[str, list[Pair]] = {}
    with ExitStack() as stack:
        processes = {side: stack.enter_context(_start(root, script, words, count))
                     for side, root in trees.items()}  # fmt: skip
        for number in itertools.count():
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            lines = {side: _turn(processes[side]) for side in order}
            if not any(lines.values()):
                break
            if not all(lines.values()):
                sys.exit("error: the script ended in one tree alone")
            before, after = (json.loads(lines[side]) for side in SIDES)
            if before.keys() != after.keys():
                sys.exit(f"error: the trees measure {list(before)} and {list(after)}")
            for name in before:
                found.setdefault(name, []).append(({name: before[name]}, {name: after[name]}))
                print(f"{name}: pair {len(found[name])}", file=sys.stderr, flush=True)
        failed = [side for side, process in processes.items() if process.wait()]
    if failed:
        sys.exit(f"error: the script failed in: {', '.join(failed)}")
    return found


def _start(root: Path, script: Path, words: Sequence[str], count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(root, script, [*words, "--turns", str(count)]),
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _turn(process: subprocess.Popen[str]) -> str:
    """The line of one round; empty where the script has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        # Unbuffered: what a script that has ended leaves unread must not fail at the close.
        os.write(process.stdin.fileno(), b"\n")
    return process.stdout.readline()


def leaves(record: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values inside a record, each with its path: keys and indices, dots between."""
    if isinstance(record, dict | list):
        inner = record.items() if isinstance(record, dict) else enumerate(record)
        for key, value in inner:
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, record


def numbers(record: dict[str, Any], patterns: Sequence[str]) -> dict[str, float]:
    """Path → number, of the paths that fit a pattern."""
    return {
        path: float(value)
        for path, value in leaves(record)
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and any(fnmatch(path, pattern) for pattern in patterns)
    }


def unequal(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Paths of text hashes and accept lengths that are in both records and differ."""
    first, second = dict(leaves(before)), dict(leaves(after))
    return {
        path
        for path in first.keys() & second.keys()
        if first[path] != second[path] and any(fnmatch(path, pattern) for pattern in SAME)
    }


def compare(pairs: Sequence[Pair], patterns: Sequence[str]) -> dict[str, Any]:
    """Ratios and medians of (before, after) records, and what is not the same.

    Raises:
        SystemExit: no path fits, or a figure before is 0.
    """
    befores = [numbers(before, patterns) for before, _ in pairs]
    afters = [numbers(after, patterns) for _, after in pairs]
    paths = [path for path in befores[0] if all(path in one for one in (*befores, *afters))]
    if not paths:
        sys.exit(f"error: no number of both records fits {', '.join(patterns)}")
    zero = [path for path in paths if any(one[path] == 0 for one in befores)]
    if zero:
        sys.exit(f"error: no ratio of {zero[0]}: it is 0 before")
    return {
        "ratios": {p: paired([a[p] for a in afters], [b[p] for b in befores]) for p in paths},
        "before": {p: median(one[p] for one in befores) for p in paths},
        "after": {p: median(one[p] for one in afters) for p in paths},
        "unequal": sorted(set().union(*(unequal(*pair) for pair in pairs))),
    }


def merge(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of :func:`compare` on different paths as one."""
    merged: dict[str, Any] = {"ratios": {}, "before": {}, "after": {}, "unequal": []}
    for result in results:
        for name in ("ratios", "before", "after"):
            merged[name] |= result[name]
        merged["unequal"] += result["unequal"]
    return merged


def print_table(result: dict[str, Any]) -> None:
    """The figures, and a word on what is not the same."""
    table = Table("field", "before", "after", "after / before", "least to most")
    for path, ratio in result["ratios"].items():
        table.add_row(
            path,
            f"{result['before'][path]:.4g}",
            f"{result['after'][path]:.4g}",
            f"{ratio['median']:.3f}",
            f"{ratio['min']:.3f} to {ratio['max']:.3f}",
        )
    console = Console(width=110)
    console.print(table)
    for path in result["unequal"]:
        console.print(f"not the same in both trees: {path}", style="red")


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before ``--``, and the words after it."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="python -m bench.side_by_side", description="One command in two work trees, in turn."
    )
    parser.add_argument("--before", type=Path, required=True, help="the older work tree")
    parser.add_argument("--after", type=Path, default=ROOT, help="the younger one (this one)")
    parser.add_argument("--script", type=Path, help="a Python file to run instead of a module")
    parser.add_argument("--turns", type=int, help="rounds that the script takes in turn")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each tree (default 5)")
    parser.add_argument("--fields", default=FIELDS, help=f"patterns, with commas ({FIELDS})")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the record there")
    options, words = parser.parse_args(given[:at]), given[at + 1 :]
    if options.pairs < 1 or (options.turns is not None and options.turns < 1):
        parser.error("--pairs and --turns must be at least 1")
    if options.turns is not None and options.script is None:
        parser.error("--turns needs --script")
    if options.script is None and not words:
        parser.error("nothing to run: give a module after --, or --script FILE")
    for tree in (options.before, options.after):
        if not (tree / "overlap_spec").is_dir():
            parser.error(f"{tree} is no work tree of this project")
    if options.script is not None and not options.script.is_file():
        parser.error(f"there is no file {options.script}")
    return options, words


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options, words = parse(sys.argv[1:] if arguments is None else arguments)
    script = options.script.resolve() if options.script else None
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    patterns = options.fields.split(",")
    if script is not None and options.turns is not None:
        measured = take_turns(trees, script, words, options.turns)
        result = merge([compare(pairs, patterns) for pairs in measured.values()])
    else:
        result = compare(run_pairs(trees, script, words, options.pairs), patterns)
    result = rounded(result)
    print_table(result)
    what = [script.name] if script else []
    record = {
        "bench": "side_by_side",
        **result,
        "pairs": options.turns or options.pairs,
        "command": shlex.join([*what, *words]),
        "commits": {side: commit(tree) for side, tree in trees.items()},
        # What every record has, so that the report can show this one too.
        "commit": commit(trees["after"]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": False,
        "seed": 0,
        "repetitions": options.turns or options.pairs,
        "machine": machine(),
        "versions": versions(),
    }
    line = strict_json(record)
    if options.json is not None:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)


if __name__ == "__main__":
    main()
