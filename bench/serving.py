"""Load on a server: closed loop (so many clients) and open loop (Poisson arrivals), streaming.

``python -m bench.serving [--base-url URL] [--mode closed|open|both] [--clients N] [--rate R]
[--requests N] [--workload json|free|mixed] [--quick] [--json PATH] [--seed S]`` asks any server
with OpenAI's ``/v1/chat/completions``; without ``--base-url`` it starts its own, of the embedded
model, with the flags after ``--``. Times are the client's. Answers under a schema are
parsed and validated; it fails (exit status 1) where one is wrong, or a request got no answer.

It is ``overlap-spec bench`` with a record. Fields of the last line, beside those of every record
(``bench.common``): ``workload``, ``server`` (``own`` or ``other``), and for each mode:
``requests``, ``failed`` (no whole answer), ``invalid``, ``valid_share`` (of those that ended by
themselves under a schema), ``cut`` (ended by length), ``seconds``, ``requests_per_second``,
``output_tokens_per_second``, ``accept_length`` (null where the server does not say), and
``ttft_ms``, ``tpot_ms``, ``itl_ms``, ``e2e_ms``, each with ``mean``, ``p50``, ``p90``, ``p99``. An
inter-token time is that between two chunks that carry text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.common import Run, fail, flags, rounded
from bench.served import Served
from bench.workloads import OWN_SCHEMAS
from overlap_spec.cli.bench import table_of
from overlap_spec.errors import ConfigError
from overlap_spec.load.measure import (
    MODES,
    WORKLOADS,
    Load,
    Round,
    Target,
    draw_asks,
    measure,
    results,
)


def ask(run: Run, options: argparse.Namespace, target: Target, load: Load) -> list[Round]:
    """All loops, one after the other."""
    data, count = options.data, options.requests
    asks = draw_asks(options.workload, data, count, options.max_tokens, options.seed)
    with run.progress() as progress:
        task = progress.add_task("first requests", total=len(asks) * len(load.modes))

        def advance(_: str, mode: str) -> None:
            progress.update(task, advance=1, description=mode)

        rounds = asyncio.run(measure([target], asks, load, advance))
    for each in rounds:
        for answer in each.answers:
            run.sample(mode=each.mode, **answer.sample())
    return rounds


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = flags("serving", "Load on a server: closed and open loop.")
    parser.add_argument("--base-url", help="a running server, without /v1; our own if absent")
    parser.add_argument("--api-key", help="its key, if it asks for one")
    parser.add_argument("--model", help="its model's name; the first that it lists if absent")
    parser.add_argument("--mode", choices=MODES, default="both")
    parser.add_argument("--clients", type=int, default=8, help="of the closed loop")
    parser.add_argument("--rate", type=float, help="requests a second of the open loop")
    parser.add_argument("--requests", type=int, help="of each loop; 200, or 24 with --quick")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--workload", choices=WORKLOADS, default="json")
    parser.add_argument("--data", type=Path, default=OWN_SCHEMAS, help="schemas, as JSON lines")
    parser.add_argument("flags", nargs="*", help="after --: flags of our own server")
    options = parser.parse_args(arguments)
    options.requests = options.requests or (24 if options.quick else 200)
    options.rate = options.rate or (4.0 if options.quick else 8.0)
    if options.base_url and options.flags:
        parser.error("flags after -- are for our own server, not for one at --base-url")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ends in one JSON line."""
    options = parse(arguments)
    run = Run("serving", options, arguments)
    try:
        load = Load(
            options.mode, options.clients, options.rate, options.temperature, seed=options.seed
        )
        with contextlib.ExitStack() as stack:
            url = options.base_url or stack.enter_context(Served(options.flags)).url
            url = url.rstrip("/").removesuffix("/v1")
            target = Target("server", url, options.api_key, options.model)
            rounds = ask(run, options, target, load)
    except (ConfigError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    found = results([target], rounds)
    run.console.print(table_of(found))
    run.finish(
        1,
        **rounded(found["server"]),
        workload=options.workload,
        clients=options.clients,
        rate=options.rate,
        server="other" if options.base_url else "own",
    )
    wrong = [s["error"] for s in run.samples if s["error"]]
    if wrong:
        fail(f"{len(wrong)} requests failed, the first with {wrong[0]}")


if __name__ == "__main__":
    main()
