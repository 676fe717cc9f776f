"""Settings of a cluster of engines. Those of each engine and of its server are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, fields

from overlap_spec.config import EngineConfig, setting
from overlap_spec.errors import ConfigError

ROUTINGS = ("prefix", "load", "round-robin")


@dataclass(frozen=True)
class ClusterSettings:
    """How many engines there are, what each takes, and how requests find them."""

    replicas: int | None = setting(
        "Run so many engines, each in a replica of Ray Serve, behind one address (extra "
        "`cluster`); by default one engine without Ray."
    )
    max_replicas: int | None = setting(
        "Add replicas up to this number while requests wait, and take them away again.",
    )
    routing: str = setting(
        "How a request finds its replica: prefix (the one that has computed most of its prompt, "
        "unless it is far busier), load (the least busy), or round-robin.",
        "prefix",
    )
    fronts: int = setting("Processes that take requests and route them to replicas.", 1)
    cpus_per_replica: float = setting(
        "Cores that Ray reserves for a replica, which is given as many threads.",
        1.0,
    )
    gpus_per_replica: float | None = setting(
        "GPUs that Ray reserves for a replica; by default one for each rank, or none with --device "
        "cpu, or where the cluster has none."
    )
    ray_address: str | None = setting(
        "Ray cluster to run on (HOST:PORT, ray://…, or auto); by default a new one on this "
        "machine, which ends with the command."
    )

    def __post_init__(self) -> None:
        """Raise ConfigError that names the first invalid setting."""
        if self.max_replicas is not None and self.max_replicas < (least := self.replicas or 1):
            raise ConfigError(
                f"max_replicas must be at least replicas, {least}: {self.max_replicas}"
            )
        if self.routing not in ROUTINGS:
            raise ConfigError(f"routing must be one of {', '.join(ROUTINGS)}: {self.routing!r}")
        least_of = {"replicas": 1, "fronts": 1, "cpus_per_replica": 0, "gpus_per_replica": 0}
        for name, low in least_of.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}: {value}")
        if self.replicas is None:
            self._check_unused()

    def _check_unused(self) -> None:
        """A setting of replicas is an error where there are none, and is never ignored."""
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(f"{field.name} goes with replicas: set replicas, 1 or more")


def gpus_of(config: EngineConfig, cluster: ClusterSettings, there: float) -> float:
    """GPUs that a replica takes, of those that are ``there`` in the cluster: one for each rank, all
    on one machine, if nothing else is said."""
    if cluster.gpus_per_replica is not None:
        return cluster.gpus_per_replica
    if config.device == "cpu" or not there:
        return 0.0
    return float(config.tensor_parallel_size)
