"""The front's end of the link: an engine process, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from overlap_spec.link import messages as m

# Longest path of a Unix socket on the systems that there are.
LONGEST_PATH = 100
PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent.parent)


class Child:
    """One engine process. :meth:`start` makes one; :meth:`end` leaves nothing of it."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path
    ) -> None:
        self.process, self._socket, self._folder = process, socket, folder

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> Child:
        """Start a process that builds ``Engine(**settings)``; it answers `Hello` or `Broken`."""
        folder = Path(tempfile.mkdtemp(prefix="overlap-spec-"))
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.sndhwm = socket.rcvhwm = 0
        try:
            address, key = _bind(socket, folder)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "overlap_spec.link.host"),
                stdin=asyncio.subprocess.PIPE,
                # Whatever a library prints must not mix with the front's own output.
                stdout=2,
                env={**os.environ, "PYTHONPATH": _python_path()},
                # Ctrl-C ends the front, which ends the engine when it has drained.
                start_new_session=True,
            )
        except BaseException:
            socket.close(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        assert process.stdin is not None
        errand = {"address": address, "server_key": key, "settings": settings}
        process.stdin.write(json.dumps(errand).encode() + b"\n")
        return cls(process, socket, folder)

    def send(self, message: m.ToEngine) -> None:
        """Queue a message; it is gone where the process has died."""
        # Done at once, since the socket queues without bound: admission is bounded before it.
        self._socket.send(m.encode(message))

    async def receive(self) -> m.ToFront:
        """The next message."""
        return m.decode_to_front(await self._socket.recv())

    @property
    def how_ended(self) -> str:
        """Words for the process's end."""
        code = self.process.returncode
        if code is None:
            return "still runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    async def end(self, grace_s: float = 0.0) -> None:
        """End the process, politely for so long, and remove what it left."""
        if self.process.returncode is None and grace_s > 0:
            self.send(m.Quit())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _bind(socket: zmq.asyncio.Socket, folder: Path) -> tuple[str, str]:
    """Address and key for the engine: a private socket file, or where that cannot be, loopback
    with a key that only the engine is told."""
    path = f"ipc://{folder}/engine"
    if zmq.has("ipc") and len(path) <= LONGEST_PATH:
        socket.bind(path)
        return path, ""
    public, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_server = public, True
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return f"tcp://127.0.0.1:{port}", public.decode()


def _python_path() -> str:
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([PACKAGE_PARENT, *([given] if given else [])])
