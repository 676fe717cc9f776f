"""Runs the server until a signal, and drains open requests before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Generator
from functools import partial
from typing import Any, cast

import uvicorn

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.errors import ConfigError
from overlap_spec.grammar.spec import Grammar
from overlap_spec.server.app import create_app
from overlap_spec.server.connections import Connection, Rooms, most_connections
from overlap_spec.server.loop_turns import FaultLog, timed_loop
from overlap_spec.server.service import Service
from overlap_spec.server.settings import ServerSettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Connections that are taken in one turn of the loop, and that wait for it in the system.
TAKEN_AT_ONCE, WAITING = 64, 2048
# How long a thread that makes a request or a reply keeps the interpreter from the loop, which needs
# it several times a request: with Python's 5 ms, six wakes of a loop beside a busy thread took up
# to 23 ms (p95), with this 0.1.
SWITCH_S = 0.001
# For the last events of streams that are ended.
LAST_EVENTS_S = 2.0
log = logging.getLogger("overlap_spec")


def serve(engine: AsyncEngine, settings: ServerSettings, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT; then reject new requests, wait at most ``drain_timeout_s``
    for the open ones, end those with an error, and close the engine.

    Raises:
        ConfigError: the address cannot be used.
        ConfigError, CheckpointError: the engine cannot be started.
    """
    logging.basicConfig(format=LOG_FORMAT, level=log_level.upper())
    sys.setswitchinterval(SWITCH_S)
    app = create_app(engine, settings)
    service: Service = app.state.service
    rooms = Rooms(most_connections(settings), service.metrics.refused.inc)
    config = uvicorn.Config(
        app,
        log_level=log_level,
        log_config=None,
        access_log=log_level == "debug",
        server_header=False,
        lifespan="off",
        backlog=TAKEN_AT_ONCE,
        # Whole seconds by their types, but not by what they do.
        timeout_graceful_shutdown=cast("int", settings.drain_timeout_s + LAST_EVENTS_S),
        timeout_keep_alive=cast("int", settings.idle_timeout_s),
        http=cast("Any", partial(Connection, settings, rooms, tls_context(settings))),
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )
    # Kept by the application: its first reader would hold the loop.
    app.openapi()
    # Before the engine loads, which takes long for nothing if a port is taken.
    sockets = bind(settings.host, settings.port)
    log.info("tool_call_parser: %s", settings.tool_call_parser or "none")
    # Noted until the loop handles it: an exit in the middle would leave half a loop, and a mask
    # holds for one thread alone.
    ends: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))
    # A signal while the engine loads cancels the task: there is nothing to drain.
    with (
        contextlib.suppress(asyncio.CancelledError),
        asyncio.Runner(loop_factory=timed_loop(service.metrics.turns)) as runner,
    ):
        runner.run(_serve(service, Server(config, service), sockets, ends))


async def _serve(
    service: Service, server: Server, sockets: list[socket.socket], ends: list[int]
) -> None:
    """``ends``: has a SIGTERM that came before the loop handles it."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if ends:
        task.cancel()
    loop.set_exception_handler(FaultLog())
    reader = service.constraints.reader
    try:
        async with service.engine:
            reader.warm()
            # Imports what the first request would.
            Grammar.json_schema("{}")
            # What is here stays: the collector of reference cycles need not look at it again.
            gc.collect()
            gc.freeze()
            await server.serve(sockets)
            log.info("drained; closing the engine")
    finally:
        await reader.close()


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """What speaks TLS, where the settings have a certificate; ConfigError where this or its key
    cannot be used."""
    if settings.ssl_certfile is None:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without a password a key that has one is an error, and not asked for at the terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, lambda: "")
    except (OSError, ValueError) as error:
        files = " and ".join(
            str(file) for file in (settings.ssl_certfile, settings.ssl_keyfile) if file is not None
        )
        raise ConfigError(f"ssl_certfile: cannot use {files}: {error}") from None
    return context


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets for all addresses of a name, which do not listen yet.

    Raises:
        ConfigError: there is no such address, or the port is taken.
    """
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ):
            bound.append(socket.socket(family, kind, protocol))
            bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound[-1].bind(address)
    except OSError as error:
        for each in bound:
            each.close()
        raise _unusable(host, port, error) from None
    return bound


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"port: cannot listen on {host}:{port}: {error.strerror or error}")


class Server(uvicorn.Server):
    """Logs its address, which a port of 0 leaves open; ends what still runs after the drain; does
    not raise its signal again."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        settings = self._service.settings
        try:
            await super().startup(sockets)
            for each in sockets or []:
                # Uvicorn has them listen for no more than it takes at once.
                each.listen(WAITING)
        except OSError as error:
            # Two servers can be bound alike until one listens.
            raise _unusable(settings.host, settings.port, error) from None
        self._service.metrics.turns.reset()
        scheme = "http" if settings.ssl_certfile is None else "https"
        for each in sockets or []:
            host, port = each.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            log.info("serving on %s://%s:%s", scheme, host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        settings, loop = self._service.settings, asyncio.get_running_loop()
        reason = f"the server ends, and the request did not in {settings.drain_timeout_s:g} s"
        end = loop.call_later(settings.drain_timeout_s, self._service.engine.end_open, reason)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Unlike uvicorn's, does not raise the signal again: the engine is still to be closed."""
        loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for each in signals:
            loop.add_signal_handler(each, self.handle_exit, each, None)
        try:
            yield
        finally:
            for each in signals:
                loop.remove_signal_handler(each)
