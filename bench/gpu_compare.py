"""The parts of ``bench.gpu`` that compare: overlap modes, EAGLE-3 with none, transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from bench import overlap, peers
from bench.backends import transformers as hf
from bench.backends.base import Batch, System, Task, rate
from bench.backends.engine import EngineSystem
from bench.common import Run, paired
from bench.gpu_decode import itemsize, weight_bytes
from bench.gpu_setup import Context, Result, figure
from bench.workloads import Ask, choose_samples, read_samples
from overlap_spec.engine import Engine
from overlap_spec.grammar.spec import Grammar

# In bfloat16, logits of 16 to 32 are 1/8 apart, and sums in another order move them by a few of
# these steps: an output may leave another where the two best tokens are no further apart than this.
CLOSE_LOGPROBS = 0.5
# The summary of ``bench.peers`` holds the others against the chain.
DRAFTS = {"chain": peers.OURS, "tree": f"{peers.OURS} tree"}
PLAIN, OTHER = f"{peers.OURS} plain", "transformers + xgrammar"
STATIC = f"{OTHER}, static cache"
MODES = overlap.Size(
    8, 64, 32, {1: 64, 4: 64, 16: 64, 32: 64}, {"batch 4": 5, "JSON union": 5, "else": 3}
)
MODES_REHEARSAL = overlap.Size(1, 6, 4, {1: 4, 4: 4}, {"else": 1})
Said = tuple[int, ...]


def divergences(
    engine: Engine, asks: Sequence[Ask], said: Sequence[Iterable[Said]], close: float
) -> Iterator[str]:
    """Requests whose outputs differ by more than rounding, in words.

    Each of them is asked again, alone and with log-probabilities: where an output leaves that
    answer, the two best tokens must be within ``close``.

    Args:
        said: For each request, the outputs that it was given, as token ids.
    """
    for ask, outputs in zip(asks, said, strict=True):
        different = set(outputs)
        if len(different) == 1:
            continue
        sampling = {"temperature": 0.0, "max_tokens": ask.max_tokens, "logprobs": 2}
        again = engine.generate(ask.prompt, ask.grammar, sampling)
        for ids in different - {again.token_ids}:
            pairs = zip(ids, again.token_ids, strict=False)
            end = min(len(ids), len(again.token_ids))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), end)
            top = [value for _, value in again.logprobs[at].top] if at < end else []
            apart = top[0] - top[1] if len(top) == 2 else float("inf")
            if apart > close:
                yield f"{ask.prompt!r:.80}: from token {at} on, {apart:.3g} apart"


def closeness(context: Context) -> float:
    """How far apart two tokens are that may stand for each other: in float32 not at all."""
    return 0.0 if context.setup.rehearse else CLOSE_LOGPROBS


def modes(context: Context) -> Result:
    """``bench.overlap``'s workloads in its three modes: what is exposed, and what is saved."""
    context.engines()
    size = (
        MODES_REHEARSAL
        if context.setup.rehearse
        else overlap.QUICK
        if context.setup.quick
        else MODES
    )
    run = context.run("overlap")
    with ExitStack() as stack:
        weights = {"model": str(context.setup.target), "draft": str(context.setup.draft)}
        engines = overlap.open_engines(stack, weights)
        first = engines["none"]
        samples = choose_samples(
            read_samples(context.setup.data),
            size.schemas,
            context.setup.seed,
            lambda grammar: overlap.accepts(first, grammar),
        )
        work = overlap.workloads(samples, size)
        results = overlap.measure_all(engines, work, size, run)
        differences: list[str] = []
        for name, by_mode in results.items():
            runs = [result.outputs for taken in by_mode.values() for result in taken]
            said = [[output.token_ids for output in outputs] for outputs in zip(*runs, strict=True)]
            apart = divergences(first, work[name], said, closeness(context))
            differences += [f"{name}: {text}" for text in apart]
    found = overlap.summary(run.samples)
    batches = {f"batch {size}": entry for size, entry in found["batches"].items()}
    once = {name: entry["modes"]["once-sync"] for name, entry in batches.items()}
    exposed = {name: f["exposed_ms"] / f["step_ms"] for name, f in once.items()}
    saved = {
        name: 1 - entry["ratio_tpot"]["once-sync"]["median"]
        for name, entry in (batches | {"JSON union": found["rows"]["JSON union"]}).items()
    }
    return Result(
        {
            "exposed_share": figure(max(exposed.values()), most=0.02, unit="of a step", by=exposed),
            # Where the grammar's work is a visible share of the step.
            "union_tpot_saving": figure(saved["JSON union"], least=0.20, unit="of TPOT", by=saved),
        },
        found,
        run.samples,
        differences=differences,
    )


class Keeping:
    """A system that keeps all that it said, by request.

    Args:
        system: What answers.
    """

    def __init__(self, system: System) -> None:
        self.system, self.how = system, system.how
        self.said: dict[int, set[Said]] = {}

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        """See :class:`bench.backends.base.System`."""
        batch = self.system.run(tasks, parallel)
        for number, reply in enumerate(batch.replies):
            self.said.setdefault(number, set()).add(reply.token_ids)
        return batch

    def close(self) -> None:
        """Whoever opened the system closes it."""


@dataclass
class Contest:
    """What systems did with the same requests.

    Attributes:
        run: Its samples are those of ``bench.peers``.
        said: For each request, all outputs of all systems.
    """

    run: Run
    asks: list[Ask]
    said: list[set[Said]]

    def ratio(self, name: str, base: str, batch: int) -> dict[str, float]:
        """Tokens per second of a system over another's, repetition by repetition."""
        rates: dict[str, list[float]] = {name: [], base: []}
        answers = [sample for sample in self.run.samples if sample["kind"] == "answers"]
        for sample in sorted(answers, key=lambda sample: int(sample["repetition"])):
            if sample["batch"] == batch and sample["system"] in rates:
                rates[sample["system"]].append(rate(sample))
        return paired(rates[name], rates[base])

    def speedup(self, base: str, least: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """The better draft's speed over ``base`` at batch 1, as a figure; and all ratios."""
        ratios = {
            f"{label}, batch {batch}": self.ratio(name, base, batch)
            for batch in peers.BATCHES
            for label, name in DRAFTS.items()
        }
        by = {label: entry["median"] for label, entry in ratios.items()}
        best = max(DRAFTS, key=lambda label: by[f"{label}, batch 1"])
        value = by[f"{best}, batch 1"]
        return figure(value, least=least, unit="×", judged=best, by=by), ratios


def compete(context: Context, systems: dict[str, Any], repetitions: int) -> Contest:
    """``bench.peers``' two workloads on every system in turn."""
    size = context.size
    run = context.run("peers", repetitions=repetitions, batches=peers.BATCHES,
                   singles=size.singles, cases=min(16, size.cases),
                   max_tokens=size.tokens)  # fmt: skip
    tasks = peers.make_tasks(run.options)
    asks = [Ask(t.prompt, Grammar.json_schema(t.schema or {}), t.max_tokens) for t in tasks]
    for system in systems.values():
        for task in tasks:
            system.compile_ms(task.schema)
    keeping = {name: Keeping(system) for name, system in systems.items()}
    peers.ask_all(dict(keeping), tasks, run)
    heard = [system.said for system in keeping.values()]
    return Contest(run, asks, [set().union(*(h[n] for h in heard)) for n in range(len(tasks))])


def drafting(chain: Engine, tree: Engine) -> dict[str, Any]:
    """The systems of ``DRAFTS``."""
    return {
        DRAFTS["chain"]: EngineSystem(chain, "EAGLE-3, chain of 5"),
        DRAFTS["tree"]: EngineSystem(tree, "EAGLE-3, tree of 16 nodes, top-k 4"),
    }


def eagle3(context: Context) -> Result:
    """EAGLE-3, as a chain and as a tree, against plain decoding of the same requests.

    ``bound`` is what the accept length would give if a pass took the time of reading its weights:
    accept length × target / (target + draft steps × head).
    """
    chain, tree, plain = context.engines("chain", "tree", "plain")
    systems = drafting(chain, tree) | {PLAIN: EngineSystem(plain, "no drafts")}
    contest = compete(context, systems, context.size.repetitions)
    differences = list(divergences(plain, contest.asks, contest.said, closeness(context)))
    found = peers.summary(contest.run.samples)
    speedup, ratios = contest.speedup(PLAIN, 2.36)
    weights, head = (
        weight_bytes(folder, itemsize(context))
        for folder in (context.setup.target, context.setup.draft)
    )
    accepted = found["workloads"]["batch 1"][DRAFTS[speedup["judged"]]]["accept_length"]
    bound = accepted * weights / (weights + chain.config.num_steps * head)
    return Result(
        {"eagle3_speedup": speedup | {"accept_length": accepted, "bound": bound}},
        {"ratios": ratios, "weight_bytes": weights, "head_bytes": head} | found,
        contest.run.samples,
        differences=differences,
    )


def transformers(context: Context) -> Result:
    """The engine against ``transformers``' ``generate`` with xgrammar's own logits processor: as
    its users call it, and with a static cache, whose steps it compiles on a GPU."""
    chain, tree = context.engines("chain", "tree")

    def encode(task: Task) -> list[int]:
        return list(chain.input_processor.prompt_ids(task.prompt, task.raw))

    kind, device = (torch.float32, "cpu") if context.setup.rehearse else (torch.bfloat16, "cuda")
    checkpoint = hf.Checkpoint(context.setup.target, encode, kind, device)
    systems = drafting(chain, tree) | {
        OTHER: hf.XGrammarSystem(checkpoint),
        STATIC: hf.StaticSystem(checkpoint),
    }
    contest = compete(context, systems, min(3, context.size.repetitions))
    speedup, ratios = contest.speedup(OTHER, 5.0)
    static, static_ratios = contest.speedup(STATIC, None)
    details = {"ratios": ratios, "static_ratios": static_ratios}
    return Result(
        {"transformers_speedup": speedup, "transformers_static_speedup": static},
        details | peers.summary(contest.run.samples),
        contest.run.samples,
    )
