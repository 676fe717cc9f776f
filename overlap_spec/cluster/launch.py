"""``overlap-spec serve --replicas``: runs the application on Ray Serve until a signal."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from overlap_spec.cluster import require_ray
from overlap_spec.cluster.settings import ClusterSettings, gpus_of
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError, EngineUnavailable
from overlap_spec.server.launch import ServerPlan
from overlap_spec.server.run import LOG_FORMAT, bind, tls_context
from overlap_spec.server.settings import ServerSettings

APP = "overlap-spec"
# Of the new cluster: answers and compiled grammars do not go through it, so that it stays empty.
OBJECT_STORE_BYTES = 100 * 2**20
# Ray's own limits are short for a machine that is busy while it starts, and Ray tells its makers of
# each cluster unless it is told not to. For the processes of the new cluster.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
# Bounds that are kept by this project's own HTTP server, which Ray Serve's stands in for.
OWN_SERVERS = ("max_connections", "header_timeout_s", "trusted_proxies")
log = logging.getLogger("overlap_spec")


def launch(plan: ServerPlan, cluster: ClusterSettings, log_level: str) -> None:
    """Serve until SIGTERM or SIGINT, and drain; SIGHUP replaces all replicas, one after the other.

    Raises:
        ConfigError: Ray is not installed, its cluster is too small or cannot be reached, the
            address cannot be used, or a setting is of no use here.
        EngineUnavailable: the replicas did not start.
    """
    require_ray()
    logging.basicConfig(format=LOG_FORMAT, level=log_level.upper())
    _check_settings(plan.settings)
    where, signals = _free_address(plan.settings), Signals()
    # A signal before anything is served ends the command too.
    with suppress(Stop), signals.caught(), _ray(plan.config, cluster), signals.caught():
        _run(plan, cluster, where, log_level, signals)


class Stop(BaseException):
    """SIGTERM or SIGINT."""


class Signals:
    """Signals to this process: those that end it raise `Stop` once; SIGHUP is kept."""

    def __init__(self) -> None:
        self.renew = threading.Event()
        self._stopping = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Handle signals inside the block. Ray has handlers of its own, which come with it."""
        kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = [signal.signal(kind, self._handle) for kind in kinds]
        try:
            yield
        finally:
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.renew.set()
        elif not self._stopping:
            self._stopping = True
            raise Stop


def _run(
    plan: ServerPlan,
    cluster: ClusterSettings,
    where: tuple[str, int],
    log_level: str,
    signals: Signals,
) -> None:
    from ray import serve
    from ray.exceptions import RayError

    from overlap_spec.cluster.deployments import build

    settings, (address, port) = plan.settings, where
    logs = {"log_level": log_level.upper(), "enable_access_log": log_level == "debug"}

    def deploy() -> None:
        serve.run(build(plan, cluster), name=APP, route_prefix="/", logging_config=logs)

    try:
        serve.start(
            http_options={
                "host": address,
                "port": port,
                "keep_alive_timeout_s": max(1, round(settings.idle_timeout_s)),
                "ssl_certfile": None if not settings.ssl_certfile else str(settings.ssl_certfile),
                "ssl_keyfile": None if not settings.ssl_keyfile else str(settings.ssl_keyfile),
            },
            logging_config=logs,
        )
        deploy()
        scheme = "https" if settings.ssl_certfile else "http"
        shown = f"[{address}]" if ":" in address else address
        log.info("serving on %s://%s:%s with %d replicas", scheme, shown, port, cluster.replicas)
        while True:
            signals.renew.wait()
            signals.renew.clear()
            log.info("replacing all replicas")
            deploy()
            log.info("replaced all replicas")
    except Stop:
        log.info("draining")
        # Its replicas end when their requests have: `shutdown` alone would end the proxies too.
        serve.delete(APP)
        log.info("drained")
    except (RuntimeError, RayError) as error:
        raise EngineUnavailable(f"the replicas did not start: {error}") from None
    finally:
        serve.shutdown()


@contextmanager
def _ray(config: EngineConfig, cluster: ClusterSettings) -> Iterator[None]:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if cluster.ray_address is None:
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(address=cluster.ray_address or "local", **options)
    except Exception as error:  # Ray raises plain ones
        where = f"ray_address {cluster.ray_address!r}" if cluster.ray_address else "Ray"
        raise EngineUnavailable(f"{where} cannot be started or reached: {error}") from None
    try:
        if cluster.ray_address is None:
            check_room(config, cluster, ray.cluster_resources())
        yield
    finally:
        ray.shutdown()


def check_room(config: EngineConfig, cluster: ClusterSettings, there: dict[str, float]) -> None:
    """Raise ConfigError where replicas would wait for ever for cores or GPUs; ``there``: what Ray's
    cluster has, by Ray's names."""
    count, cores = cluster.max_replicas or cluster.replicas or 1, cluster.cpus_per_replica
    gpus = gpus_of(config, cluster, there.get("GPU", 0.0))
    for name, each in (("CPU", cores), ("GPU", gpus)):
        if each * count > (has := there.get(name, 0.0)):
            raise ConfigError(
                f"replicas: {count} with {each:g} {name} each need {each * count:g}, and there are "
                f"{has:g}: lower {name.lower()}s_per_replica or replicas"
            )


def _check_settings(settings: ServerSettings) -> None:
    for name in OWN_SERVERS:
        if getattr(settings, name) != getattr(ServerSettings, name):
            raise ConfigError(
                f"{name} is a bound of the server without replicas: with replicas Ray Serve "
                "listens, which has no such bound; set it in a proxy in front"
            )
    tls_context(settings)


def _free_address(settings: ServerSettings) -> tuple[str, int]:
    """The address as numbers, and the port, where 0 is a free one; ConfigError if it is taken."""
    sockets = bind(settings.host, settings.port)
    try:
        host, port = sockets[0].getsockname()[:2]
        # Two servers can be bound alike until one listens.
        sockets[0].listen(1)
    except OSError as error:
        raise ConfigError(f"port: cannot listen on {settings.host}: {error.strerror}") from None
    finally:
        for each in sockets:
            each.close()
    return host, port
