"""The engine's process, ``python -m overlap_spec.ipc.server PARENT``: a loop of messages and steps.

The first line of standard input has the launch arguments. When standard input closes, the client
is gone, and the process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from overlap_spec.children import end_with, end_with_input
from overlap_spec.engine import Engine
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import InvalidRequest, OverlapSpecError
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.ipc import messages as m
from overlap_spec.memory import rss_bytes, trim
from overlap_spec.stats import RequestStats, Standing
from overlap_spec.types import Delta, Output, Request

# Pause before the next try if requests wait but no step can be planned.
IDLE_POLL_MS = 1
# How long the engine is silent at most, but for a step that takes longer.
HEARTBEAT_S = 1.0
# Tokens, drafts and log-probabilities of a message, but for the last piece in it.
MOST_VALUES = 2**12
# Requests of which one answer tells.
MOST_STANDINGS = 256


class Compiling(NamedTuple):
    """A request whose grammar is being compiled."""

    request: Request
    future: Future[CompiledGrammar]


class EngineServer:
    """Runs one engine for one client. Requests go by the client's numbers."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self.engine, self.socket = engine, socket
        self.open: dict[int, RequestHandle] = {}
        self.compiling: dict[int, Compiling] = {}
        self.outputs = m.EngineOutputs()
        # A compiled grammar wakes an idle loop through this pipe.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._shutdown = False
        self._sent_s = time.monotonic()
        # Whether something was done since freed memory was given back to the system.
        self._untrimmed = True

    def run(self) -> None:
        """Serve until the client sends `Shutdown`."""
        busy = False
        while not self._shutdown:
            self._receive(0 if busy else IDLE_POLL_MS if self.open else round(1e3 * HEARTBEAT_S))
            self._admit_compiled()
            busy = self.engine.step()
            self._collect()
            self._send()

    def _receive(self, timeout_ms: int | None) -> None:
        """Handle all messages that are there; wait up to ``timeout_ms`` for the first."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_read in ready:
            os.read(self._wake_read, 65536)
        while self.socket in ready:
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            match m.decode_to_server(raw):
                case m.AddRequest() as message:
                    self._add(message)
                case m.AbortRequest(number):
                    self._abort(number)
                case m.Query(number) as query:
                    self.socket.send(m.encode(m.QueryResult(number, self._answer(query))))
                case m.Shutdown():
                    self._shutdown = True

    def _answer(self, query: m.Query) -> dict[str, Any]:
        match query.what:
            case "snapshot":
                return self._snapshot()
            case "requests":
                return self._snapshot() | {"requests": self._standings()}
            case "flush_cache":
                return {"pages": self.engine.flush_cache()}
            case "timeline":
                self.engine.gather_spans()
                spans = self.engine.timeline.spans()
                first = max((span.step for span in spans), default=0) - query.steps + 1
                return {"spans": [span._asdict() for span in spans if span.step >= first]}

    def _add(self, message: m.AddRequest) -> None:
        now, number = time.perf_counter_ns(), message.request.id
        request = dataclasses.replace(message.request, grammar=message.grammar, arrival_ns=now)
        if message.grammar is None:
            self._admit(number, request, None)
            return
        try:
            room = self.engine.sequences.room_tokens(request)
            future = self.engine.compiler.submit(message.grammar, request.holder, room)
        except Exception as error:
            self._reject(number, error)
            return
        self.compiling[number] = Compiling(request, future)

        def wake(_: object) -> None:
            # A full pipe wakes the loop as well; a closed one means that the loop has ended.
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"!")

        future.add_done_callback(wake)

    def _admit_compiled(self) -> None:
        for number, (request, future) in list(self.compiling.items()):
            if not future.done():
                continue
            del self.compiling[number]
            error = future.exception()
            if error is not None:
                self._reject(number, error)
            else:
                self._admit(number, request, future.result())

    def _admit(self, number: int, request: Request, compiled: CompiledGrammar | None) -> None:
        compile_ms = (time.perf_counter_ns() - request.arrival_ns) / 1e6 if compiled else 0.0
        try:
            self.open[number] = self.engine.admit(request, compiled, compile_ms)
        except Exception as error:
            self._reject(number, error)
        else:
            self.outputs.queued.append(number)

    def _reject(self, number: int, error: BaseException) -> None:
        error_type, text = type(error).__name__, str(error) or type(error).__name__
        failure = error.kind if isinstance(error, CompileFailure) else None
        param = error.param if isinstance(error, InvalidRequest) else None
        self.outputs.rejected.append(m.RejectedRequest(number, error_type, text, param, failure))

    def _abort(self, number: int) -> None:
        if number in self.open:
            self.engine.abort(self.open[number])
        elif (item := self.compiling.pop(number, None)) is not None:
            item.future.cancel()
            output = Output("", (), "abort", RequestStats())
            self.outputs.finished.append(m.FinishedRequest(number, output, None))

    def _collect(self) -> None:
        for number, handle in list(self.open.items()):
            while handle.deltas:
                self.outputs.deltas.append(m.RequestDelta(number, handle.deltas.popleft()))
            if handle.output is not None:
                # The client has the log-probabilities from the pieces.
                less: dict[str, Any] = {"parsed": None, "logprobs": (), "prompt_logprobs": ()}
                output = dataclasses.replace(handle.output, **less)
                self.outputs.finished.append(m.FinishedRequest(number, output, handle.error_type))
                self.engine.release([self.open.pop(number)])

    def _send(self) -> None:
        if self.outputs != m.EngineOutputs():
            for part in in_parts(self.outputs):
                self.socket.send(m.encode(part))
            self.outputs = m.EngineOutputs()
            self._untrimmed = True
        elif time.monotonic() - self._sent_s >= HEARTBEAT_S / 2:
            self.socket.send(m.encode(m.Heartbeat()))
            if self._untrimmed and not self.open and not self.compiling:
                self._untrimmed = False
                trim()
        else:
            return
        self._sent_s = time.monotonic()

    def _snapshot(self) -> dict[str, Any]:
        return {
            **self.engine.snapshot(),
            "open": len(self.open),
            "compiling": len(self.compiling),
            "compiler": self.engine.compiler.snapshot(),
            "rss_bytes": rss_bytes(),
            "memory_limit_bytes": self.engine.memory_limit_bytes,
            "pid": os.getpid(),
        }

    def _standings(self) -> list[Standing]:
        """Where requests stand, by the client's numbers: the first of them."""
        numbers = {handle.request.id: number for number, handle in self.open.items()}
        told = [each for each in self.engine.standings(MOST_STANDINGS) if each.id in numbers]
        known = [dataclasses.replace(each, id=numbers[each.id]) for each in told]
        now = time.perf_counter_ns()
        compiling = [
            Standing(number, "compiling", (now - request.arrival_ns) / 1e6, len(request.prompt_ids))
            for number, (request, _) in self.compiling.items()
        ]
        return [*known, *compiling][:MOST_STANDINGS]


def in_parts(outputs: m.EngineOutputs) -> Iterator[m.EngineOutputs]:
    """The outputs in the same order, in messages that the client decodes in some milliseconds:
    it does nothing else meanwhile."""
    part, size = m.EngineOutputs(outputs.rejected, outputs.queued), 0
    pieces: list[m.RequestDelta | m.FinishedRequest] = [*outputs.deltas, *outputs.finished]
    for piece in pieces:
        if isinstance(piece, m.RequestDelta):
            part.deltas.append(piece)
            size += _values(piece.delta)
        else:
            part.finished.append(piece)
            size += _values(piece.output)
        if size > MOST_VALUES:
            yield part
            part, size = m.EngineOutputs(), 0
    if part != m.EngineOutputs():
        yield part


def _values(piece: Delta | Output) -> int:
    tree = piece.tree if isinstance(piece, Delta) else None
    drafts = 0 if tree is None else len(tree.tokens)
    entries = [entry for entry in (*piece.logprobs, *piece.prompt_logprobs) if entry is not None]
    told = drafts + len(piece.choices)
    return len(piece.token_ids) + sum(1 + len(entry.top) for entry in entries) + told


def main() -> int:
    """Serve the client until it shuts the engine down; 1 if the engine cannot be loaded."""
    # Also where this process is stopped, and sees no end of standard input.
    end_with(int(sys.argv[1]))
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=m.LaunchArgs)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.sndhwm = socket.rcvhwm = 0
    socket.connect(arguments.address)
    # If the client is gone, perhaps killed, its socket's folder goes with this process.
    folder = Path(arguments.address.removeprefix("ipc://")).parent
    end_with_input(partial(shutil.rmtree, folder, ignore_errors=True))
    try:
        engine = Engine(**arguments.settings)
    except OverlapSpecError as error:
        socket.send(m.encode(m.LoadFailed(type(error).__name__, str(error))))
        socket.close(linger=5000)
        return 1
    with engine:
        # While the compiler's processes start; later a request would wait for it.
        while engine.prepare_next():
            pass
        config = dataclasses.asdict(engine.config)
        limits, vocab_size = engine.limits, engine.tokenizer.vocab_size
        socket.send(m.encode(m.EngineReady(limits, vocab_size, config)))
        EngineServer(engine, socket).run()
    socket.close(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
