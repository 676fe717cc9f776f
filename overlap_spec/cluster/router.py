"""Ray Serve's router of requests to replicas: the longest shared prefix, load, or in turn.

Ray Serve makes one in each front, and serialises the class by value with all of this module: what
it keeps must be in the instance.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from overlap_spec.cluster.calls import HttpCall
from overlap_spec.cluster.prefixes import USUAL_BLOCKS, PrefixMap

# Of a replica's routing stats: how many blocks its KV cache holds.
BLOCKS = "blocks"


class Router(RequestRouter):  # type: ignore[misc]
    """Ranks the replicas for each :class:`HttpCall`; Ray Serve sends it to the first that takes it.

    Its own count of open requests stands for a replica's load: Ray Serve's is asked for only now
    and then, and other fronts' requests show in it.
    """

    def initialize_state(self, routing: str, slack: int) -> None:
        """See Ray Serve.

        Args:
            routing: One of :data:`overlap_spec.cluster.settings.ROUTINGS`.
            slack: See :class:`PrefixMap`.
        """
        self.routing = routing
        self.prefixes = PrefixMap(USUAL_BLOCKS, slack)
        self._open = Counter[str]()
        # Ray Serve calls back from more than one thread.
        self._lock = threading.Lock()
        self._turns = itertools.count()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See Ray Serve: ranks, each of one replica."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        call = _call(pending_request)
        if pending_request is not None:
            # Without it Ray Serve would ask again at once while all replicas are full.
            pending_request.routing_context.should_backoff = True
        order = self._order(by_name, call)
        order.sort(key=call.avoid.__contains__)
        return [[by_name[name]] for name in order]

    def _order(self, names: Any, call: HttpCall) -> list[str]:
        if self.routing == "round-robin":
            ordered = sorted(names)
            first = next(self._turns) % max(1, len(ordered))
            return ordered[first:] + ordered[:first]
        blocks = call.blocks if self.routing == "prefix" else ()
        with self._lock:
            loads = {name: self._load(replica) for name, replica in names.items()}
            ranked = [choice.replica for choice in self.prefixes.rank(blocks, loads)]
            if ranked and blocks:
                # Before it is sent: those that come next are to find it.
                self.prefixes.insert(ranked[0], blocks)
        return ranked

    def _load(self, replica: RunningReplica) -> int:
        told = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(told, self._open[replica.replica_id.unique_id])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        # What each told by `record_routing_stats`, once it has.
        told = {
            replica.replica_id.unique_id: replica.routing_stats.get(BLOCKS) for replica in replicas
        }
        with self._lock:
            self.prefixes.keep(told)
            self._open = Counter({name: self._open[name] for name in told})

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        with self._lock:
            self._open[replica_id.unique_id] += 1

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """See Ray Serve: it may be another replica than the first of the ranks."""
        super().on_request_routed(pending_request, replica_id, result)
        call = _call(pending_request)
        if self.routing == "prefix" and call.blocks:
            with self._lock:
                self.prefixes.insert(replica_id.unique_id, call.blocks)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        with self._lock:
            self._open[replica_id.unique_id] = max(0, self._open[replica_id.unique_id] - 1)


def _call(pending: PendingRequest | None) -> HttpCall:
    found = pending.args[0] if pending is not None and pending.args else None
    return found if isinstance(found, HttpCall) else HttpCall({})
