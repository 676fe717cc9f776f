"""The front and the engines as deployments of Ray Serve."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.cluster.calls import Answer, HttpCall, Messages, run_call, run_whole
from overlap_spec.cluster.front import REPLICA_HEADER, Front, ReplicaLost
from overlap_spec.cluster.prefixes import SAMPLE, capacity_of, slack_of
from overlap_spec.cluster.router import BLOCKS
from overlap_spec.cluster.settings import ClusterSettings, gpus_of
from overlap_spec.config import EngineConfig
from overlap_spec.errors import EngineUnavailable, QueueFull
from overlap_spec.server.app import create_app
from overlap_spec.server.launch import ServerPlan
from overlap_spec.server.service import Service

log = logging.getLogger(__name__)

ENGINES, FRONT = "engines", "front"
# How often Ray Serve looks whether a replica lives, and whether one that drains is done, in s.
HEALTH_PERIOD_S, DRAIN_POLL_S = 2.0, 0.5
# What a replica that has drained takes to end its engine, in seconds.
END_S = 15.0
# Requests wait before more replicas are started, and replicas have little to do before some are
# ended, for so long, in seconds.
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 15.0, 300.0
MOST_OPEN = 100_000
# How often a replica is started that does not come up: a wrong checkpoint will not get right.
STARTS = 3


class EngineReplica:
    """One engine with the application of one server, which requests reach as calls."""

    async def __init__(self, plan: ServerPlan) -> None:  # type: ignore[misc]  # as Ray Serve allows
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._engine = AsyncEngine(**plan.engine)
        self._app = create_app(self._engine, plan.settings)
        service: Service = self._app.state.service
        self._reader = service.constraints.reader
        await self._engine.start()
        self._reader.warm()
        pages = (await self._engine.snapshot())["pages"]
        sample_tokens = len(self._engine.tokenizer.encode(SAMPLE))
        self._blocks = capacity_of(pages * plan.config.page_size, sample_tokens)

    def record_routing_stats(self) -> dict[str, int]:
        """See Ray Serve: what the routers are told of this replica."""
        return {BLOCKS: self._blocks}

    async def respond(self, call: HttpCall) -> AsyncIterator[Messages]:
        """The messages of an answer, all that have come at a time."""
        async with contextlib.aclosing(run_call(self._app, call)) as batches:
            async for messages in batches:
                yield [self._named(message) for message in messages]

    async def answer(self, call: HttpCall) -> Answer:
        """A whole answer."""
        return await run_whole(self._app, call, self._name)

    def check_health(self) -> None:
        """See Ray Serve: an engine that dies is restarted inside its replica, one that could not
        be started again is not."""
        if self._engine.health == "closed":
            raise RuntimeError("the engine is closed")

    async def __del__(self) -> None:
        await self._reader.close()
        await self._engine.close()

    def _named(self, message: Message) -> Message:
        if message["type"] != "http.response.start":
            return message
        headers = [*message.get("headers", ()), (REPLICA_HEADER, self._name.encode())]
        return {**message, "headers": headers}


class RayReplicas:
    """The engines behind a handle of Ray Serve: the front's `Replicas`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streams = handle.options(method_name="respond", stream=True)

    async def respond(self, call: HttpCall) -> AsyncGenerator[Messages]:
        """See :class:`overlap_spec.cluster.front.Replicas`."""
        batches = self._streams.remote(call)
        has_ended = False
        try:
            async for messages in batches:
                yield messages
            has_ended = True
        except BackPressureError as error:
            raise QueueFull(str(error)) from error
        except RayServeException as error:
            raise EngineUnavailable(str(error)) from error
        except RayTaskError:
            # The application's own error.
            raise
        except RayError as error:
            raise ReplicaLost(f"{type(error).__name__}: the replica went away") from error
        finally:
            if not has_ended:
                batches.cancel()

    async def ask_all(self, call: HttpCall, timeout_s: float) -> list[Answer]:
        """See :class:`overlap_spec.cluster.front.Replicas`."""
        try:
            asked = self._handle.broadcast("answer", call)
            found = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
        except TimeoutError:
            raise EngineUnavailable(f"a replica gave no answer in {timeout_s:g} s") from None
        except RayServeException as error:
            raise EngineUnavailable(str(error)) from error
        for fault in found:
            if not isinstance(fault, Answer):
                log.warning("an answer to %s is left out: %r", call.scope["path"], fault)
        answers = sorted((a for a in found if isinstance(a, Answer)), key=lambda a: a.replica)
        if not answers:
            raise EngineUnavailable("no replica answers")
        return answers


def build(plan: ServerPlan, cluster: ClusterSettings) -> serve.Application:
    """The front, bound to the engines."""
    replicas = cluster.replicas or 1
    engines = serve.deployment(EngineReplica).options(
        name=ENGINES,
        **_scale(replicas, cluster.max_replicas, plan.config.max_running_requests),
        max_ongoing_requests=_most_open(plan.config),
        max_queued_requests=max(1, plan.settings.max_queued_requests),
        request_router_config=RequestRouterConfig(
            request_router_class="overlap_spec.cluster.router:Router",
            request_router_kwargs={
                "routing": cluster.routing,
                "slack": slack_of(plan.config.max_running_requests),
            },
        ),
        ray_actor_options={
            "num_cpus": cluster.cpus_per_replica,
            "num_gpus": gpus_of(plan.config, cluster, ray.cluster_resources().get("GPU", 0.0)),
        },
        **_life(plan),
    )
    settings = plan.settings

    def front() -> ASGIApp:
        app_name = serve.get_replica_context().app_name
        handle = serve.get_deployment_handle(ENGINES, app_name)
        return Front(RayReplicas(handle), settings).guarded()

    fronts = serve.deployment(serve.ingress(front)()).options(
        name=FRONT,
        num_replicas=cluster.fronts,
        max_ongoing_requests=MOST_OPEN,
        ray_actor_options={"num_cpus": 0},
        **_life(plan),
    )
    return fronts.bind(engines.bind(plan))


def _life(plan: ServerPlan) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        "max_constructor_retry_count": STARTS,
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_S,
        "graceful_shutdown_timeout_s": plan.settings.drain_timeout_s + END_S,
    }


def _scale(least: int, most: int | None, running: int) -> dict[str, Any]:
    if most is None or most == least:
        return {"num_replicas": least}
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        target_ongoing_requests=running,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=DOWNSCALE_DELAY_S,
    )
    return {"autoscaling_config": scaling}


def _most_open(config: EngineConfig) -> int:
    """Requests that a replica is given: a batch, and some to fill it up from; the others wait in
    the front for whichever replica is free first."""
    return config.max_running_requests + max(2, config.max_running_requests // 4)
