"""The engine's process, ``python -m overlap_spec.link.host``: its loop of messages and steps.

The first line of standard input says where to connect and how to build the engine; its end says
that the front is gone, and ends the process.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq

from overlap_spec.engine import Engine
from overlap_spec.engine.request_handle import RequestHandle
from overlap_spec.errors import InvalidRequest, OverlapSpecError
from overlap_spec.grammar.contract import CompiledGrammar
from overlap_spec.grammar.isolation.limits import CompileFailure
from overlap_spec.link import messages as m
from overlap_spec.stats import RequestStats
from overlap_spec.types import Output, Request

# Where requests wait and no step can be planned, look again after so long.
NAP_MS = 1


class Errand(msgspec.Struct):
    """First line of standard input: where the front listens, its key where one is needed."""

    address: str
    server_key: str
    settings: dict[str, Any]


class Compiling(msgspec.Struct):
    """A request whose grammar is on its way."""

    request: Request
    future: Future[CompiledGrammar]


class Host:
    """Runs one engine for one front."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self.engine, self.socket = engine, socket
        self.open: dict[int, RequestHandle] = {}
        self.compiling: dict[int, Compiling] = {}
        self.news = m.News()
        # A compiled grammar wakes an idle loop through this pipe.
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._quit = False

    def run(self) -> None:
        """Until the front says `Quit`."""
        busy = False
        while not self._quit:
            self._receive(0 if busy else NAP_MS if self.open else None)
            self._admit_compiled()
            busy = self.engine.step()
            self._collect()
            self._send()

    def _receive(self, timeout_ms: int | None) -> None:
        """Handle all messages that are there; wait for one, at most so long."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._woken in ready:
            os.read(self._woken, 65536)
        while self.socket in ready:
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(m.decode_to_engine(raw))

    def _handle(self, message: m.ToEngine) -> None:
        match message:
            case m.Start():
                self._start(message)
            case m.Abort():
                self._abort(message.id)
            case m.Ask(what="snapshot"):
                self.socket.send(m.encode(m.Answer(message.id, self._snapshot())))
            case m.Ask():
                data = {"spans": self._last_spans(message.steps)}
                self.socket.send(m.encode(m.Answer(message.id, data)))
            case m.Quit():
                self._quit = True

    def _start(self, message: m.Start) -> None:
        now, number = time.perf_counter_ns(), message.request.id
        request = dataclasses.replace(message.request, grammar=message.grammar, arrival_ns=now)
        if message.grammar is None:
            self._admit(number, request, None)
            return
        try:
            future = self.engine.compiler.submit(message.grammar)
        except Exception as error:
            self._refuse(number, error)
            return
        self.compiling[number] = Compiling(request, future)
        future.add_done_callback(lambda _: self._nudge())

    def _nudge(self) -> None:
        try:
            os.write(self._wake, b"!")
        except OSError:
            # A full pipe wakes as well; a closed one means that nobody is left to be woken.
            return

    def _admit_compiled(self) -> None:
        for number, item in list(self.compiling.items()):
            if not item.future.done():
                continue
            del self.compiling[number]
            error = item.future.exception()
            if error is not None:
                self._refuse(number, error)
            else:
                self._admit(number, item.request, item.future.result())

    def _admit(self, number: int, request: Request, compiled: CompiledGrammar | None) -> None:
        compile_ms = (time.perf_counter_ns() - request.arrival_ns) / 1e6 if compiled else 0.0
        try:
            self.open[number] = self.engine.admit(request, compiled, compile_ms)
        except Exception as error:
            self._refuse(number, error)
        else:
            self.news.queued.append(number)

    def _refuse(self, number: int, error: BaseException) -> None:
        kind, text = type(error).__name__, str(error) or type(error).__name__
        failure = error.kind if isinstance(error, CompileFailure) else None
        param = error.param if isinstance(error, InvalidRequest) else None
        self.news.refused.append(m.Refused(number, kind, text, param, failure))

    def _abort(self, number: int) -> None:
        if number in self.open:
            self.engine.abort(self.open[number])
        elif (item := self.compiling.pop(number, None)) is not None:
            item.future.cancel()
            self.news.ended.append(m.Ended(number, Output("", (), "abort", RequestStats()), None))

    def _collect(self) -> None:
        for number, handle in list(self.open.items()):
            while handle.deltas:
                self.news.pieces.append(m.Piece(number, handle.deltas.popleft()))
            if handle.output is not None:
                output = dataclasses.replace(handle.output, parsed=None)
                kind = type(handle.error).__name__ if handle.error is not None else None
                self.news.ended.append(m.Ended(number, output, kind))
                self.engine.release([self.open.pop(number)])

    def _send(self) -> None:
        if self.news != m.News():
            self.socket.send(m.encode(self.news))
            self.news = m.News()

    def _snapshot(self) -> dict[str, Any]:
        return {
            **self.engine.snapshot(),
            "open": len(self.open),
            "compiling": len(self.compiling),
            "matchers": len(self.engine.core.lane.matchers),
            "compiler": self.engine.compiler.snapshot(),
            "rss_bytes": rss_bytes(),
            "pid": os.getpid(),
        }

    def _last_spans(self, steps: int) -> list[dict[str, Any]]:
        spans = self.engine.timeline.spans()
        first = max((span.step for span in spans), default=0) - steps + 1
        return [span._asdict() for span in spans if span.step >= first]


def rss_bytes() -> int:
    """Resident memory of this process; where that cannot be read, the most it ever was."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def connect(errand: Errand) -> zmq.Socket[bytes]:
    """The engine's end of the pair."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.sndhwm = socket.rcvhwm = 0
    if errand.server_key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = errand.server_key.encode()
    socket.connect(errand.address)
    return socket


def main() -> int:
    """Serve the front until it quits; 1 where the engine cannot be loaded."""
    errand = msgspec.json.decode(sys.stdin.buffer.readline(), type=Errand)
    socket = connect(errand)
    threading.Thread(target=_end_with_front, args=(errand.address,), daemon=True).start()
    try:
        engine = Engine(**errand.settings)
    except OverlapSpecError as error:
        socket.send(m.encode(m.Broken(type(error).__name__, str(error))))
        socket.close(linger=5000)
        return 1
    with engine:
        engine.compiler.warm()
        config = dataclasses.asdict(engine.config)
        hello = m.Hello(engine.input_processor.limits, engine.tokenizer.vocab_size, config)
        socket.send(m.encode(hello))
        Host(engine, socket).run()
    socket.close(linger=0)
    return 0


def _end_with_front(address: str) -> None:
    # Not through sys.stdin, whose lock a dying interpreter would wait for.
    while os.read(0, 4096):
        continue
    # The front is gone, perhaps without a word: nothing here is worth keeping.
    scheme, _, path = address.partition("://")
    if scheme == "ipc":
        shutil.rmtree(Path(path).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
