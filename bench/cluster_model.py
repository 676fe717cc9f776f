"""A cluster as a discrete-event simulation: fronts, the real router, and engines that are formulas.

An engine decodes a batch in steps, as this project's does. A step takes ``base_ms + request_ms ·
batch + knee_ms · max(0, batch - knee) + prefill_ms · tokens`` and brings each request that decodes
``accept_length`` tokens. Prompts are computed in chunks beside the decodes. A replica keeps the
prefixes that it used last, as far as its KV cache holds them beside the requests that run; of the
one used longest ago the end goes first. Where engines share the cores of one machine, what is busy
at a time goes the slower the more cores it would take. A front
takes one thing at a time: a request, which it routes, or a piece of an answer. Each front routes by
its own :class:`overlap_spec.cluster.prefixes.PrefixMap`, the open requests that it sent itself, and
what replicas told it of theirs, as `overlap_spec.cluster.router` does. A replica that has as many
as it takes refuses; the next one of the ranking gets the request.

Not in it: the network, Ray's own processes, failures, scaling, and grammars (which verify hides).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.common import mean, percentile
from overlap_spec.cluster.prefixes import PrefixMap, slack_of

# Blocks that a simulated prefix has: the router's work does not depend on what is in them.
BLOCKS = 4
# How long a router believes what a replica told of its load when it was sent a request, as Ray
# Serve's does, in milliseconds.
TOLD_MS = 10_000.0


@dataclass(frozen=True)
class Machine:
    """What an engine's steps cost, in milliseconds, and what it holds.

    Attributes:
        base_ms: A step by itself.
        request_ms: One more request that decodes.
        knee, knee_ms: Requests from which on each costs this much more; 0: there is no knee.
        prefill_ms: A token of a prompt.
        accept_length: Tokens that a step brings a request.
        running: Most requests at once.
        kv_tokens: Of the cache.
        chunk_tokens: Most of prompts in a step.
        cores: That an engine takes while it is busy, with the application beside it.
    """

    base_ms: float
    request_ms: float
    prefill_ms: float
    accept_length: float
    running: int
    kv_tokens: int
    chunk_tokens: int = 1024
    knee: int = 0
    knee_ms: float = 0.0
    cores: float = 0.0

    def step_ms(self, batch: int, prefill_tokens: int) -> float:
        """A step."""
        beyond = max(0, batch - self.knee) if self.knee else 0
        return (
            self.base_ms
            + self.request_ms * batch
            + self.knee_ms * beyond
            + self.prefill_ms * prefill_tokens
        )


@dataclass(frozen=True)
class FrontCost:
    """What a front's processor does: for a request, and for a piece of an answer.

    Attributes:
        route_us: Added to a request for each replica that it is routed among, in microseconds.
    """

    request_ms: float
    piece_ms: float
    route_us: float

    def of_request(self, replicas: int) -> float:
        """Milliseconds to take and route a request."""
        return self.request_ms + 1e-3 * self.route_us * replicas


@dataclass(frozen=True)
class Demand:
    """Requests: a shared prefix, an own rest, an output. Lengths are exponential about their mean
    but for the prefixes', which are all alike.

    Attributes:
        skew: Popularity of prefix ``k`` goes as ``1 / k**skew``; 0: all alike.
        rate: Requests a second, at random times; 0: closed loop of ``clients``.
    """

    requests: int
    prefixes: int
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    skew: float = 0.0
    rate: float = 0.0
    clients: int = 0


@dataclass
class Job:
    """One request under way; times in milliseconds."""

    prefix: int
    own_tokens: int
    output_tokens: int
    arrived: float
    front: int = 0
    prefill_left: int = 0
    made: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    hit: float = 0.0


@dataclass
class Replica:
    """An engine: who runs, who waits, and which prefixes its cache holds."""

    machine: Machine
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)
    busy: bool = False

    @property
    def opened(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def begin(self) -> float:
        """Begin a step; how long it takes."""
        while self.waiting and len(self.running) < self.machine.running:
            self.running.append(self.waiting.popleft())
        left, decoding = self.machine.chunk_tokens, 0
        for job in self.running:
            if job.prefill_left:
                job.made = -float(min(left, job.prefill_left))
                left += int(job.made)
            else:
                decoding += 1
        return self.machine.step_ms(decoding, self.machine.chunk_tokens - left)

    def end(self) -> list[Job]:
        """End a step; who got a piece of an answer."""
        pieces = []
        for job in self.running:
            if job.prefill_left:
                job.prefill_left += int(job.made)
                job.made = 0.0
                if not job.prefill_left:
                    job.made = 1.0
                    pieces.append(job)
            else:
                job.made += self.machine.accept_length
                pieces.append(job)
        self.running = [job for job in self.running if job.made < job.output_tokens]
        return pieces

    def admit(self, job: Job, prefix_tokens: int) -> None:
        """Queue a request; what is neither cached of its prefix nor being computed is computed."""
        found = self.cached.pop(job.prefix, 0)
        job.hit = found / prefix_tokens
        job.prefill_left = max(1, job.own_tokens + prefix_tokens - found)
        self.cached[job.prefix] = prefix_tokens
        held = sum(each.own_tokens + each.output_tokens for each in self.running)
        room = max(prefix_tokens, self.machine.kv_tokens - held)
        over = sum(self.cached.values()) - room
        while over > 0 and len(self.cached) > 1:
            oldest, tokens = self.cached.popitem(last=False)
            if tokens > over:
                self.cached[oldest] = tokens - over
                self.cached.move_to_end(oldest, last=False)
            over -= tokens
        self.waiting.append(job)


def blocks_of(prefix: int) -> tuple[int, ...]:
    """What the router knows a prefix by."""
    return tuple(range(prefix * BLOCKS, (prefix + 1) * BLOCKS))


class Router:
    """One front's choice of replicas."""

    def __init__(
        self,
        routing: str,
        replicas: int,
        machine: Machine,
        prefix_tokens: int,
        turn: int,
        warm: bool = False,
    ) -> None:
        self.routing = routing
        self._warm, self._seen = warm, set[int]()
        # A replica's blocks are bounded as its cache is.
        capacity = max(BLOCKS, machine.kv_tokens * BLOCKS // prefix_tokens)
        self.prefixes = PrefixMap(capacity, slack_of(machine.running), seed=turn)
        self.loads = {str(index): 0 for index in range(replicas)}
        self._told = dict[str, tuple[int, float]]()
        self._turns = itertools.count(turn)

    def order(self, prefix: int, now: float) -> list[int]:
        """Replicas for a request, best first."""
        if self.routing == "round-robin":
            first, count = next(self._turns), len(self.loads)
            return [(first + step) % count for step in range(count)]
        blocks = blocks_of(prefix) if self.routing == "prefix" else ()
        if self._warm and prefix not in self._seen:
            # When it is first asked for: no front is asked for all prefixes of a large cluster.
            self._seen.add(prefix)
            self.prefixes.insert(str(prefix % len(self.loads)), blocks)
        loads = dict(self.loads)
        for name, (told, since) in self._told.items():
            if told > loads[name] and now - since < TOLD_MS:
                loads[name] = told
        return [int(choice.replica) for choice in self.prefixes.rank(blocks, loads)]

    def sent(self, prefix: int, replica: int, opened: int, now: float) -> None:
        """A request was sent to a replica, which told how many it has open."""
        self.loads[str(replica)] += 1
        self._told[str(replica)] = (opened, now)
        if self.routing == "prefix":
            self.prefixes.insert(str(replica), blocks_of(prefix))

    def ended(self, replica: int) -> None:
        """One of its requests has ended."""
        name = str(replica)
        self.loads[name] -= 1
        told, since = self._told[name]
        self._told[name] = (max(0, told - 1), since)


class Simulation:
    """One run.

    Args:
        machines: One engine each.
        routing: ``prefix``, ``load`` or ``round-robin``.
        fronts: Processes that route, each of which gets a request as likely as any other.
        warm: Begin with the prefixes that a run of any length would have found: by prefix, each on
            one replica, in turn, and the fronts know; otherwise the most popular ones on all.
        cores: Of the one machine that all share, beside what fronts and clients take of them.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        demand: Demand,
        routing: str,
        fronts: int,
        cost: FrontCost,
        seed: int,
        warm: bool = False,
        cores: float = math.inf,
    ) -> None:
        self.cores, self.engines_ms = cores, 0.0
        self.demand, self.cost, self.rng = demand, cost, Random(f"cluster {seed}")
        self.replicas = [Replica(machine) for machine in machines]
        by_prefix = routing == "prefix"
        self.routers = [
            Router(
                routing, len(machines), machines[0], demand.prefix_tokens, turn, warm and by_prefix
            )
            for turn in range(fronts)
        ]
        if warm:
            self._warm(by_prefix)
        self.free = [0.0] * fronts
        self.worked = [0.0] * fronts
        self.done: list[Job] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._left = demand.requests
        # As `overlap_spec.cluster.deployments` sets it.
        self._most_open = machines[0].running + max(2, machines[0].running // 4)
        weights = [(k + 1) ** -demand.skew for k in range(demand.prefixes)]
        self._shares = list(itertools.accumulate(weights))
        self._offered_until = 0.0

    def _warm(self, by_prefix: bool) -> None:
        tokens, count = self.demand.prefix_tokens, len(self.replicas)
        for index, replica in enumerate(self.replicas):
            held = range(min(self.demand.prefixes, replica.machine.kv_tokens // tokens))
            own = range(index, self.demand.prefixes, count) if by_prefix else held
            # The most popular one was used last.
            for prefix in reversed(own):
                replica.cached[prefix] = tokens

    def run(self) -> dict[str, Any]:
        """Run to the last answer; the figures."""
        if self.demand.rate:
            self._at(0.0, self._arrive_openly)
        for _ in range(self.demand.clients):
            self._at(0.0, self._arrive)
        while self._events:
            now, _, what = heapq.heappop(self._events)
            what(now)
        return self._figures()

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def _arrive_openly(self, now: float) -> None:
        self._arrive(now)
        if self._left:
            self._at(now + 1e3 * self.rng.expovariate(self.demand.rate), self._arrive_openly)

    def _arrive(self, now: float) -> None:
        if not self._left:
            return
        self._left -= 1
        self._offered_until = now
        demand, rng = self.demand, self.rng
        (prefix,) = rng.choices(range(demand.prefixes), cum_weights=self._shares)
        own = max(1, round(rng.expovariate(1 / demand.own_tokens)))
        output = max(1, round(rng.expovariate(1 / demand.output_tokens)))
        job = Job(prefix, own, output, now, front=rng.randrange(len(self.routers)))
        routed = self._front(job.front, now, self.cost.of_request(len(self.replicas)))
        self._at(routed, lambda when: self._route(job, when))

    def _front(self, front: int, now: float, work_ms: float) -> float:
        """When a front has done a piece of work that it is given now."""
        self.free[front] = max(self.free[front], now) + work_ms
        self.worked[front] += work_ms
        return self.free[front]

    def _route(self, job: Job, now: float) -> None:
        router = self.routers[job.front]
        order = router.order(job.prefix, now)
        free = (index for index in order if self.replicas[index].opened < self._most_open)
        index = next(free, order[0])
        router.sent(job.prefix, index, self.replicas[index].opened + 1, now)
        self.replicas[index].admit(job, self.demand.prefix_tokens)
        if not self.replicas[index].busy:
            self._step(index, now)

    def _step(self, index: int, now: float) -> None:
        replica = self.replicas[index]
        replica.busy = bool(replica.waiting or replica.running)
        if replica.busy:
            step_ms = replica.begin() * self._slowed()
            self.engines_ms += step_ms
            self._at(now + step_ms, lambda when: self._stepped(index, when))

    def _slowed(self) -> float:
        """How many times as long all takes as it would with cores enough."""
        if self.cores == math.inf:
            return 1.0
        taken = sum(replica.machine.cores for replica in self.replicas if replica.busy)
        return max(1.0, taken / self.cores)

    def _stepped(self, index: int, now: float) -> None:
        for job in self.replicas[index].end():
            seen = self._front(job.front, now, self.cost.piece_ms)
            job.first = job.first or seen
            if job.made >= job.output_tokens:
                self.routers[job.front].ended(index)
                job.ended = seen
                self.done.append(job)
                if self.demand.clients:
                    self._at(seen, self._arrive)
        self._step(index, now)

    def _figures(self) -> dict[str, Any]:
        """Of the requests but for the first fifth; rates are those while requests came."""
        begin = sorted(job.arrived for job in self.done)[len(self.done) // 5]
        jobs = [job for job in self.done if job.arrived >= begin]
        during = [job for job in self.done if begin < job.ended <= self._offered_until]
        seconds = 1e-3 * max(1e-9, self._offered_until - begin)
        return {
            "requests_per_second": len(during) / seconds,
            "output_tokens_per_second": sum(job.output_tokens for job in during) / seconds,
            "hit_rate": sum(job.hit for job in jobs) / len(jobs),
            "ttft_ms": _spread([job.first - job.arrived for job in jobs]),
            "e2e_ms": _spread([job.ended - job.arrived for job in jobs]),
            "engine_ms": self.engines_ms / len(self.done),
            "front_busy": max(self.worked) / max(job.ended for job in self.done),
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": mean(values)} | {f"p{p}": percentile(values, p) for p in (50, 99)}
