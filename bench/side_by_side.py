"""Two work trees in turn: what the younger tree gains or loses.

``python -m bench.side_by_side --before TREE [--after TREE] [--turns N] [--fields PATTERN,…] [--json
PATH] [--script FILE] [-- ARGUMENTS]`` runs a script with ARGUMENTS in a process of each tree, with
the tree as its working directory and first on its path: ``bench/step_cost.py`` of this tree, which
also measures a tree that lacks it. The two take turns: of each thing that the script measures, N
rounds in each tree, so that neighbours in time are milliseconds apart; every other time in the
other order. The script must take ``--turns N``, wait for a line before each round and print a JSON
line after it (an empty object for a round that does not count).

Numbers are named by their path (``batch_4.tpot_ms``), and those that fit a pattern are compared.

Fields of the JSON line that it ends in: ``ratios`` (path → median, min, max, n of after / before),
``before`` and ``after`` (path → median), ``unequal`` (paths whose text, or accept length, is not
the same in both trees), ``commits``, and what every record has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bench.common import ROOT, Run, commit, flags, median, paired, positive

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


def take_turns(
    trees: dict[str, Path], script: Path, words: Sequence[str], count: int
) -> dict[str, list[Pair]]:
    """Let the script measure in both trees in turn.

    Returns:
        What was measured → its (before, after) figures.

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
    argv = [str(script), *words, "--turns", str(count)]
    code = RUN_SCRIPT.format(root=str(root), argv=argv, script=str(script))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        # Its child processes must import this tree too.
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
    """The plain values inside a record, each with its path: keys with dots between."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, record


def compare(pairs: Sequence[Pair], patterns: Sequence[str]) -> dict[str, Any]:
    """Ratios and medians of (before, after) figures, and what is not the same.

    Raises:
        SystemExit: no path fits, or a figure before is 0.
    """

    def values(path: str, side: int) -> list[Any]:
        return [dict(leaves(pair[side]))[path] for pair in pairs]

    found = [path for path, value in leaves(pairs[0][0]) if isinstance(value, int | float)]
    paths = [path for path in found if any(fnmatch(path, pattern) for pattern in patterns)]
    if not paths:
        sys.exit(f"error: no number of both records fits {', '.join(patterns)}")
    zero = [path for path in paths if 0 in values(path, 0)]
    if zero:
        sys.exit(f"error: no ratio of {zero[0]}: it is 0 before")
    fixed = [path for path, _ in leaves(pairs[0][0]) if any(fnmatch(path, p) for p in SAME)]
    return {
        "ratios": {path: paired(values(path, 1), values(path, 0)) for path in paths},
        "before": {path: median(values(path, 0)) for path in paths},
        "after": {path: median(values(path, 1)) for path in paths},
        "unequal": sorted(path for path in fixed if values(path, 0) != values(path, 1)),
    }


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before ``--``, and the words after it."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    parser = flags("side_by_side", "Two work trees in turn.")
    parser.add_argument("--before", type=Path, required=True, help="the older work tree")
    parser.add_argument("--after", type=Path, default=ROOT, help="the younger one (this one)")
    script = ROOT / "bench" / "step_cost.py"
    parser.add_argument("--script", type=Path, default=script, help="run instead of step_cost.py")
    parser.add_argument("--turns", type=positive, default=25, help="rounds of each (default 25)")
    parser.add_argument("--fields", default=FIELDS, help=f"patterns, with commas ({FIELDS})")
    options, words = parser.parse_args(given[:at]), given[at + 1 :]
    for tree in (options.before, options.after):
        if not (tree / "overlap_spec").is_dir():
            parser.error(f"{tree} is no work tree of this project")
    if not options.script.is_file():
        parser.error(f"there is no file {options.script}")
    return options, words


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options, words = parse(sys.argv[1:] if arguments is None else arguments)
    run = Run("side_by_side", options, arguments)
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    measured = take_turns(trees, options.script.resolve(), words, options.turns)
    result: dict[str, Any] = {"ratios": {}, "before": {}, "after": {}, "unequal": []}
    for pairs in measured.values():
        for name, found in compare(pairs, options.fields.split(",")).items():
            result[name] = result[name] + found if name == "unequal" else result[name] | found
    commits = {side: commit(tree) for side, tree in trees.items()}
    run.finish(options.turns, **result, commits=commits)


if __name__ == "__main__":
    main()
