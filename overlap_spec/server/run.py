"""Runs the server until a signal, and drains open requests before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Generator
from typing import Any

import uvicorn

from overlap_spec.async_engine import AsyncEngine
from overlap_spec.server.app import create_app
from overlap_spec.server.grammar_reader import GrammarReader
from overlap_spec.server.settings import ServerSettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
log = logging.getLogger("overlap_spec")


def serve(engine: AsyncEngine, settings: ServerSettings, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT; then reject new requests, wait at most ``drain_timeout_s``
    for the open ones, and close the engine.

    Raises:
        ConfigError, CheckpointError: the engine cannot be started.
    """
    logging.basicConfig(format=LOG_FORMAT, level=log_level.upper())
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level=log_level,
        log_config=None,
        access_log=log_level == "debug",
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
        timeout_keep_alive=30,
    )
    # A signal while the engine loads cancels the task: there is nothing to drain.
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(engine, Server(config), app.state.service.constraints.reader))


async def _serve(engine: AsyncEngine, server: Server, reader: GrammarReader) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with engine:
            await server.serve()
            log.info("drained; closing the engine")
    finally:
        await reader.close()


class Server(uvicorn.Server):
    """Logs its address, which a port of 0 leaves open; does not raise its signal again."""

    async def startup(self, sockets: Any = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for socket in server.sockets:
                host, port = socket.getsockname()[:2]
                log.info("serving on http://%s:%s", f"[{host}]" if ":" in host else host, port)

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
