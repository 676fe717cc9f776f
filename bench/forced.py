"""Drafts with and without what the grammar forces.

``python -m bench.forced [--quick] [--json PATH] [--seed S] [--data FILE] [--batch N]
[--groups N] [--model NAME | --model DIR --draft DIR]`` gives EAGLE-3 and n-gram an engine
each, as a chain and as a tree, and lets every group of requests through it with grafts ``on`` and
``off``, by turns first.

Workloads: ``unknown schema``, rows of ``--data`` (JSONSchemaBench's development split if it is at
hand) for a prompt that says nothing of them, with a third side, ``free``: as many tokens of the
same prompts without a grammar; ``extraction``, held-out cases of the format that the embedded model
was trained in; ``shuffled keys``, the same with the keys in an order that it never saw;
``indented``, the same with four blanks a level, which it never wrote; ``hostile``, extraction with
a tokenizer that cuts words into bytes; ``choices``, one of 50 labels of 1 to 6 tokens out of such
answers, which are drafted whole; its third side, ``faithful``, chooses by the probability of the
whole label and may say something else.
Outputs must be the same on both sides: else, in float32, the exit status is 1.

Fields of the last line, beside those of every record (``bench.common``):
    workloads: Name → drafter → side → ``accept_length``, ``verifies_an_answer``, ``tpot_of_off``
        and ``seconds_of_off`` (of whole groups, prompts included; both paired by group),
        ``tpot_of_free`` of ``on``, ``graft_accept_rate``, ``illegal_share`` (of drafted tokens),
        ``lane_us`` (grammar time of a request's step, median of the groups) and ``told_us`` (what
        runs and states take of it in a request's median step, median of the groups).
    equal: Outputs are the same on both sides.
    unequal: Groups in which they are not, in words; in bfloat16 the two best tokens may be as
        close as sums in another order are.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, cast

import torch

from bench.common import Run, command, fail, flags, median, paired, positive
from bench.measure import GREEDY, Measured, measure
from bench.overlap import accepts
from bench.targets import add_model_flags, model_settings
from bench.workloads import Ask, choose_samples, read_samples
from examples.embedded_model.cases import Case
from examples.embedded_model.data import held_out_cases
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.drafting.forced import ForcedRuns, Openings
from overlap_spec.grammar.spec import Grammar, Whitespace
from overlap_spec.steps import RUN_TOKENS

DRAFTERS: dict[str, dict[str, Any]] = {
    f"{algorithm} {shape}": {"algorithm": algorithm, **settings}
    for algorithm in ("eagle3", "ngram")
    for shape, settings in (
        ("chain", {"num_steps": 5}),
        ("tree", {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 16}),
    )
}
SIDES = ("off", "on")
WORKLOADS = ("unknown schema", "extraction", "shuffled keys", "indented", "hostile", "choices")
THIRD_SIDES = {"unknown schema": "free", "choices": "faithful"}
INDENT = 4
LABELS, LABEL_TOKENS = 50, 6
PROMPT = "Write an example as JSON."
SUMMED = (
    "verified_tokens", "verifies", "grafted_tokens", "accepted_grafts", "illegal_drafts",
    "drafted_tokens", "answers",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Groups of requests a workload, and the most tokens of an output."""

    groups: int
    tokens: int


FULL = Size(groups=24, tokens=128)
QUICK = Size(groups=4, tokens=64)


class HostileRuns(ForcedRuns):
    """Runs that begin as the tokenizer's do, and have words as bytes by themselves."""

    def canonical(self, text: bytes) -> list[int]:
        found: list[int] = []
        while text and len(found) < self._tokens:
            if text[:1].isalnum():
                found.append(self._text.index(text[:1]))
            elif first := super().canonical(text)[:1]:
                found += first
            else:
                break
            text = text[len(self._text[found[-1]]) :]
        return found


class Clocked:
    """Runs, and how long each call for them took.

    Attributes:
        took_us: Times of fills, and of what is learned.
    """

    def __init__(self, runs: ForcedRuns) -> None:
        self._runs, self.weighed, self.read = runs, runs.weighed, runs.read
        self.took_us: tuple[list[float], list[float]] = [], []

    def fill(self, *given: Any) -> Openings:
        """As :meth:`ForcedRuns.fill`."""
        start = time.perf_counter_ns()
        openings = self._runs.fill(*given)
        self.took_us[0].append((time.perf_counter_ns() - start) / 1e3)
        return openings

    def learn(self, *given: Any) -> None:
        """As :meth:`ForcedRuns.learn`."""
        start = time.perf_counter_ns()
        self._runs.learn(*given)
        self.took_us[1].append((time.perf_counter_ns() - start) / 1e3)

    @property
    def median_us(self) -> float:
        """What both take of a request's step."""
        return sum(median(times) for times in self.took_us if times)


def unknown_schemas(data: Path | None, engine: Engine, seed: int, count: int) -> list[Grammar]:
    """Grammars of real schemas that compile."""
    samples = choose_samples(read_samples(data), count, seed, partial(accepts, engine))
    return [Grammar.json_schema(sample.schema) for sample in samples]


def shuffled(case: Case, rng: Random) -> Case:
    """The case with the keys of its answer in another order."""
    properties = list(case.schema["properties"].items())
    before = list(properties)
    while len(properties) > 1 and properties == before:
        rng.shuffle(properties)
    return replace(case, schema={**case.schema, "properties": dict(properties)})


def labels_of(tokens: Callable[[str], Sequence[int]], cases: Sequence[Case]) -> list[str]:
    """Labels of 1 to :data:`LABEL_TOKENS` tokens: texts in the answers of cases."""
    texts = (value for case in cases for value in case.answer.values() if isinstance(value, str))
    short = (text for text in dict.fromkeys(texts) if len(tokens(text)) <= LABEL_TOKENS)
    return list(islice(short, LABELS))


def groups_of(
    workload: str,
    grammars: Sequence[Grammar],
    seed: int,
    size: Size,
    batch: int,
    labels: Sequence[str] = (),
) -> list[list[Ask]]:
    """The requests of a workload."""
    if workload == "unknown schema":
        asks = [Ask(PROMPT, grammar, size.tokens) for grammar in grammars]
    elif workload == "choices":
        choice = Grammar.choice(labels)
        cases = held_out_cases(seed, size.groups * batch)
        asks = [Ask(case.prompt, choice, size.tokens) for case in cases]
    else:
        rng, cases = Random(seed), held_out_cases(seed, size.groups * batch)
        if workload == "shuffled keys":
            cases = [shuffled(case, rng) for case in cases]
        layout: Whitespace = INDENT if workload == "indented" else "compact"
        asks = [
            Ask(c.prompt, Grammar.json_schema(c.schema, whitespace=layout), size.tokens)
            for c in cases
        ]
    return [asks[i : i + batch] for i in range(0, len(asks) - batch + 1, batch)]


def run_all(
    engines: dict[str, Engine], work: dict[str, list[list[Ask]]], run: Run
) -> Iterator[str]:
    """Run everything and keep the samples; what differs between sides, in words."""
    total = sum(len(groups) for groups in work.values()) * len(engines)
    tokenizer = next(iter(engines.values())).tokenizer
    weighs = {name: engine.core.worker.traits.reads_states for name, engine in engines.items()}
    with run.progress() as progress:
        task = progress.add_task("groups", total=total)
        for workload, groups in work.items():
            make = HostileRuns if workload == "hostile" else ForcedRuns
            runs_of = {
                weighed: make(tokenizer.vocabulary, tokenizer.encode, RUN_TOKENS, weighed)
                for weighed in (False, True)
            }
            for number, asks in enumerate(groups):
                sides: tuple[str, ...] = SIDES if number % 2 == 0 else SIDES[::-1]
                if workload in THIRD_SIDES:
                    sides = (*sides, THIRD_SIDES[workload])
                for name, engine in engines.items():
                    place = {"workload": workload, "drafter": name, "group": number}
                    said: dict[str, dict[str, Any]] = {}
                    for side in sides:
                        clocked = Clocked(runs_of[weighs[name]]) if side == "on" else None
                        engine.core.grammar.pool.forced = cast("ForcedRuns | None", clocked)
                        engine.core.budgets.widens = side == "on"
                        engine.core.worker.runner.reads_states = side == "on" and weighs[name]
                        result = measure(engine, *asked(asks, side, said))
                        raw = result.raw() | figures(result)
                        raw["told_us"] = clocked.median_us if clocked else 0.0
                        said[side] = run.sample(**place, side=side, **raw)
                    if said["on"]["output_sha256"] != said["off"]["output_sha256"]:
                        yield f"{workload}, {name}, group {number}: sides differ"
                    progress.advance(task)


def asked(
    asks: Sequence[Ask], side: str, said: dict[str, dict[str, Any]]
) -> tuple[list[Ask], dict[str, Any]]:
    """A side's requests, and how they are sampled.

    Args:
        said: Samples of the sides that were measured before.
    """
    if side == "free":
        lengths = said["on"]["lengths"]
        pairs = zip(asks, lengths, strict=True)
        return [Ask(ask.prompt, None, n) for ask, n in pairs], {**GREEDY, "ignore_eos": True}
    if side == "faithful":
        grammars = [replace(ask.grammar, faithful=True) for ask in asks if ask.grammar]
        pairs = zip(asks, grammars, strict=True)
        return [replace(ask, grammar=own) for ask, own in pairs], GREEDY
    return list(asks), GREEDY


def figures(result: Measured) -> dict[str, Any]:
    """What a workload's requests say of grafts, and the lane's time in a request's step."""
    stats = [output.stats for output in result.outputs]
    steps = sum(s.verifies + 1 for s in stats)
    return {
        "grafted_tokens": sum(s.grafted_tokens for s in stats),
        "accepted_grafts": sum(s.accepted_grafts for s in stats),
        "illegal_drafts": sum(s.illegal_drafts for s in stats),
        "lane_us": sum(s.grammar_ms for s in stats) / steps * 1e3,
        "answers": len(stats),
        "lengths": [s.output_tokens for s in stats],
    }


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record's own fields, made of the samples."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for sample in samples:
        rows.setdefault((sample["workload"], sample["drafter"], sample["side"]), []).append(sample)
    found: dict[str, Any] = {}
    for (workload, drafter, side), mine in rows.items():
        off = rows[workload, drafter, "off"]
        total: Counter[str] = Counter()
        for sample in mine:
            total.update({name: sample[name] for name in SUMMED})
        tpot, seconds = (
            [[sample[name] for sample in some] for some in (mine, off)]
            for name in ("tpot_ms", "seconds")
        )
        free = rows.get((workload, drafter, "free")) if side == "on" else None
        found.setdefault(workload, {}).setdefault(drafter, {})[side] = {
            "accept_length": total["verified_tokens"] / max(1, total["verifies"]),
            "verifies_an_answer": total["verifies"] / total["answers"],
            "tpot_of_off": paired(*tpot),
            "seconds_of_off": paired(*seconds),
            "tpot_of_free": free and paired(tpot[0], [sample["tpot_ms"] for sample in free]),
            "graft_accept_rate": total["accepted_grafts"] / max(1, total["grafted_tokens"]),
            "illegal_share": total["illegal_drafts"] / max(1, total["drafted_tokens"]),
            "lane_us": median(sample["lane_us"] for sample in mine),
            "told_us": median(sample["told_us"] for sample in mine),
        }
    return {"workloads": found}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("forced", "Drafts with and without what the grammar forces.")
    add_model_flags(parser)
    parser.add_argument("--data", type=Path, help="rows of schemas, .jsonl")
    parser.add_argument("--batch", type=positive, default=4, help="requests at once (default 4)")
    parser.add_argument("--groups", type=positive, help="groups of requests a workload")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="these workloads alone")
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    size = QUICK if options.quick else FULL
    if options.groups:
        size = replace(size, groups=options.groups)
    run = Run("forced", options, arguments)
    torch.set_num_threads(1)
    count = size.groups * options.batch
    settings: dict[str, Any] = {
        "mask_deadline_ms": None,
        "prefix_cache": False,
        "context_length": 1024,
        "adaptive": "static",
        "max_running_requests": options.batch,
        **model_settings(options, run.console),
    }
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(**settings, **drafter, tries=True))
            for name, drafter in DRAFTERS.items()
        }
        first = next(iter(engines.values()))
        for engine in engines.values():
            engine.compiler = first.compiler
            for grammar in (None, Grammar.choice(["warm", "warm up"])):
                measure(engine, [Ask("Warm up.", grammar, 8)] * options.batch)
        grammars = unknown_schemas(options.data, first, options.seed, count)
        if len(grammars) < options.batch:
            raise ConfigError(f"{len(grammars)} schemas are fewer than --batch")
        cases = held_out_cases(options.seed, count + LABELS)
        labels = labels_of(first.tokenizer.encode, cases)
        work = {
            name: groups_of(name, grammars, options.seed, size, options.batch, labels)
            for name in options.only or WORKLOADS
        }
        exact = first.core.worker.runner.pool.k.dtype is torch.float32
        wrong = list(run_all(engines, work, run))
    record = summary(run.samples)
    run.finish(size.groups, **record, batch=options.batch, equal=not wrong, unequal=wrong)
    if wrong and exact:
        fail("outputs are not the same on both sides:\n" + "\n".join(wrong[:10]))


if __name__ == "__main__":
    main()
