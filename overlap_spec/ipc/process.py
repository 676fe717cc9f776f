"""The client's end of the connection: one engine process, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from overlap_spec.children import without_secrets
from overlap_spec.ipc import messages as m

# Longest path of the folder for temporary files, in characters: with what stands behind it, a Unix
# socket's path has at most 107.
LONGEST_PATH = 78
PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent.parent)


class EngineProcess:
    """One engine process. :meth:`start` makes it; :meth:`end` removes all of it."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path
    ) -> None:
        self.process, self._socket, self._folder = process, socket, folder

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> EngineProcess:
        """Start a process that builds ``Engine(**settings)`` and then sends `EngineReady` or
        `LoadFailed`. OSError: the system cannot start it."""
        short = None if len(tempfile.gettempdir()) <= LONGEST_PATH else "/tmp"
        folder = Path(tempfile.mkdtemp(prefix="overlap-spec-", dir=short))
        address = f"ipc://{folder}/engine"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.sndhwm = socket.rcvhwm = 0
        paths = filter(None, (PACKAGE_PARENT, os.environ.get("PYTHONPATH")))
        try:
            socket.bind(address)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "overlap_spec.ipc.server", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                # What a library prints must not mix with this process's own output.
                stdout=2,
                env={**without_secrets(os.environ), "PYTHONPATH": os.pathsep.join(paths)},
                # Ctrl-C reaches only this process, which drains before it ends the engine.
                start_new_session=True,
            )
        except BaseException:
            socket.close(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(m.LaunchArgs(address, settings)) + b"\n")
        return cls(process, socket, folder)

    def send(self, message: m.ToServer) -> None:
        """Queue a message; it is lost if the process has died."""
        # Does not block: the socket queues without a bound, and requests are bounded before it.
        self._socket.send(m.encode(message))

    async def receive(self) -> m.ToClient:
        """The next message."""
        message: m.ToClient = m.decode_to_client(await self._socket.recv())
        return message

    @property
    def exit_status(self) -> str:
        """How the process ended, in words."""
        code = self.process.returncode
        if code is None:
            return "still runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    async def end(self, grace_s: float = 0.0) -> None:
        """Ask the process to shut down, kill it after ``grace_s``, and remove its files."""
        if self.process.returncode is None and grace_s > 0:
            self.send(m.Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
