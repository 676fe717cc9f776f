"""Runs engines from a copy of the package that lacks one file, in a process that has not imported
it: ``python without.py COPY``, with cases as JSON on the standard input and results, one a line, on
the standard output."""

import json
import os
import sys
from pathlib import Path
from typing import Any

# What takes long to import and is no part of the package: each case's fork has it already.
import torch


def generate(settings: dict[str, Any], sampling: dict[str, Any]) -> list[list[int]]:
    """Output tokens, with a grammar and without."""
    import overlap_spec
    from overlap_spec.engine import Engine
    from overlap_spec.grammar.spec import Grammar

    assert overlap_spec.__file__.startswith(sys.argv[1])
    asked: Any = {"temperature": 0, "max_tokens": 12, **sampling}
    # What a grammar asks for.
    weighed = Grammar.choice(["a", "b"], faithful=True) if asked.pop("choices", False) else None
    with Engine(**settings, context_length=96, graphs=False) as engine:
        outputs = engine.generate(["abc"] * 2, [Grammar.regex("[a-f]{4} [0-9]{3}"), weighed], asked)
    assert not any(output.error for output in outputs), outputs
    return [list(output.token_ids) for output in outputs]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What is generated, and the error of what asks for the file."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"tokens": generate(case["settings"], {})}
    if case["asks"] is not None:
        settings, sampling = case["asks"]
        try:
            generate(case["settings"] | settings, sampling)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    """Each case in a process of its own, forked before anything of the package is imported."""
    for case in json.load(sys.stdin):
        gone = Path(sys.argv[1], "overlap_spec", case["file"])
        kept = gone.rename(gone.with_suffix(".gone")) if case["file"] else None
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            print(json.dumps(run(case)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"failed": status}), flush=True)
        if kept is not None:
            kept.rename(gone)


main()
