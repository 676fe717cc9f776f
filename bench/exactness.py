"""What of the JSON Schema Test Suite the grammar holds, through the masks that the engine uses.

``python -m bench.exactness --data json_schema_test_suite [--backend NAME] [--quick] [--json PATH]``
compiles each schema of the suite's folders (the required files, those under ``optional`` and those
under ``optional/format``, apart), and feeds its instances token by token as compact JSON. In the
required files, where the suite asks that ``format`` be an annotation, it is one
(``formats="annotation"``); in the others it is held.

A grammar fixes the order of members and one way to write a number. So a valid instance is right
where one of the texts that are equal to it is let through, an invalid one where none of them is.
Classes are :mod:`bench.maskbench`'s; no schema is ``order_only``. A schema that allows nothing is
refused, which is right where all of its instances are invalid.

Fields of the last line, beside those of every record (``bench.common``): ``counts``, for each draft
and part the number of schemas in each class; ``failures``, each schema that is not clean with its
class and reason.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import Run, fail, flags
from bench.maskbench import CLASSES, Result, compact, feed
from bench.masks import VOCABULARY, Order, Tokens, padded_tokens
from overlap_spec.errors import GrammarError
from overlap_spec.grammar import Grammar, GrammarCompiler
from overlap_spec.grammar.backends import load

DRAFTS = ("4", "6", "7", "2019-09", "2020-12")
PARTS = {"required": "*.json", "optional": "optional/*.json", "format": "optional/format/*.json"}
DIALECTS = {
    "4": "http://json-schema.org/draft-04/schema#",
    "6": "http://json-schema.org/draft-06/schema#",
    "7": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
SHOWN = tuple(name for name in CLASSES if name not in ("untested", "order_only"))
MOST_TEXTS = 240
NO_VALUE = "no value is valid"
QUICK = 60


def entries(folder: Path, draft: str, part: str) -> Iterator[dict[str, Any]]:
    """The schemas of a part of the suite, each with its instances and a name."""
    for path in sorted((folder / f"draft{draft}").glob(PARTS[part])):
        for case in json.loads(path.read_text(encoding="utf-8")):
            schema = case["schema"]
            if isinstance(schema, dict) and "$schema" not in schema:
                # The suite means the draft of its folder.
                schema = {"$schema": DIALECTS[draft], **schema}
            name = f"{draft}/{part}/{path.stem}: {case['description']}"
            formats = "annotation" if part == "required" else "assertion"
            tests = case["tests"]
            yield {"id": name, "schema": schema, "formats": formats, "draft": draft, "tests": tests}


def texts(value: Any, order: Order, whole: bool = True) -> list[str]:
    """Compact texts equal to a value: in schema order, as given, and in other orders of members;
    whole numbers with and, where ``whole``, without a fraction."""
    found = [order.apply(value), *itertools.islice(_equal(value, whole), MOST_TEXTS)]
    return list(dict.fromkeys(map(compact, found)))


def _equal(value: Any, whole: bool) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for held in itertools.product(*(list(_equal(value[name], whole)) for name in names)):
                yield dict(zip(names, held, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(_equal(item, whole)) for item in value)))
    else:
        yield value
        if whole and isinstance(value, float) and value.is_integer():
            yield int(value)


def judge(compiler: GrammarCompiler, entry: dict[str, Any], tokens_: Tokens) -> Result:
    """Compile a schema and feed its instances."""
    try:
        grammar = Grammar.json_schema(
            entry["schema"], formats=entry["formats"], additional_properties="schema"
        )
        compiled = compiler.compile(grammar)
    except GrammarError as error:
        if NO_VALUE in str(error) and not any(case["valid"] for case in entry["tests"]):
            return Result("clean")
        kind = getattr(error, "kind", "refused")
        return Result(kind if kind in CLASSES else "crash", str(error))
    order, found = Order(entry["schema"]), Result("clean")
    for case in entry["tests"]:
        # In draft 4 the integer 1 is another value than 1.0, which is none.
        written = texts(case["data"], order, case["valid"] or entry["draft"] != "4")
        taken = next((t for t in written if feed(compiled, tokens_.encode(t), []) is None), None)
        if case["valid"] and taken is None and found.name == "clean":
            found = Result("over_constrained", f"{case['description']}: {written[0]}")
        if not case["valid"] and taken is not None:
            return Result("under_constrained", f"{case['description']}: {taken}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run all and print one record."""
    parser = flags("exactness", "what of the JSON Schema Test Suite is held")
    parser.add_argument("--data", type=Path, required=True, help="the suite's folder")
    parser.add_argument("--backend", default="auto", help="grammar backend (default auto)")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        fail(f"--data {options.data} is no folder")
    run = Run("exactness", options, arguments)
    chosen = padded_tokens(VOCABULARY, options.seed)
    counts: dict[str, dict[str, int]] = {}
    backend = load(options.backend)(chosen.vocabulary)
    with GrammarCompiler(backend, cache_bytes=0, isolated=False) as compiler:
        for draft, part in itertools.product(DRAFTS, PARTS):
            suite = list(entries(options.data, draft, part))
            if options.quick:
                suite = suite[:: max(1, len(suite) // QUICK)]
            results = Counter[str]()
            for entry in suite:
                result = judge(compiler, entry, chosen)
                run.sample(id=entry["id"], result=result.name, reason=result.reason[:500])
                results[result.name] += 1
            counts[f"{draft} {part}"] = dict.fromkeys(SHOWN, 0) | results
    failures = [sample for sample in run.samples if sample["result"] != "clean"]
    run.finish(1, counts=counts, failures=failures, backend=options.backend)


if __name__ == "__main__":
    main()
